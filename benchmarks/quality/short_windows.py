"""Counts the words that shorter windows change: `python -m benchmarks.quality short-windows --models M`.

Whisper's encoder reads windows of 30 seconds. Of live speech it has heard a few, and silence follows. Here a
window is shorter: it has the sound and a margin of silence, but not less than a least window. M are
checkpoints of Hugging Face. Torch decodes greedily, without times in the target, as live speech does.

The sounds are sentences of `spoken.txt` that `espeak-ng` speaks, clean and in noise, each whole and up to
some place, which may be within a word; and parts of recordings. Differing words are those of 30 seconds
against those of a shorter window. Wrong words are counted in whole sounds of known text, with figures and
American spellings taken for the sentences' own. Torch should have one thread where others use the cores, too.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import zlib
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rapidfuzz.distance import Levenshtein
from torch import Tensor, nn
from transformers import AutoTokenizer, WhisperForConditionalGeneration

from benchmarks.hardware import describe_hardware
from benchmarks.quality.lost_speech import SENTENCES, VOICES, as_spoken, noisy, speak_sentence, words
from benchmarks.report import markdown, publish
from seq2seq_serve.bundle.audio import HOP, SAMPLE_RATE, Samples, log_mel, read_sound

_FULL_SECONDS = 30.0
_MARGINS = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds of silence after the sound
_LEAST_WINDOWS = (0.0, 5.0, 10.0, 15.0, 20.0)  # seconds
_STEP_SECONDS = 0.5  # to which a window is rounded up
_NOISES = (None, 20, 10)  # decibels
_NUM_SPOKEN, _LONGEST_SPOKEN = 16, 15.0
_LOOP_RATIO = 2.4  # of compression, from which a text counts as a repetition (Radford et al. 2022)


class _Sound(NamedTuple):
    """Something to transcribe; its text if it is whole and known."""

    name: str
    samples: Samples
    text: str | None

    @property
    def seconds(self) -> float:
        return len(self.samples) / SAMPLE_RATE


class _Heard(NamedTuple):
    words: list[str]
    is_loop: bool


def main(arguments: Sequence[str]) -> int:
    """Transcribe all sounds by all rules, and print a table for each checkpoint and a line of JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality short-windows",
        description=__doc__.partition("\n")[0],
    )
    parser.add_argument("task", choices=["short-windows"])
    parser.add_argument("--models", type=Path, nargs="+", required=True, help="checkpoints of Whisper")
    parser.add_argument("--recordings", type=Path, nargs="*", default=[], help="sounds of unknown texts")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON object to this file")
    options = parser.parse_args(arguments)
    results: list[dict[str, Any]] = []
    sounds = [*_spoken(), *_parts_of(options.recordings)]
    print(f"{len(sounds)} sounds of {sum(sound.seconds for sound in sounds):.0f} s", flush=True)
    for folder in options.models:
        whisper = _Whisper(folder)
        heard = [_hear(whisper, sound) for sound in sounds]
        rows = [
            _compared(least, margin, sounds, heard) for least, margin in product(_LEAST_WINDOWS, _MARGINS)
        ]
        rows.append(_compared(_FULL_SECONDS, 0.0, sounds, heard))
        print(
            f"\n{folder.name}\n\n" + markdown(list(rows[0]), [list(map(str, row.values())) for row in rows])
        )
        results += ({"model": folder.name, **row} for row in rows)
    report = {"benchmark": "short-windows", "hardware": describe_hardware(), "results": results}
    publish(report, options.out)
    return 0


def window_seconds(seconds: float, least: float, margin: float) -> float:
    """Returns the window of a sound by a rule."""
    steps = math.ceil(max(seconds + margin, least) / _STEP_SECONDS)
    return min(steps * _STEP_SECONDS, _FULL_SECONDS)


def _hear(whisper: _Whisper, sound: _Sound) -> dict[float, _Heard]:
    """Returns what is heard, by the window's seconds."""
    mel = log_mel(sound.samples, whisper.num_bands, round(_FULL_SECONDS * SAMPLE_RATE / HOP))
    rules = product(_LEAST_WINDOWS, _MARGINS)
    windows = {_FULL_SECONDS, *(window_seconds(sound.seconds, *rule) for rule in rules)}
    heard = {}
    for window in sorted(windows):
        text, is_cut = whisper.transcribe(
            mel[:, : round(window * SAMPLE_RATE / HOP)], math.ceil(20 * sound.seconds) + 20
        )
        content = text.encode()
        is_loop = is_cut or len(content) > _LOOP_RATIO * len(zlib.compress(content))
        heard[window] = _Heard(as_spoken(words(text)), is_loop)
    return heard


