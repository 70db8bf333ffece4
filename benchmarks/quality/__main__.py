"""Measures quality through the server: `python -m benchmarks.quality multi30k --data DIR`.

This file has the translation tasks; `babi`, `captions` and `published` have their own files.

Trains a preset, by default `tiny`; an interrupted run is resumed, and a finished run is reused. Chooses
averaging and length penalty on dev, exports fp32 and int8, starts the real server, translates the test sets
through the gRPC client with beams of 5, and scores them. The test sets are translated once, after every
choice is made. Speed is not measured. The table goes to standard output; the last line is one JSON object.
"""

from __future__ import annotations

import seq2seq_serve.training.spin  # noqa: F401  # isort: skip

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.demo import translate_all
from benchmarks.hardware import describe_hardware
from benchmarks.quality import babi, captions, published
from benchmarks.quality.choice import BEAM_SIZE, Choice, choose, search_options, server_flags
from benchmarks.quality.corpora import Detokenised, ScoredSet, Task, korean, multi30k
from benchmarks.quality.recipe import Recipe, add_run_flags, describe_run, run, train
from benchmarks.serving import RunningServer, serving
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.export.exporter import export_bundle
from seq2seq_serve.training.config import TransformerConfig
from seq2seq_serve.training.evaluation.comparison import MetricScore, MetricSettings, compare
from seq2seq_serve.training.presets import PRESETS
from seq2seq_serve.training.run import RunFolder, load_checkpoints

