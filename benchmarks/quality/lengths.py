"""Measures BLEU by source length for several models: Bahdanau et al. 2015, figure 2, arXiv:1409.0473.

The input is, for each model, the bundle and the result file that `benchmarks.quality` wrote for Multi30k. The
script serves each bundle in fp32 and translates the test set through the gRPC client, with the beam size of
`benchmarks.quality` and the length penalty of the result file. Then it computes corpus BLEU for bins of more
than 100 sentences each. Lengths are in tokens of the corpus (words and punctuation marks), not in the model's
subword pieces. Speed is not measured. The table goes to standard output; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.demo import translate_all
from benchmarks.hardware import describe_hardware
from benchmarks.quality.choice import search_options, server_flags
from benchmarks.quality.corpora import ScoredSet, multi30k
from benchmarks.quality.recipe import run
from benchmarks.serving import serving
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.training.evaluation.comparison import MetricSettings, compare

# The greatest length of each bin except the last one. Every bin has more than 100 sentences of test2016.
LAST_LENGTHS = 9, 11, 13, 16


@dataclass(frozen=True)
class System:
    """A model to compare.

    Attributes:
        name: Label in the table and the plot.
        bundle: Folder of its bundle.
        task: Corpus and direction of its training, such as "Multi30k de-en".
        alpha: Exponent of the length penalty, chosen on dev.
    """

    name: str
    bundle: Path
    task: str
    alpha: float


@dataclass(frozen=True)
class Bin:
    """Sentences of similar length.

    Attributes:
        label: Range of the lengths, such as 10–11 or 17+.
        rows: Indices of its sentences in the test set.
    """

    label: str
    rows: list[int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Translate, score by length, and plot; returns 0 if done, 1 if it failed."""
    options = _parser().parse_args(arguments)

    def measured(console: Console) -> dict[str, Any]:
        systems = [read_system(*system) for system in options.system]
        tasks = {system.task for system in systems}
        if len(tasks) > 1:
            raise ValueError(f"all systems need the same task, but these have {', '.join(sorted(tasks))}")
        task = multi30k(options.data, tasks.pop().rpartition(" ")[2])
        (test,) = task.scored_sets
        texts = [translate(system, test, console) for system in systems]
        report = {
            "benchmark": "quality by source length",
            "task": task.name,
            "test_set": test.name,
            "hardware": describe_hardware(),
            **score_by_length(systems, texts, test, task.metric),
        }
        if options.plot:
            save_plot(report, options.plot)
        return report

    return run(measured, table, options.data, options.out)


def read_system(name: str, bundle: str, results: str) -> System:
    """Read a system's task and length penalty from its result file of `benchmarks.quality`.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not a result of `benchmarks.quality`, or not for Multi30k.
    """
    content = json.loads(Path(results).read_text(encoding="utf-8"))
    if content.get("benchmark") != "quality" or not content["task"].startswith("Multi30k "):
        raise ValueError(f"{results} is not a result of `benchmarks.quality multi30k`: give its --out file")
    return System(name, Path(bundle), content["task"], content["search"]["alpha"])


def translate(system: System, test: ScoredSet, console: Console) -> list[str]:
    """Returns the system's translations of the test set, made by a server."""
    with serving(system.bundle, server_flags(Precision.FP32)) as server:
        sources = [pair.source for pair in test.pairs]
        return translate_all(server, sources, system.name, console, search_options(system.alpha))


def bins_of(lengths: Sequence[int]) -> list[Bin]:
    """Sort every sentence into one of the bins that `LAST_LENGTHS` bounds, the shortest bin first.

    Raises:
        ValueError: A bin is empty.
    """
    firsts = [1, *(last + 1 for last in LAST_LENGTHS)]
    labels = [f"{first}–{last}" for first, last in zip(firsts, LAST_LENGTHS, strict=False)]
    bins = [Bin(label, []) for label in (*labels, f"{firsts[-1]}+")]
    for row, length in enumerate(lengths):
        bins[bisect_left(LAST_LENGTHS, length)].rows.append(row)
    if empty := [each.label for each in bins if not each.rows]:
        raise ValueError(f"no source of the test set has {' or '.join(empty)} tokens")
    return bins


