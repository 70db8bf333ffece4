"""Tunes and serves an adapter of Whisper: `python -m benchmarks.adapters whisper --checkpoint FOLDER`.

FOLDER is a checkpoint of Hugging Face for English, such as whisper-tiny.en. `espeak-ng` speaks the sentences
of `sentences.txt` in a Scottish voice, `training train --lora` tunes an adapter on them, and `export` makes
a bundle of the checkpoint and an adapter for it. Then the 30 sentences of `../quality/spoken.txt`, which are
not in training, and some of training are transcribed in fp32 with the adapter and without it, greedily and
with beams of 5:

    targets      Of the engine beside those of `generate` of transformers, with peft's model for the adapter.
    differences  The largest ones of log-probabilities from those of peft's model, for the engine's targets
                 with the adapter: those of the run's own model, and those that the engine gives as scores.
    wrong words  Of the sentences that are not in training, with and without the adapter.

Speed is not measured. The last line on standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import peft
import soundfile
import torch
from rapidfuzz.distance import Levenshtein
from torch import Tensor
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration
from transformers.utils import logging

from benchmarks.flags import positive
from benchmarks.hardware import describe_hardware
from benchmarks.quality.lost_speech import SENTENCES, as_spoken, speak_sentence, words
from benchmarks.report import bar, command, markdown, publish
from seq2seq_serve import load
from seq2seq_serve.bundle.audio import SAMPLE_RATE
from seq2seq_serve.export.huggingface.reference import (
    RandomBatch,
    their_log_probabilities,
    worst_difference,
)
from seq2seq_serve.protos.seq2seq_v1_pb2 import Hypothesis
from seq2seq_serve.server.library import Model
from seq2seq_serve.training.models.base import EncoderDecoder
from seq2seq_serve.training.models.options import PublishedConfig
from seq2seq_serve.training.models.transformer import Transformer
from seq2seq_serve.training.run import load_run

_TRAINING = Path(__file__).with_name("sentences.txt").read_text(encoding="utf-8").splitlines()
_VOICE, _LEAST_SPEED, _MOST_SPEED = "en-gb-scotland", 140, 175  # words a minute
_NUM_DEV, _NUM_HEARD = 4, 10  # of the sentences of training
_SETTINGS = {
    **{"learning_rate": 1e-3, "warmup_steps": 5, "cooldown_share": 0.5, "batch_tokens": 6000, "dropout": 0},
    "num_averaged": 1,
}
_TUNED = "tuned"
_BEAMS = (1, 5)
_MOST_TOKENS = 60  # of a target: without the adapter, the model may repeat itself without end


@dataclass(frozen=True)
class _Sound:
    """A sentence, and the file that has it."""

    path: Path
    text: str


def main(arguments: Sequence[str]) -> int:
    """Tune, serve and compare, and print one JSON object; returns 0 if every bar is met."""
    parser = command(
        "adapters whisper", __doc__, "--checkpoint whisper-tiny.en --out benchmarks/results/X.json"
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of a Whisper for English")
    parser.add_argument("--steps", type=positive, default=24, help="of training (default: %(default)s)")
    parser.add_argument("--threads", type=positive, default=1, help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory(prefix="whisper-") as temporary:
        folder = Path(temporary)
        training, unknown = _spoken(folder, "training", _TRAINING), _spoken(folder, "test", SENTENCES)
        seconds = _tune(training, folder, options)
        report = {
            "benchmark": "adapters whisper",
            "hardware": describe_hardware(),
            "checkpoint": options.checkpoint.name,
            "voice": _VOICE,
            "steps": options.steps,
            "sentences": len(training) - _NUM_DEV,
            "training_seconds": seconds,
            **_compared(unknown, training[_NUM_DEV:][:_NUM_HEARD], folder, options),
        }
    report["bars"] = bars = list(_bars(report))
    rows = [(one["name"], f"{one['value']:.3g}", one["bar"], "yes" if one["met"] else "no") for one in bars]
    print(markdown(("what", "value", "bar", "met"), rows), file=sys.stderr)
    publish(report, options.out)
    return 0 if all(one["met"] for one in bars) else 1


def _spoken(folder: Path, name: str, sentences: Sequence[str]) -> list[_Sound]:
    """Returns the sentences as files, the same ones each time."""
    chance, sounds = random.Random(name), []
    for number, sentence in enumerate(sentences):
        path = folder / f"{name}-{number}.wav"
        samples = speak_sentence(sentence, _VOICE, chance.randint(_LEAST_SPEED, _MOST_SPEED))
        soundfile.write(path, samples, SAMPLE_RATE)
        sounds.append(_Sound(path, sentence))
    return sounds


def _tune(sounds: Sequence[_Sound], folder: Path, options: argparse.Namespace) -> float:
    """Trains `folder/run`, and exports `folder/bundle` and `folder/adapter`; returns training's seconds."""
    for name, part in (("dev", sounds[:_NUM_DEV]), ("train", sounds[_NUM_DEV:])):
        lines = [f"{sound.path.name}\t{sound.text}\n" for sound in part]
        (folder / f"{name}.tsv").write_text("".join(lines), encoding="utf-8")
    settings = {"eval_interval_steps": options.steps, "checkpoint_interval_steps": options.steps} | _SETTINGS
    began = time.monotonic()
    _run(
        *("training", "train", "tiny", "--out", folder / "run", "--from", options.checkpoint),
        *("--tsv", folder / "train.tsv", "--dev-tsv", folder / "dev.tsv", "--lora", "rank=16"),
        *("--max-steps", options.steps, "--device", "cpu", "--threads", options.threads),
        *("--set", *(f"{name}={value}" for name, value in settings.items())),
    )
    seconds = time.monotonic() - began
    bundle = folder / "bundle"
    _run("export", "huggingface", options.checkpoint, bundle, "--adapters", "--precision", "fp32")
    _run("export", "adapter", folder / "run", bundle, folder / "adapter")
    return seconds