def _compared(
    least: float, margin: float, sounds: Sequence[_Sound], heard: Sequence[dict[float, _Heard]]
) -> dict[str, float | int]:
    """Returns the numbers of a rule over all sounds."""
    differing = num_words = wrong = num_true = loops = changed = 0
    for sound, by_window in zip(sounds, heard, strict=True):
        short, full = by_window[window_seconds(sound.seconds, least, margin)], by_window[_FULL_SECONDS]
        distance = Levenshtein.distance(full.words, short.words)
        differing, changed = differing + distance, changed + (distance > 0)
        num_words, loops = num_words + len(full.words), loops + short.is_loop
        if sound.text is not None:
            true = words(sound.text)
            wrong, num_true = wrong + Levenshtein.distance(true, short.words), num_true + len(true)
    return {
        "least_window_seconds": least,
        "margin_seconds": margin,
        "differing_words": differing,
        "words": num_words,
        "changed_sounds": changed,
        "sounds": len(sounds),
        "wrong_percent": round(100 * wrong / num_true, 2),
        "loops": loops,
    }


def _spoken() -> list[_Sound]:
    """Returns sounds of one sentence or more, each whole and up to some place."""
    sounds = []
    for seed in range(_NUM_SPOKEN):
        chance, samples, texts = random.Random(seed), np.zeros(0, np.float32), list[str]()
        longest = chance.uniform(2, _LONGEST_SPOKEN)
        voice, speed = VOICES[seed % len(VOICES)], chance.randint(135, 175)
        for sentence in chance.sample(SENTENCES, len(SENTENCES)):
            spoken = speak_sentence(sentence, voice, speed)
            pause = np.zeros(int(chance.uniform(0.2, 0.6) * SAMPLE_RATE) if texts else 0, np.float32)
            if texts and len(samples) + len(pause) + len(spoken) > longest * SAMPLE_RATE:
                break
            samples = np.concatenate([samples, pause, spoken])
            texts.append(sentence)
        decibels = _NOISES[seed // len(VOICES) % len(_NOISES)]
        if decibels is not None:
            samples = noisy(samples, decibels, seed)
        name = f"{voice}, {decibels} dB"
        sounds.append(_Sound(name, samples, " ".join(texts)))
        end = int(chance.uniform(SAMPLE_RATE, 0.9 * len(samples)))
        sounds.append(_Sound(f"{name}, a part", samples[:end], None))
    return sounds


def _parts_of(recordings: Sequence[Path]) -> list[_Sound]:
    """Returns each recording, and random parts of it that a live speaker might have said so far."""
    sounds = []
    for path in recordings:
        samples, chance = read_sound(path.read_bytes(), _FULL_SECONDS), random.Random(path.name)
        sounds.append(_Sound(path.name, samples, None))
        for _ in range(11):
            length = int(min(chance.uniform(1.5, _LONGEST_SPOKEN) * SAMPLE_RATE, len(samples)))
            begin = chance.randint(0, len(samples) - length) // HOP * HOP
            sounds.append(_Sound(f"{path.name}, a part", samples[begin : begin + length], None))
    return sounds


class _Whisper:
    """A checkpoint, whose encoder reads windows of any length."""

    def __init__(self, folder: Path) -> None:
        self._model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self.num_bands: int = self._model.config.num_mel_bins
        ids = self._tokenizer.convert_tokens_to_ids
        settings = json.loads((folder / "generation_config.json").read_text())
        languages = ["<|en|>", "<|transcribe|>"] if settings.get("is_multilingual") else []
        self._start = ids(["<|startoftranscript|>", *languages, "<|notimestamps|>"])
        self._eos = ids("<|endoftext|>")
        never = torch.tensor([*settings["suppress_tokens"], *range(self._start[-1], len(self._tokenizer))])
        self._penalties = torch.zeros(self._model.config.vocab_size).index_fill(0, never, -math.inf)
        at_first = torch.tensor(settings["begin_suppress_tokens"])
        self._first_penalties = self._penalties.index_fill(0, at_first, -math.inf)

    @torch.inference_mode()
    def transcribe(self, mel: Any, max_new_tokens: int) -> tuple[str, bool]:
        """Returns the text, and whether the limit cut it."""
        memory = (self._encode(torch.from_numpy(mel)[None]),)
        past, fed, token_ids = None, torch.tensor([self._start]), list[int]()
        while len(token_ids) < max_new_tokens:
            answer = self._model(
                decoder_input_ids=fed, encoder_outputs=memory, past_key_values=past, use_cache=True
            )
            past = answer.past_key_values
            penalties = self._penalties if token_ids else self._first_penalties
            token_id = int((answer.logits[0, -1] + penalties).argmax())
            if token_id == self._eos:
                break
            token_ids.append(token_id)
            fed = torch.tensor([[token_id]])
        return self._tokenizer.decode(token_ids), len(token_ids) == max_new_tokens

    def _encode(self, mel: Tensor) -> Tensor:
        """(1, bands, frames) to (1, frames / 2, D); transformers' own encoder takes 3,000 frames only."""
        encoder = self._model.model.encoder
        x = nn.functional.gelu(encoder.conv2(nn.functional.gelu(encoder.conv1(mel)))).transpose(1, 2)
        x = x + encoder.embed_positions.weight[: x.shape[1]]
        for layer in encoder.layers:
            x = layer(x, None)
            x = x[0] if isinstance(x, tuple) else x
        encoded: Tensor = encoder.layer_norm(x)
        return encoded