def score_by_length(
    systems: Sequence[System], texts: Sequence[Sequence[str]], test: ScoredSet, metric: MetricSettings
) -> dict[str, Any]:
    """Returns the scores of the report: BLEU over all sentences, and in each bin.

    Args:
        systems: The systems to compare; the first is the baseline of the p-values.
        texts: Each system's translations of the test set.
        test: The sources, as tokens separated by spaces, and the references.
        metric: Settings of BLEU.
    """
    bins = bins_of([len(pair.source.split()) for pair in test.pairs])

    def bleus(rows: Sequence[int]) -> list[dict[str, Any]]:
        chosen = [[system_texts[row] for row in rows] for system_texts in texts]
        scores = compare(chosen, [[test.pairs[row].target for row in rows]], metric)
        return [dataclasses.asdict(score) for score, *_ in scores]

    over_all = bleus(range(len(test.pairs)))
    by_bin = [bleus(each.rows) for each in bins]
    return {
        "bins": [{"source_tokens": each.label, "sentences": len(each.rows)} for each in bins],
        "systems": [
            {
                "name": system.name,
                "alpha": system.alpha,
                "all": over_all[number],
                "by_bin": [scores[number] for scores in by_bin],
            }
            for number, system in enumerate(systems)
        ],
    }


def table(report: dict[str, Any]) -> str:
    """Returns BLEU as a Markdown table with one row per system and one column per bin."""
    labels = [f"{each['source_tokens']} ({each['sentences']})" for each in report["bins"]]
    lines = [
        f"{report['task']}, {report['test_set']}: BLEU by source tokens (sentences)",
        "",
        f"| | {' | '.join(labels)} | all |",
        "|---|" + "--:|" * (len(labels) + 1),
    ]
    for system in report["systems"]:
        cells = [f"{bleu['score']:.1f} ± {bleu['half_interval']:.1f}" for bleu in system["by_bin"]]
        lines.append(f"| {system['name']} | {' | '.join(cells)} | {system['all']['score']:.2f} |")
    return "\n".join(lines)


def save_plot(report: dict[str, Any], path: Path) -> None:
    """Plot BLEU over source length, one line per system; the path's suffix sets the image format."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    panel = figure.subplots()
    labels = [each["source_tokens"] for each in report["bins"]]
    for system in report["systems"]:
        panel.plot(labels, [bleu["score"] for bleu in system["by_bin"]], marker="o", label=system["name"])
    panel.set(xlabel="tokens of the source", ylabel="BLEU", ylim=(0, None))
    panel.grid(alpha=0.3)
    panel.legend()
    hardware = report["hardware"]
    figure.suptitle(f"{report['task']}, {report['test_set']}, {hardware['date']}, {hardware['commit']}")
    figure.savefig(path, dpi=120)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality.lengths",
        allow_abbrev=False,
        description="Measure BLEU by source length for models that benchmarks.quality has scored.",
        epilog="example:\n"
        "  python -m benchmarks.quality.lengths --data multi30k/ --plot lengths.png \\\n"
        "    --system 'no attention' runs/recurrent/bundle recurrent.json \\\n"
        "    --system additive runs/recurrent-additive/bundle recurrent-additive.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--system",
        nargs=3,
        action="append",
        required=True,
        metavar=("NAME", "BUNDLE", "RESULTS"),
        help="a model: its name in the table, its bundle, and its result file from "
        "benchmarks.quality --out; repeat the flag for each model",
    )
    parser.add_argument("--data", type=Path, required=True, help="the folder of Multi30k")
    parser.add_argument("--plot", type=Path, help="also plot BLEU over length into this file")
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
