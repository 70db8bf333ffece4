"""Counts lost words of ten long sounds: `python -m benchmarks.quality lost-speech --bundle B --weights W`.

The sounds are sentences of `spoken.txt` that `espeak-ng` speaks, with one voice or several, with pauses,
clean or in noise: 30 to 170 seconds, the same ones each time. B is a checkpoint of Whisper, and W has the
same weights as CTranslate2 loads them; without W, faster-whisper is not asked. All are greedy at first.
Wrong words are counted twice: as they are spelled, and with figures and American spellings taken for the
sentences' own. A word is lost if a way lacks its letters and windows ("sequential") have them, by the fewest
edits.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import soundfile
from rapidfuzz.distance import Levenshtein

from benchmarks.hardware import describe_hardware
from benchmarks.report import publish
from seq2seq_serve import load
from seq2seq_serve.bundle.audio import SAMPLE_RATE, Samples, read_sound
from seq2seq_serve.server.library import Model

SENTENCES = Path(__file__).with_name("spoken.txt").read_text(encoding="utf-8").splitlines()
VOICES = ("en-us", "en-gb", "en-us+m3", "en-us+f2", "en-gb+m7", "en-us+f4")
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
_SPELLINGS = {  # of words of the sentences, after `words`
    "3000": "three thousand",
    "40": "forty",
    "20": "twenty",
    "11": "eleven",
    "6": "six",
    "harbor": "harbour",
    "neighbor": "neighbour",
}
_RUN = 3  # lost words that follow each other
_WINDOWS = "windows"
_WAYS: dict[str, dict[str, Any]] = {
    _WINDOWS: {"long_source": "sequential"},
    "windows, voice activity": {"long_source": "sequential", "voice_activity": True},
    "split": {"long_source": "split"},
    "auto": {"long_source": "split", "voice_activity": True, "timestamps": True},
}


class Plan(NamedTuple):
    """A sound to make.

    Attributes:
        pauses: After a sentence one of these, in seconds.
        noise: The ratio of speech to noise in decibels; None without noise.
    """

    seconds: int
    pauses: tuple[float, ...]
    noise: float | None = None
    has_one_voice: bool = True


_PLANS = (
    Plan(31, (0.1, 0.3)),
    Plan(34, (0.3, 0.6)),
    Plan(45, (0.3, 1), noise=15),
    Plan(58, (0.3, 4, 9)),
    Plan(63, (0.05, 0.1), has_one_voice=False),
    Plan(80, (0.3, 0.6, 1, 4), noise=10),
    Plan(100, (0.2, 0.5, 12)),
    Plan(120, (0.1, 0.4)),
    Plan(150, (0.3, 1, 3), has_one_voice=False),
    Plan(170, (0.2, 0.5, 6), noise=20),
)


def main(arguments: Sequence[str]) -> int:
    """Make the sounds, transcribe them in each way, and print a table and a line of JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality lost-speech",
        description=__doc__.partition("\n")[0],
    )
    parser.add_argument("task", choices=["lost-speech"])
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--precision", default="fp32", help="(default: %(default)s)")
    parser.add_argument("--weights", type=Path, help="folder of the same weights for faster-whisper")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON object to this file")
    options = parser.parse_args(arguments)
    results: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder, load(options.bundle, precision=options.precision) as ours:
        paths, texts = zip(*(speak(Path(folder), *each) for each in enumerate(_PLANS)), strict=True)
        spoken, heard = [words(text) for text in texts], {}
        num_words = sum(map(len, spoken))
        ways: dict[str, Callable[[Sequence[Path]], list[str]]] = {
            name: partial(_here, ours, way) for name, way in _WAYS.items()
        }
        if options.weights:
            ways |= _ways_there(options.weights, options.precision)
        for name, way in ways.items():
            answers = [words(text) for text in way(paths)]
            heard[name] = [as_spoken(one) for one in answers]
            lost = [_lost(*each) for each in zip(spoken, heard[name], heard[_WINDOWS], strict=True)]
            wrong = sum(map(Levenshtein.distance, spoken, answers))
            misheard = sum(map(Levenshtein.distance, spoken, heard[name]))
            row = {
                "way": name,
                "wrong_percent": 100 * wrong / num_words,
                "misheard_percent": 100 * misheard / num_words,
                "lost_words": sum(map(sum, lost)),
                "lost_runs": [run for each in lost for run in each if run >= _RUN],
            }
            print(
                f"{name:24} {row['wrong_percent']:5.1f}% wrong words, {row['misheard_percent']:5.1f}% in any "
                f"spelling, {row['lost_words']:3} lost, in runs of {_RUN} or more: {row['lost_runs']}",
                flush=True,
            )
            results.append(row)
    report = {
        "benchmark": "lost-speech",
        "hardware": describe_hardware(),
        "bundle": options.bundle.name,
        "precision": options.precision,
        "words": num_words,
        "results": results,
    }
    publish(report, options.out)
    return 0