_PRECISIONS = Precision.FP32, Precision.INT8
_DETOKENISED = MetricSettings(is_lower_cased=True)
_OTHER_TASKS = {
    "babi": babi.main,
    "captions": captions.main,
    "clips": captions.main,
    "published": published.main,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, choose, serve and score.

    Returns:
        0 if done, 1 if it failed, 130 or 143 if it was interrupted; the same command resumes it.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in _OTHER_TASKS:
        return _OTHER_TASKS[arguments[0]](arguments)
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.task == "korean" and options.direction:
        parser.error("--direction applies to multi30k only: omit it")
    direction = options.direction or "en-de"
    settings = dict(options.set)
    name = f"multi30k-{direction}" if options.task == "multi30k" else options.task
    if options.seed is not None:
        settings["seed"] = options.seed
        name += f"-seed-{options.seed}"
    if options.preset != "tiny":
        name += f"-{options.preset}"
    recipe = Recipe(options.preset, settings, options.max_steps)
    path = options.run or Path("runs") / f"quality-{name}"

    def measured(console: Console) -> dict[str, Any]:
        if options.task == "multi30k":
            task = multi30k(options.data, direction)
        else:
            task = korean(options.data, path / "corpus")
        return measure(task, path, recipe, console)

    return run(measured, table, options.data, options.out)


def measure(task: Task, path: Path, recipe: Recipe, console: Console) -> dict[str, Any]:
    """Train or resume the run, choose, export, serve and score; returns the report.

    Args:
        task: The corpus and its test sets.
        path: Folder of the run. A new run is started, an interrupted one resumed, a finished one reused.
        recipe: Settings of the training run.
        console: Shows progress.
    """
    train(task.files, path, recipe, console)
    if not isinstance(RunFolder(path).read_config().model, TransformerConfig):
        task = dataclasses.replace(task, published=None)  # the published scores are of Transformers
    bundle, choice, candidates = export_chosen(path, task.metric, _PRECISIONS, console)
    texts: dict[Precision, dict[str, list[str]]] = {}
    for precision in _PRECISIONS:
        with serving(bundle, server_flags(precision)) as server:
            texts[precision] = translate_sets(server, task, choice.alpha, precision, console)
    return {
        "benchmark": "quality",
        "task": task.name,
        "hardware": describe_hardware(),
        "run": describe_run(path),
        "search": {"beam_size": BEAM_SIZE, "alpha": choice.alpha, "steps": choice.steps},
        "dev": [dataclasses.asdict(candidate) for candidate in candidates],
        "test": {scored.name: score_set(task, scored, texts) for scored in task.scored_sets},
        "translations": [
            dict(zip(("source", *_PRECISIONS), row, strict=True))
            for row in zip(task.sentences, *(texts[each][""] for each in _PRECISIONS), strict=True)
        ],
    }


def export_chosen(
    path: Path, metric: MetricSettings, precisions: Sequence[Precision], console: Console
) -> tuple[Path, Choice, list[Choice]]:
    """Choose on dev and export the best candidate; returns the bundle, the choice, and all candidates."""
    choice, candidates = choose(path, metric, console)
    bundle = path / "bundle"
    trained = load_checkpoints(path, choice.steps)
    export_bundle(trained, bundle, list(precisions), overwrite=True, report=console.log)
    return bundle, choice, candidates


def translate_sets(
    server: RunningServer, task: Task, alpha: float, precision: Precision, console: Console
) -> dict[str, list[str]]:
    """Returns the translations of each test set by its name; "" is the key of the task's sentences."""
    sources = {scored.name: [pair.source for pair in scored.pairs] for scored in task.scored_sets}
    sources[""] = list(task.sentences)
    options = search_options(alpha)
    return {
        name: translate_all(server, texts, f"{name or 'sentences'}, {precision}", console, options)
        for name, texts in sources.items()
    }


def score_set(task: Task, scored: ScoredSet, texts: dict[Precision, dict[str, list[str]]]) -> dict[str, Any]:
    """Returns the scores by precision, with int8 tested against fp32, and those of detokenised texts."""
    systems = [texts[precision][scored.name] for precision in _PRECISIONS]
    references = [pair.target for pair in scored.pairs]
    report: dict[str, Any] = {
        "sentences": len(scored.pairs),
        "published": (task.published or {}).get(scored.name),
        "scores": _by_precision(compare(systems, [references], task.metric)),
    }
    if scored.detokenised is not None:
        undone = [detokenise(system, scored.detokenised) for system in systems]
        scores = compare(undone, [scored.detokenised.references], _DETOKENISED)
        report["detokenised"] = _by_precision(scores)
    return report


def detokenise(texts: Sequence[str], detokenised: Detokenised) -> list[str]:
    """Join Moses tokens to texts: remove spaces before punctuation, and undo escapes such as &apos;."""
    from sacremoses import MosesDetokenizer  # takes long to import

    detokenizer = MosesDetokenizer(lang=detokenised.language)
    return [detokenizer.detokenize(text.split()) for text in texts]


def table(report: dict[str, Any]) -> str:
    """Returns the scores and the translations as Markdown tables."""
    lines = [
        f"{report['task']}: {report['run']['parameters']:,} parameters, {report['run']['steps']:,} steps, "
        f"{len(report['search']['steps'])} checkpoints averaged, beam {report['search']['beam_size']}, "
        f"alpha {report['search']['alpha']}",
        "",
        "| test set | metric | fp32 | int8 | published |",
        "|---|---|--:|--:|--:|",
    ]
    for name, result in report["test"].items():
        for kind in ("scores", "detokenised"):
            for metric in result.get(kind, {}).get(Precision.FP32, {}):
                cells = [_cell(result[kind][precision][metric]) for precision in _PRECISIONS]
                label = metric + (", detokenised, lower case" if kind == "detokenised" else "")
                published = result["published"] if kind == "scores" and metric == "BLEU" else None
                lines.append(f"| {name} | {label} | {' | '.join(cells)} | {published or '–'} |")
    lines += ["", *_differences(report)]
    if report["translations"]:
        lines += ["", "| source | fp32 | int8 |", "|---|---|---|"]
        lines += [f"| {' | '.join(row.values())} |" for row in report["translations"]]
    return "\n".join(lines)


def _differences(report: dict[str, Any]) -> list[str]:
    """Returns one line per test set with the BLEU difference of int8 and fp32."""
    bleus = {
        name: [result["scores"][precision]["BLEU"]["score"] for precision in _PRECISIONS]
        for name, result in report["test"].items()
    }
    return [f"{name}: int8 − fp32 = {int8 - fp32:+.2f} BLEU" for name, (fp32, int8) in bleus.items()]


def _cell(score: dict[str, Any]) -> str:
    return f"{score['score']:.2f} ± {score['half_interval']:.2f}"


def _by_precision(scores: list[list[MetricScore]]) -> dict[str, dict[str, Any]]:
    return {
        precision: {score.metric: dataclasses.asdict(score) for score in row}
        for precision, row in zip(_PRECISIONS, scores, strict=True)
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality",
        allow_abbrev=False,
        description="Train on a published corpus, and score the model through the server.",
        epilog="examples:\n"
        "  python -m benchmarks.quality multi30k --data multi30k/ --direction en-de\n"
        "  python -m benchmarks.quality multi30k --data multi30k/ --seed 1 --set d_ff=256\n"
        "  python -m benchmarks.quality korean --data corpora/ --max-steps 8000\n"
        "  python -m benchmarks.quality babi --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "task",
        choices=("multi30k", "korean", *_OTHER_TASKS),
        help="the corpus; for the last three see the help of each",
    )
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        help="folder of the corpus; benchmarks/README.md lists its files",
    )
    parser.add_argument(
        "--direction",
        choices=("en-de", "de-en", "en-fr"),
        help="source and target language of multi30k (default: en-de)",
    )
    parser.add_argument(
        "--preset", choices=PRESETS, default="tiny", help="preset of a new run (default: %(default)s)"
    )
    add_run_flags(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
