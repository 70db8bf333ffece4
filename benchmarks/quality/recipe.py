"""Serves the bundle of a finished run to its scorers, describes the run, and writes the result."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import track

from benchmarks.hardware import describe_hardware
from benchmarks.report import publish
from benchmarks.serving import serving
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.client import Client, ClientError, GenerateOptions
from seq2seq_serve.client.rpcs import Translated
from seq2seq_serve.export.exporter import export_bundle
from seq2seq_serve.training.run import RunFolder, TrainedModel, load_run

PRECISIONS = Precision.FP32, Precision.INT8


def ask(
    bundle: Path,
    precision: Precision,
    questions: Sequence[tuple[Sequence[str | Path | Mapping[str, str]], GenerateOptions | None]],
    console: Console,
) -> Iterator[list[Translated]]:
    """Yields a server's answers on the CPU, raising the error of the first that failed.

    Args:
        bundle: Folder of a bundle.
        precision: Precision that is served.
        questions: Groups of sources with their options. A source is a text, texts by name, or a file.
        console: Shows the progress.
    """
    flags = ["--provider", "cpu", "--precision", precision]
    with serving(bundle, flags) as server, Client(server.address, timeout_seconds=300) as client:
        for sources, options in questions:
            contents = (each.read_bytes() if isinstance(each, Path) else each for each in sources)
            results = client.translate_many(contents, options=options)
            answers = []
            for result in track(results, precision, total=len(sources), console=console):
                if result.error is not None:
                    raise result.error
                answers.append(result)
            yield answers


def export(trained: TrainedModel, run: Path, console: Console) -> Path:
    """Export weights of a run in both precisions; returns the folder of the bundle."""
    export_bundle(trained, run / "bundle", list(PRECISIONS), overwrite=True, report=console.log)
    return run / "bundle"


def describe_run(run: Path) -> dict[str, Any]:
    """Returns the facts of a finished run for a report, without any path."""
    folder = RunFolder(run)
    config, summary = folder.read_config().to_json(), folder.read_summary()
    name = "accuracy" if summary.metric == "accuracy" else "bleu"
    curve = [
        [line["step"], line["loss"], line[name]] for line in folder.read_metrics() if line["kind"] == "dev"
    ]
    kept = "preset", "model", "training", "corpus_sha256", "commit", "versions", "parent"
    return {
        "parameters": sum(parameter.numel() for parameter in load_run(run).model.parameters()),
        "steps": summary.steps,
        "seconds": summary.seconds,
        "dev_score": summary.dev_score,
        f"dev_step_loss_greedy_{name}": curve,
    } | {name: config[name] for name in kept}


def report_scores(
    task: str,
    score: Callable[[Console], dict[str, Any]],
    table: Callable[[dict[str, Any]], str],
    out: Path | None,
) -> int:
    """Score, and print the report as a table and as one line of JSON; returns 0 if done, 1 if it failed."""
    console = Console(stderr=True)
    logging.basicConfig(
        level=logging.INFO, format="%(message)s", handlers=[RichHandler(console=console, show_path=False)]
    )
    logging.getLogger("sacrebleu").setLevel(logging.ERROR)  # it warns of tokenised texts
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    report: dict[str, Any] = {"benchmark": "quality", "task": task, "hardware": describe_hardware()}
    try:
        if out:  # fail before long work, not after it
            out.parent.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=out.parent).close()
        report |= score(console)
    except (ClientError, OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report = json.loads(json.dumps(report))
    print(table(report))
    publish(report, out)
    return 0