def _run(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", *map(str, arguments)], check=True, stdout=sys.stderr)


def _compared(
    unknown: Sequence[_Sound], known: Sequence[_Sound], folder: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Returns the numbers of equal targets, the wrong words of unknown sentences, and the differences."""
    sounds = [*unknown, *known]
    inputs = _features(sounds, options.checkpoint)
    adapted = peft.PeftModel.from_pretrained(_read(options.checkpoint), folder / "run" / "adapter")
    peers = {None: _read(options.checkpoint), _TUNED: adapted.eval()}
    rows, targets = [], list[list[int]]()
    with load(
        folder / "bundle",
        adapters={_TUNED: folder / "adapter"},
        provider="cpu",
        precision="fp32",
        threads=options.threads,
    ) as ours:
        for (adapter, peer), beam_size in product(peers.items(), _BEAMS):
            answers = _transcribed(ours, sounds, adapter, beam_size)
            found = [list(answer.token_ids) for answer in answers]
            if (adapter, beam_size) == (_TUNED, 1):
                targets = found
            expected = [_generated(peer, one, beam_size) for one in inputs]
            rows.append(
                {
                    "adapter": adapter is not None,
                    "beam_size": beam_size,
                    "equal_targets": sum(one == other for one, other in zip(found, expected, strict=True)),
                    "of": len(sounds),
                    "wrong_percent": _wrong_percent(unknown, [answer.text for answer in answers]),
                }
            )
            print(rows[-1], file=sys.stderr)
        given = zip(sounds, targets, strict=True)
        scores = [ours.score(sound.path.read_bytes(), ids, adapter=_TUNED) for sound, ids in given]
    log_probabilities = [list(score.log_probabilities) for score in scores]
    return {"targets": rows} | _differences(
        adapted, load_run(folder / "run").model, inputs, targets, log_probabilities
    )


def _read(checkpoint: Path) -> Any:
    return WhisperForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()


def _features(sounds: Sequence[_Sound], checkpoint: Path) -> list[Tensor]:
    """Returns the spectrograms (1, bands, frames) of transformers' extractor."""
    extract = WhisperFeatureExtractor.from_pretrained(checkpoint)
    contents = (soundfile.read(sound.path)[0] for sound in sounds)
    given = {"sampling_rate": SAMPLE_RATE, "return_tensors": "pt"}
    return [extract(samples, **given).input_features for samples in contents]


def _transcribed(
    ours: Model, sounds: Sequence[_Sound], adapter: str | None, beam_size: int
) -> list[Hypothesis]:
    options: dict[str, Any] = {"beam_size": beam_size, "max_new_tokens": _MOST_TOKENS}
    if beam_size > 1:
        options["length_penalty"] = 0.0
    contents = (sound.path.read_bytes() for sound in sounds)
    return [answer.hypotheses[0] for answer in ours.generate(contents, adapter=adapter, **options)]


@torch.inference_mode()
def _generated(peer: Any, features: Tensor, beam_size: int) -> list[int]:
    """Returns the target of transformers, without what is no text."""
    options = {"early_stopping": True, "length_penalty": 0.0} if beam_size > 1 else {}
    (found,) = peer.generate(
        input_features=features,
        num_beams=beam_size,
        do_sample=False,
        max_new_tokens=_MOST_TOKENS,
        **options,
    ).tolist()
    end: int = peer.generation_config.eos_token_id  # the first token that is no text
    return [token_id for token_id in found if token_id < end]


def _wrong_percent(sounds: Sequence[_Sound], texts: Sequence[str]) -> float:
    """Returns the wrong words in a hundred of these sounds, to which the first texts belong."""
    pairs = [(words(sound.text), as_spoken(words(text))) for sound, text in zip(sounds, texts, strict=False)]
    return 100 * sum(Levenshtein.distance(*pair) for pair in pairs) / sum(len(one) for one, _ in pairs)


def _differences(
    peer: Any,
    own: EncoderDecoder,
    inputs: Sequence[Tensor],
    targets: Sequence[list[int]],
    scores: Sequence[list[float]],
) -> dict[str, float]:
    """Returns the largest differences of log-probabilities from those of peft's model.

    Args:
        peer: The model of peft.
        own: The run's model.
        inputs: Spectrograms.
        targets: Those of the engine.
        scores: The engine's log-probabilities of these, the end included.
    """
    assert isinstance(own, Transformer)
    config, end = own.config, peer.generation_config.eos_token_id
    assert isinstance(config, PublishedConfig)
    assert config.media is not None
    of_model = of_engine = 0.0
    for features, target, score in zip(inputs, targets, scores, strict=True):
        ids = torch.tensor([[*config.frame.start_ids, *target]])
        mask = torch.ones(1, config.media.num_positions, dtype=torch.bool)
        batch = RandomBatch(features, mask, ids)
        expected = their_log_probabilities(peer, config.media, batch)
        of_model = max(of_model, worst_difference(own, [batch], [expected]))
        first = ids.shape[1] - len(target) - 1
        its = expected[0, range(first, ids.shape[1]), [*target, end]]
        of_engine = max(of_engine, float((torch.tensor(score) - its).abs().max()))
    return {"model_difference": of_model, "engine_difference": of_engine}


def _bars(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    wrong = {}
    for row in report["targets"]:
        name = f"{'with' if row['adapter'] else 'without'} the adapter, beam {row['beam_size']}"
        yield bar(f"equal targets {name}", row["equal_targets"] / row["of"], 1)
        wrong[row["adapter"], row["beam_size"]] = row["wrong_percent"]
    for beam_size in _BEAMS:
        ratio = wrong[True, beam_size] / wrong[False, beam_size]
        yield bar(f"wrong words, with over without, beam {beam_size}", ratio, 0.8, is_least=False)
    yield bar("log-probabilities, the run and peft", report["model_difference"], 1e-3, is_least=False)
    yield bar("log-probabilities, the engine and peft", report["engine_difference"], 1e-2, is_least=False)
