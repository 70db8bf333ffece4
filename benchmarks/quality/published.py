"""Compares the precisions of published checkpoints: `python -m benchmarks.quality published --models FOLDER`.

FOLDER holds checkpoints in Hugging Face's format, Whisper's and the Marian that sets stress marks in Russian
texts, and recordings (`*.wav`). Each checkpoint is imported in fp32, int8 and, if its proof holds, int4,
unless its bundle is there. Whisper transcribes the recordings and sentences that `espeak-ng` speaks: the word
error rate is that of these sentences, and the words that differ are counted between the precisions. The
Marian marks `russian.txt`; two targets have equal stress marks if the same vowels are marked in the same
order, whatever letters it drops.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rapidfuzz.distance import Levenshtein
from rich.console import Console
from rich.table import Table

from benchmarks.hardware import describe_hardware
from seq2seq_serve import load
from seq2seq_serve.bundle.manifest import load_bundle
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.export.__main__ import main as export
from seq2seq_serve.server.library import Model

_RUSSIAN = Path(__file__).with_name("russian.txt")
_STRESSED = re.compile(r"([аеёиоуыэюя])'", re.IGNORECASE)
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
_SPOKEN = (
    ("en", "The ship came into the harbour at dawn, and the whole town was there to see it."),
    ("en", "Scientists have found a new planet that is larger than the earth."),
    ("en", "My brother likes to play chess with our neighbour on Sunday afternoons."),
    ("de", "Der Zug nach München fährt heute von einem anderen Gleis ab."),
    ("fr", "Le train pour Paris partira demain matin à huit heures."),
    ("es", "El tren para Madrid sale mañana por la mañana a las ocho."),
)


def main(arguments: Sequence[str]) -> int:
    """Import, answer and compare; returns 0."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality published",
        description=__doc__.partition("\n")[0],
    )
    parser.add_argument("task", choices=["published"])
    parser.add_argument("--models", type=Path, required=True, help="folder of checkpoints and recordings")
    parser.add_argument("--bundles", type=Path, help="folder of their bundles (default: bundles in --models)")
    options = parser.parse_args(arguments)
    bundles = options.bundles or options.models / "bundles"
    results: list[dict[str, Any]] = []
    with TemporaryDirectory() as sounds:
        spoken = [(language, text, _speak(text, language, Path(sounds))) for language, text in _SPOKEN]
        for config in sorted(options.models.glob("*/config.json")):
            kind = json.loads(config.read_text()).get("model_type")
            if kind not in ("whisper", "marian"):
                continue
            bundle = bundles / config.parent.name
            command = ["huggingface", str(config.parent), str(bundle), "--precision", "fp32,int8,int4"]
            if not bundle.exists() and export(command):
                raise SystemExit(f"{config.parent} was not imported")
            for precision in sorted(load_bundle(bundle).manifest.variants.keys() - {Precision.FP32}):
                name = f"{config.parent.name}, {precision}"
                with load(bundle, precision="fp32") as exact, load(bundle, precision=precision) as rounded:
                    if kind == "whisper":
                        recordings = sorted(options.models.glob("*.wav"))
                        results += _transcribed(name, exact, rounded, recordings, spoken)
                    else:
                        results.append(_marked(name, exact, rounded))
    Console().print(_table(results))
    print(json.dumps({"benchmark": "published", "hardware": describe_hardware(), "results": results}))
    return 0


def _transcribed(
    name: str,
    exact: Model,
    rounded: Model,
    recordings: Sequence[Path],
    spoken: Sequence[tuple[str, str, Path]],
) -> list[dict[str, Any]]:
    """Returns the word errors of both precisions, and the words that differ between them, by sound."""
    languages = exact.description.choices["source_language"].names if exact.description.choices else ["en"]
    results = []
    for language, text, sound in [("en", "", path) for path in recordings] + list(spoken):
        if language not in languages:
            continue
        options = {"source_language": language} if exact.description.choices else {}
        texts = [model.transcribe(sound, **options) for model in (exact, rounded)]
        words = [_WORD.findall(one.casefold()) for one in (text, *texts)]
        rates = [Levenshtein.distance(words[0], one) / len(words[0]) if text else None for one in words[1:]]
        results.append(
            {
                "model": name,
                "what": f"{sound.name} ({language})" if not text else f"{language}: {text[:30]}…",
                "word_error_rates": rates,
                "words_that_differ": Levenshtein.distance(*words[1:]),
                "of": len(words[1]),
            }
        )
    return results


def _marked(name: str, exact: Model, rounded: Model) -> dict[str, Any]:
    """Returns the shares of sentences with equal stress marks, and of equal targets, in both precisions."""
    lines = _RUSSIAN.read_text().splitlines()
    pairs = list(zip(exact.translate(lines), rounded.translate(lines), strict=True))
    return {
        "model": name,
        "what": _RUSSIAN.name,
        "equal_marks": sum(stressed(one) == stressed(other) for one, other in pairs),
        "equal_targets": sum(one == other for one, other in pairs),
        "of": len(lines),
    }


def stressed(text: str) -> list[str]:
    """Returns the vowels that a text marks, in order."""
    return [vowel.casefold() for vowel in _STRESSED.findall(text)]


def _speak(text: str, language: str, folder: Path) -> Path:
    path = folder / f"{len(list(folder.iterdir()))}.wav"
    subprocess.run(["espeak-ng", "-v", language, "-w", str(path), text], check=True)
    return path


def _table(results: Sequence[dict[str, Any]]) -> Table:
    table = Table("checkpoint", "read", "word errors in fp32, and in this precision", "fp32 against it")
    for result in results:
        if "equal_marks" in result:
            of = result["of"]
            same = f"{result['equal_marks']} of {of} marked alike, {result['equal_targets']} equal"
            table.add_row(result["model"], result["what"], "", same)
            continue
        rates = [f"{rate:.0%}" for rate in result["word_error_rates"] if rate is not None]
        differ = f"{result['words_that_differ']} of {result['of']} words differ"
        table.add_row(result["model"], result["what"], ", ".join(rates), differ)
    return table