def _here(model: Model, way: dict[str, Any], paths: Sequence[Path]) -> list[str]:
    answers = model.generate((path.read_bytes() for path in paths), **way)
    return [answer.hypotheses[0].text for answer in answers]


def _ways_there(weights: Path, precision: str) -> dict[str, Callable[[Sequence[Path]], list[str]]]:
    from faster_whisper import BatchedInferencePipeline, WhisperModel  # optional

    def texts(transcribe: Callable[..., Any], paths: Sequence[Path]) -> list[str]:
        segments = [transcribe(str(path), beam_size=1)[0] for path in paths]
        return ["".join(one.text for one in each) for each in segments]

    model = WhisperModel(
        str(weights),
        compute_type={"fp32": "float32"}.get(precision, precision),
        device="cpu",
        cpu_threads=len(os.sched_getaffinity(0)),
    )
    return {
        "faster-whisper": partial(texts, model.transcribe),
        "faster-whisper, batched": partial(texts, BatchedInferencePipeline(model).transcribe),
    }


def speak(folder: Path, seed: int, plan: Plan) -> tuple[Path, str]:
    """Returns a file of sentences, and their text."""
    chance, num_samples = random.Random(seed), 0
    parts: list[Samples] = []
    texts: list[str] = []
    voice, speed = chance.choice(VOICES), chance.randint(135, 175)
    order = chance.sample(SENTENCES, len(SENTENCES))
    while num_samples < plan.seconds * SAMPLE_RATE:
        sentence = order[len(texts) % len(order)]
        one = voice if plan.has_one_voice else chance.choice(VOICES)
        pause = np.zeros(int(chance.choice(plan.pauses) * SAMPLE_RATE), np.float32)
        parts += [speak_sentence(sentence, one, speed), pause]
        texts.append(sentence)
        num_samples += len(parts[-2]) + len(pause)
    samples, path = np.concatenate(parts), folder / f"{seed}.wav"
    if plan.noise is not None:
        samples = noisy(samples, plan.noise, seed)
    soundfile.write(path, samples, SAMPLE_RATE)
    return path, " ".join(texts)


def speak_sentence(sentence: str, voice: str, speed: int) -> Samples:
    """Returns what `espeak-ng` speaks, at this number of words a minute."""
    command = ["espeak-ng", "-v", voice, "-s", str(speed), "--stdout", sentence]
    spoken = subprocess.run(command, check=True, capture_output=True).stdout
    return read_sound(spoken, 60)


def noisy(samples: Samples, decibels: float, seed: int) -> Samples:
    """Adds pink noise, whose power falls with the frequency as that of rooms and streets does."""
    white = np.random.default_rng(seed).standard_normal(len(samples))
    bands = np.fft.rfft(white) / np.sqrt(np.maximum(np.arange(len(samples) // 2 + 1), 1000))
    noise = np.fft.irfft(bands, len(samples))
    is_loud = np.abs(samples) > 1e-3
    ratio = np.sqrt(np.square(samples[is_loud]).mean() / np.square(noise).mean())
    mixed = samples + noise * ratio * 10 ** (-decibels / 20)
    return np.asarray(mixed / max(1, np.abs(mixed).max()), np.float32)


def words(text: str) -> list[str]:
    """Returns the words of a text, without case and marks."""
    return _WORD.findall(text.casefold().replace(",000", "000"))


def as_spoken(heard: Sequence[str]) -> list[str]:
    """Returns words with figures and American spellings as the sentences have them."""
    return [one for word in heard for one in _SPELLINGS.get(word, word).split()]


def _missing(spoken: Sequence[str], heard: Sequence[str]) -> set[int]:
    """Returns the places of the words most of whose letters have nothing in a transcript.

    Letters are aligned, not words: a word that is heard in place of four has their letters.
    """
    place_of_letter = [place for place, word in enumerate(spoken) for _ in word]
    edits = Levenshtein.editops("".join(spoken), "".join(heard))
    deleted = Counter(place_of_letter[edit.src_pos] for edit in edits if edit.tag == "delete")
    return {place for place, count in deleted.items() if 2 * count > len(spoken[place])}


def _lost(spoken: Sequence[str], heard: Sequence[str], windows: Sequence[str]) -> list[int]:
    """Returns the lengths of runs of words that windows have and another way lacks."""
    lost = sorted(_missing(spoken, heard) - _missing(spoken, windows))
    return [len(list(run)) for _, run in groupby(enumerate(lost), key=lambda each: each[1] - each[0])]
