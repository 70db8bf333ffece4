"""Transcribes 1, 8 and 32 sounds at once, here and in faster-whisper: `-m benchmarks.speech BUNDLE FOLDER`.

BUNDLE is a checkpoint of Whisper, FOLDER has the same weights as CTranslate2 loads them. The sounds are
sentences of `espeak-ng` with pauses, the same ones each time. In each round the four ways take turns, and the
best round of a way counts. All are greedy, in float32, with voice activity, on all CPUs. Neither network nor
server is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import soundfile
from rapidfuzz.distance import Levenshtein

from benchmarks.hardware import describe_hardware
from seq2seq_serve import load
from seq2seq_serve.bundle.audio import SAMPLE_RATE, read_sound
from seq2seq_serve.server.library import Model

_SENTENCES = (
    "The ship came into the harbour at dawn, and the whole town was there to see it.",
    "Scientists have found a new planet that is larger than the earth.",
    "My brother likes to play chess with our neighbour on Sunday afternoons.",
    "Please send me the report by Friday, because I will read it over the weekend.",
    "The train to London was late again, so we took the bus instead.",
)
_PAUSES = (0.3, 0.6, 1, 4, 9)  # seconds
_BATCH = 8  # windows, the default of faster-whisper's pipeline
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")


def main() -> None:
    """Make the sounds, transcribe them, and print a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("weights", type=Path, metavar="FOLDER")
    parser.add_argument("--counts", default="1,8,32", help="numbers of sounds at once (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    options = parser.parse_args()
    from faster_whisper import BatchedInferencePipeline, WhisperModel  # --help works without it

    counts, results = [int(count) for count in options.counts.split(",")], []
    with TemporaryDirectory() as folder, load(options.bundle, precision="fp32") as ours:
        sounds = [_speak(Path(folder), seed) for seed in range(max(counts))]
        on_cpus = {"device": "cpu", "cpu_threads": len(os.sched_getaffinity(0))}
        theirs = WhisperModel(str(options.weights), compute_type="float32", **on_cpus)
        batched = partial(BatchedInferencePipeline(theirs).transcribe, batch_size=_BATCH)
        ways: dict[str, Callable[[Sequence[Path]], list[str]]] = {
            "here, sequential": partial(_here, ours, "sequential"),
            "here, split": partial(_here, ours, "split"),
            "faster-whisper": partial(_there, theirs.transcribe),
            "faster-whisper, batched": partial(_there, batched),
        }
        for way in ways.values():
            way([sounds[0][0]])  # first-time work
        for count in counts:
            paths, texts, lengths = zip(*sounds[:count], strict=True)
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            wrong: dict[str, float] = {}
            for _ in range(options.rounds):
                for name, way in ways.items():
                    begin = time.perf_counter()
                    answers = way(paths)
                    seconds[name].append(time.perf_counter() - begin)
                    wrong[name] = _wrong_words(answers, texts)
            for name in ways:
                best, other = min(seconds[name]), min(seconds["faster-whisper"])
                speed = f"{sum(lengths) / best:6.1f} times real time, {other / best:5.2f} of faster-whisper"
                print(
                    f"{count:3} of {sum(lengths):.0f} s  {name:24} {speed}, {wrong[name]:5.1f}% wrong words"
                )
                results.append({"sounds": count, "way": name, "seconds": seconds[name], "wrong": wrong[name]})
    print(json.dumps({"benchmark": "speech", "hardware": describe_hardware(), "results": results}))


def _here(model: Model, long_source: str, paths: Sequence[Path]) -> list[str]:
    contents = (path.read_bytes() for path in paths)
    answers = model.generate(contents, long_source=long_source, voice_activity=True)
    return [answer.hypotheses[0].text for answer in answers]


def _there(transcribe: Callable[..., Any], paths: Sequence[Path]) -> list[str]:
    segments = [transcribe(str(path), beam_size=1, vad_filter=True)[0] for path in paths]
    return ["".join(one.text for one in each) for each in segments]


def _speak(folder: Path, seed: int) -> tuple[Path, str, float]:
    """Returns a file of some sentences with pauses, its text, and its seconds."""
    chance, parts, texts = random.Random(seed), [], []
    for sentence in chance.sample(_SENTENCES, len(_SENTENCES)):
        command = ["espeak-ng", "-v", "en-us", "-s", str(chance.randint(140, 170)), "--stdout", sentence]
        spoken = subprocess.run(command, check=True, capture_output=True).stdout
        pause = np.zeros(int(chance.choice(_PAUSES) * SAMPLE_RATE), np.float32)
        parts += [read_sound(spoken, 60), pause]
        texts.append(sentence)
    samples, path = np.concatenate(parts), folder / f"{seed}.wav"
    soundfile.write(path, samples, SAMPLE_RATE)
    return path, " ".join(texts), len(samples) / SAMPLE_RATE


def _wrong_words(texts: Sequence[str], expected: Sequence[str]) -> float:
    """Returns the wrong words in a hundred."""
    pairs = [[_WORD.findall(text.casefold()) for text in pair] for pair in zip(texts, expected, strict=True)]
    return 100 * sum(Levenshtein.distance(*pair) for pair in pairs) / sum(len(right) for _, right in pairs)


if __name__ == "__main__":
    main()
