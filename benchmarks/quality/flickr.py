"""Captions of photos: `python -m benchmarks.quality flickr8k --data DIR`, a demonstration with few photos.

Trains two captioners on the photos of Flickr8k's training split that the folder has. One starts with random
weights, the other with the tokenizer and the decoder of a language model of all captions of the training
split. The photos of the test split are captioned through the server, and scored with BLEU-1 to 4 against
their five captions (Hodosh et al. 2013, JAIR 47).
"""

from __future__ import annotations

import argparse
import gzip
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from sacrebleu.metrics.bleu import BLEU

from benchmarks.hardware import describe_hardware
from benchmarks.quality.recipe import PRECISIONS, Recipe, add_run_flags, ask, describe_run, run, train
from seq2seq_serve.client import GenerateOptions
from seq2seq_serve.training.data.corpus import CorpusFiles
from seq2seq_serve.training.data.text_files import write_lines
from seq2seq_serve.training.run import RunFolder

_SPLITS = {split: f"Flickr_8k.{split}Images.txt" for split in ("train", "dev", "test")}
_CAPTIONS, _PHOTOS = "Flickr8k.token.txt.gz", "images_1000_thumb.tar"
_BEAM_SIZE = 5
_ORDERS = 1, 2, 3, 4
# The language model and the captioners are of one size: a captioner takes the decoder as it is.
_SIZES = {"vocab_size": 3000, "d_model": 192, "d_hidden": 384, "dropout": 0.4, "max_target_length": 64}
_MAX_STEPS = 1500  # 13 passes over the photos
_SETTINGS = {**_SIZES, "eval_interval_steps": 250}


def write_corpora(data: Path, folder: Path) -> tuple[CorpusFiles, CorpusFiles, dict[Path, list[str]]]:
    """Unpack the photos, and write the corpora; photos that are there are not unpacked again.

    Returns:
        The captions alone, as a language model reads them; the photos with captions; and the captions of each
        photo of the test split.

    Raises:
        OSError: A file is missing or cannot be read.
    """
    captions: dict[str, list[str]] = {}
    with gzip.open(data / _CAPTIONS, "rt", encoding="utf-8") as lines:
        for line in lines:
            name, text = line.rstrip("\n").split("\t")
            captions.setdefault(name.partition("#")[0], []).append(_words(text))
    photos = folder / "photos"
    if not photos.is_dir():
        temporary = folder / "photos.tmp"
        with tarfile.open(data / _PHOTOS) as archive:
            archive.extractall(temporary, filter="data")
        temporary.rename(photos)
    files = {path.name: path for path in photos.rglob("*.jpg")}
    names = {split: (data / file).read_text().split() for split, file in _SPLITS.items()}
    for split in ("train", "dev"):
        texts = [(name, text) for name in names[split] for text in captions[name]]
        write_lines(folder / f"{split}.captions.tsv", [f"{name}\t{text}" for name, text in texts])
        seen = [f"{files[name].relative_to(folder)}\t{text}" for name, text in texts if name in files]
        write_lines(folder / f"{split}.photos.tsv", seen)
    corpora = [
        CorpusFiles(tsv=str(folder / f"train.{kind}.tsv"), dev_tsv=str(folder / f"dev.{kind}.tsv"))
        for kind in ("captions", "photos")
    ]
    test = {files[name]: captions[name] for name in names["test"] if name in files}
    return corpora[0], corpora[1], test


def _words(text: str) -> str:
    """A caption in lower case without punctuation, as published scores compare them."""
    return " ".join("".join(c if c.isalnum() or c == " " else " " for c in text.lower()).split())


def main(arguments: Sequence[str]) -> int:
    """Train, serve and score; returns the exit code of `benchmarks.quality.recipe.run`."""
    options = _parser().parse_args(arguments)
    path = options.run or Path("runs") / "quality-flickr8k"
    seed = {} if options.seed is None else {"seed": options.seed}
    settings = {**_SETTINGS, **seed, **dict(options.set)}
    max_steps = options.max_steps or _MAX_STEPS

    def measured(console: Console) -> dict[str, Any]:
        captions, photos, test = write_corpora(options.data, path / "corpus")
        language_model = Recipe("captioner", {**settings, "source": "nothing"}, max_steps)
        train(captions, path / "language-model", language_model, console)
        systems = {}
        for name, parent in (("random", None), ("pre-trained", path / "language-model")):
            console.rule(name)
            folder = path / name
            recipe = Recipe("captioner", {**settings, "source": "picture"}, max_steps)
            train(photos, folder, recipe, console, parent)
            systems[name] = describe_run(folder) | caption_all(folder, test, console)
        return {
            "benchmark": "quality",
            "task": "flickr8k",
            "hardware": describe_hardware(),
            "language_model_dev_loss": RunFolder(path / "language-model").read_summary().dev_loss,
            "systems": systems,
        }

    return run(measured, table, options.data, options.out)


def caption_all(path: Path, test: dict[Path, list[str]], console: Console) -> dict[str, Any]:
    """Export the run, and caption the photos through the server; returns BLEU-1 to 4 and some captions."""
    references = [list(column) for column in zip(*test.values(), strict=True)]
    report: dict[str, Any] = {"test": len(test), "bleu": {}}
    for precision, results in ask(path, list(test), console, GenerateOptions(beam_size=_BEAM_SIZE)):
        texts = [result.text for result in results]
        scorers = {order: BLEU(max_ngram_order=order, tokenize="none", force=True) for order in _ORDERS}
        scores = {order: scorer.corpus_score(texts, references).score for order, scorer in scorers.items()}
        report["bleu"][precision] = scores
    report["captions"] = dict(zip([file.stem for file in test][:5], texts, strict=False))
    return report


def table(report: dict[str, Any]) -> str:
    """Returns the scores as a Markdown table."""
    lines = [
        f"language model: {report['language_model_dev_loss']:.2f} nats a token on dev",
        "",
        "| decoder starts | BLEU-1 | BLEU-2 | BLEU-3 | BLEU-4, fp32 | BLEU-4, int8 |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, system in report["systems"].items():
        fp32, int8 = (system["bleu"][precision] for precision in PRECISIONS)
        cells = [*(f"{fp32[order]:.1f}" for order in _ORDERS), f"{int8[4]:.1f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality flickr8k",
        allow_abbrev=False,
        description="Caption photos with and without a pre-trained decoder, through the server.",
    )
    parser.add_argument("task", choices=("flickr8k",))
    parser.add_argument("--data", type=Path, required=True, help="folder with the photos and captions")
    add_run_flags(parser)
    return parser
