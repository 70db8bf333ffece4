"""The training runs of `benchmarks.quality`: started, resumed or reused; and its command line."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import track

from benchmarks.flags import positive
from benchmarks.quality.choice import server_flags
from benchmarks.serving import serving
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.client import Client, ClientError, GenerateOptions
from seq2seq_serve.client.rpcs import Translated
from seq2seq_serve.export.exporter import export_bundle
from seq2seq_serve.training.__main__ import add_set_flag
from seq2seq_serve.training.config import ModelConfig
from seq2seq_serve.training.data.corpus import Corpus, CorpusFiles, load_corpus
from seq2seq_serve.training.interrupt import TrainingInterrupted
from seq2seq_serve.training.models.registry import source_kind_of
from seq2seq_serve.training.prepare import continue_run, start_run
from seq2seq_serve.training.presets import Preset, preset_named
from seq2seq_serve.training.run import RunFolder, load_run

PRECISIONS = Precision.FP32, Precision.INT8


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings of the training run.

    Attributes:
        preset: Preset of a new run.
        settings: Fields that override the preset in a new run; an existing run must have the same values.
        max_steps: Number of training steps; None means the preset's number.
    """

    preset: str
    settings: Mapping[str, Any]
    max_steps: int | None


def train(
    files: CorpusFiles, path: Path, recipe: Recipe, console: Console, parent: Path | None = None
) -> None:
    """Start or resume the run, and train it to its end; a new run starts from the parent run, if given.

    Raises:
        ValueError: The existing run was started with other settings.
    """
    folder = RunFolder(path)
    changes = {} if recipe.max_steps is None else {"max_steps": recipe.max_steps}
    if not folder.is_run:
        preset, given = preset_named(recipe.preset), load_run(parent) if parent else None
        if given:
            preset = dataclasses.replace(preset, model=given.config)
        preset = preset.changed({**recipe.settings, **changes})
        corpus = _corpus(files, preset.model, preset.training.seed, folder)
        start_run(folder, preset, corpus, files, given)
    config = folder.read_config()
    started = Preset(config.preset, config.model, config.training)
    if started.changed(recipe.settings) != started:
        raise ValueError(f"{path} was started with other settings: give another --run")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    again = None if files.is_built_in else _corpus(files, config.model, config.training.seed, folder)
    continue_run(folder, again, device, console, changes)


def _corpus(files: CorpusFiles, model: ModelConfig, seed: int, folder: RunFolder) -> Corpus:
    return load_corpus(files, seed, source_kind_of(model), folder.pictures)


def answered(results: Iterable[Translated]) -> Iterator[Translated]:
    """Yields the results of a client; raises the error of the first that failed."""
    for result in results:
        if result.error is not None:
            raise result.error
        yield result


def ask(
    path: Path,
    sources: Sequence[Path | Mapping[str, str]],
    console: Console,
    options: GenerateOptions | None = None,
) -> Iterator[tuple[Precision, list[Translated]]]:
    """Exports a run to `path`/bundle, and yields a server's answers in each precision.

    Args:
        path: The run.
        sources: Files, or texts by name.
        console: Shows the progress.
        options: As for the client.
    """
    bundle = path / "bundle"
    export_bundle(load_run(path), bundle, list(PRECISIONS), overwrite=True, report=console.log)
    for precision in PRECISIONS:
        with serving(bundle, server_flags(precision)) as server, Client(server.address) as client:
            contents = (each.read_bytes() if isinstance(each, Path) else each for each in sources)
            results = client.translate_many(contents, options=options)
            shown = track(results, precision, total=len(sources), console=console)
            yield precision, list(answered(shown))


def run(
    measured: Callable[[Console], dict[str, Any]],
    table: Callable[[dict[str, Any]], str],
    data: Path | None,
    out: Path | None,
) -> int:
    """Measure, and print the report as a table and as one line of JSON.

    Args:
        measured: Trains, serves and scores; returns the report.
        table: Formats the report for people.
        data: The folder of the corpus, for the message about a missing file.
        out: Receives the JSON object, too.

    Returns:
        0 if done, 1 if it failed, 130 or 143 if it was interrupted; the same command resumes it.
    """
    console = Console(stderr=True)
    logging.basicConfig(
        level=logging.INFO, format="%(message)s", handlers=[RichHandler(console=console, show_path=False)]
    )
    logging.getLogger("sacrebleu").setLevel(logging.ERROR)  # it warns of tokenised texts
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        if out:  # fail before hours of work, not after them
            out.parent.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=out.parent).close()
        report = measured(console)
    except (ClientError, OSError, RuntimeError, ValueError) as error:
        reason = str(error)
        name = getattr(error, "filename", None)
        if isinstance(error, FileNotFoundError) and data and Path(name or "").is_relative_to(data):
            reason = f"{name}: {error.strerror} (benchmarks/README.md lists the files of --data)"
        print(f"error: {reason}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print("interrupted: run the same command again to resume", file=sys.stderr)
        return 128 + (
            interrupt.signal_number if isinstance(interrupt, TrainingInterrupted) else signal.SIGINT
        )
    print(table(report))
    print(json.dumps(report, ensure_ascii=False))
    if out:
        out.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the training run and of the report."""
    parser.add_argument(
        "--run",
        type=Path,
        help="folder of the run; a new run is started, an interrupted one resumed, a finished one reused "
        "(default: runs/quality-...)",
    )
    parser.add_argument("--max-steps", type=positive, help="training steps (default: the preset's)")
    parser.add_argument(
        "--seed", type=int, help="random seed of the run (default: the preset's, or the existing run's)"
    )
    add_set_flag(parser)
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")


def describe_run(path: Path) -> dict[str, Any]:
    """Returns the facts of a finished run for a report, without any path."""
    folder = RunFolder(path)
    config, summary = folder.read_config().to_json(), folder.read_summary()
    metrics = folder.read_metrics()
    passes = max((line["epoch"] for line in metrics if line["kind"] == "train"), default=0)
    name = "accuracy" if summary.metric == "accuracy" else "bleu"
    curve = [[line["step"], line["loss"], line[name]] for line in metrics if line["kind"] == "dev"]
    kept = "preset", "model", "training", "corpus_sha256", "commit", "versions", "parent"
    return {
        "parameters": sum(parameter.numel() for parameter in load_run(path).model.parameters()),
        "steps": summary.steps,
        "seconds": summary.seconds,
        "passes": passes,
        f"dev_step_loss_greedy_{name}": curve,
    } | {name: config[name] for name in kept}
