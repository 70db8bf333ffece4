"""Scores translations by source length: `python -m benchmarks.quality.lengths`.

Bahdanau et al. 2015, figure 2 (arXiv:1409.0473), for the translations that `benchmarks.quality` wrote of
several runs. BLEU of a corpus is computed for bins of more than 100 sentences each of Multi30k's test2016.
Lengths are in tokens of the corpus (words and punctuation marks), not in the model's subword pieces. The
table goes to standard output; the last line is one JSON object.
"""

from __future__ import annotations

import dataclasses
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.quality.recipe import report_scores
from benchmarks.report import command, markdown
from seq2seq_serve.training.data.text_files import SentencePair, read_lines, read_parallel
from seq2seq_serve.training.evaluation.comparison import MetricSettings, compare

# The greatest length of each bin except the last one. Every bin has more than 100 sentences of test2016.
LAST_LENGTHS = 9, 11, 13, 16


def main(arguments: Sequence[str] | None = None) -> int:
    """Score by length, and plot; returns 0 if done, 1 if it failed."""
    examples = (
        "--source test.de --reference test.en --system dot runs/dot/test2016.fp32.txt \\\n"
        "    --system additive runs/additive/test2016.fp32.txt --plot lengths.png"
    )
    parser = command("quality.lengths", __doc__, examples)
    parser.epilog = f"example:\n  {parser.prog} {examples}"
    add = parser.add_argument
    add(
        "--system",
        nargs=2,
        action="append",
        required=True,
        metavar=("NAME", "TRANSLATIONS"),
        help="a model: its name in the table and its translations; repeat the flag for each model",
    )
    add("--source", type=Path, required=True, help="the sources, Moses tokens")
    add("--reference", type=Path, required=True, help="their references, Moses tokens")
    add("--task", default="Multi30k de-en", help="corpus and direction (default: %(default)s)")
    add("--plot", type=Path, help="also plot BLEU over length into this file")
    options = parser.parse_args(arguments)

    def score(_: Console) -> dict[str, Any]:
        pairs = read_parallel(options.source, options.reference)
        texts = {name: read_lines(Path(file)) for name, file in options.system}
        return {"test_set": "test2016"} | score_by_length(texts, pairs, MetricSettings(tokenization="none"))

    def shown(report: dict[str, Any]) -> str:
        if options.plot:
            save_plot(report, options.plot)
        return table(report)

    return report_scores(options.task, score, shown, options.out)


def bins_of(lengths: Sequence[int]) -> dict[str, list[int]]:
    """Returns the rows of the sentences in each bin, by its lengths such as 10–11 or 17+, the shortest first.

    Raises:
        ValueError: A bin is empty.
    """
    firsts = [1, *(last + 1 for last in LAST_LENGTHS)]
    labels = [f"{first}–{last}" for first, last in zip(firsts, LAST_LENGTHS, strict=False)]
    bins: dict[str, list[int]] = {label: [] for label in (*labels, f"{firsts[-1]}+")}
    for row, length in enumerate(lengths):
        [*bins.values()][bisect_left(LAST_LENGTHS, length)].append(row)
    if empty := [label for label, rows in bins.items() if not rows]:
        raise ValueError(f"no source of the test set has {' or '.join(empty)} tokens")
    return bins


def score_by_length(
    texts: Mapping[str, Sequence[str]], pairs: Sequence[SentencePair], metric: MetricSettings
) -> dict[str, Any]:
    """Returns the scores of the report: BLEU over all sentences, and in each bin.

    Args:
        texts: Each system's translations of the test set; the first one is the baseline of the p-values.
        pairs: The sources, as tokens separated by spaces, and the references.
        metric: Settings of BLEU.
    """
    bins = bins_of([len(pair.source.split()) for pair in pairs])

    def bleus(rows: Sequence[int]) -> list[dict[str, Any]]:
        chosen = [[its[row] for row in rows] for its in texts.values()]
        scores = compare(chosen, [[pairs[row].target for row in rows]], metric)
        return [dataclasses.asdict(score) for score, *_ in scores]

    over_all = bleus(range(len(pairs)))
    by_bin = [bleus(rows) for rows in bins.values()]
    return {
        "bins": [{"source_tokens": label, "sentences": len(rows)} for label, rows in bins.items()],
        "systems": [
            {"name": name, "all": over_all[number], "by_bin": [scores[number] for scores in by_bin]}
            for number, name in enumerate(texts)
        ],
    }


def table(report: dict[str, Any]) -> str:
    """Returns BLEU as a Markdown table with one row per system and one column per bin."""
    columns = ["", *(f"{each['source_tokens']} ({each['sentences']})" for each in report["bins"]), "all"]
    rows = []
    for system in report["systems"]:
        cells = (f"{bleu['score']:.1f} ± {bleu['half_interval']:.1f}" for bleu in system["by_bin"])
        rows.append((system["name"], *cells, f"{system['all']['score']:.2f}"))
    title = f"{report['task']}, {report['test_set']}: BLEU by source tokens (sentences)"
    return f"{title}\n\n{markdown(columns, rows)}"


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


if __name__ == "__main__":
    sys.exit(main())
