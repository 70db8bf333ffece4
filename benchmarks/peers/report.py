"""Summarises the turns of `benchmarks.peers`: numbers of equal targets, and ratios of speeds."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table
from sacrebleu.metrics.bleu import BLEU

from benchmarks.peers.work import Checkpoint, Contender, Suite, Work
from benchmarks.report import table
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.training.run import TrainedModel

# Least ratios of the engine's speed to a peer's: by work, for int8 and fp32.
_BARS_CTRANSLATE2 = {
    "base, greedy x 1": (2.0, 1.6),
    "base, greedy x 8": (1.3, 1.5),
    "base, greedy x 32": (1.2, 1.45),
    "base, beam 5 x 1": (1.7, 2.0),
    "base, beam 5 x 32": (1.3, 1.15),
    "base, 1000 sentences, greedy": (1.3, 1.3),
    "base, 1000 sentences, beam 5": (1.2, 1.1),
    "Multi30k, greedy": (1.2, 1.0),
    "Multi30k, beam 5": (1.0, 0.9),
}
_BARS = {"transformers": (3.5, 2.0)}  # for every work
# Of imported checkpoints: for every work, and for the median of the works.
_IMPORTED_BARS = {"ctranslate2": 1.0}
_MEDIAN_BARS = {"ctranslate2": 1.3, "transformers": 3.0}
_PEERS = {"ctranslate2": "CTranslate2", "transformers": "generate"}


@dataclass
class Turns:
    """Results and times of one contender for one work.

    Attributes:
        targets: Targets of the first turn, which is not timed.
        seconds: Duration of the work in each timed turn, the mean if a turn repeats it.
        step_seconds: Median step of each repetition; empty if the contender does not report it.
        python_shares: Share of each repetition outside encode calls and steps; empty if it is not reported.
    """

    targets: list[list[int]]
    seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    python_shares: list[float] = field(default_factory=list)

    @property
    def median_seconds(self) -> float:
        """The median duration, which is compared."""
        return statistics.median(self.seconds)


AllTurns = Mapping[Contender, Turns]


def equal_targets(work: Work, turns: AllTurns) -> dict[str, Any]:
    """Counts equal targets: each fp32 peer's with ours, and each int8 contender's with its library's fp32.

    Raises:
        ValueError: A target does not have the exact length of the work, so times cannot be compared.
    """
    for contender, its in turns.items():
        lengths = [len(target) for target in its.targets]
        wanted = [work.search.most(source) for source in work.sources]
        if work.is_exact and lengths != wanted:
            raise ValueError(
                f"{work.name}: {contender.name} gives targets of {sorted(set(lengths))} tokens, "
                f"not of {sorted(set(wanted))}"
            )
    reference = {c.library: its.targets for c, its in turns.items() if c.precision is Precision.FP32}
    equal = {}
    for contender, its in turns.items():
        base = reference.get("ours" if contender.precision is Precision.FP32 else contender.library)
        if base is not None and its.targets is not base:
            equal[contender.name] = sum(a == b for a, b in zip(its.targets, base, strict=True))
    return {"work": work.name, "requests": len(work.sources), "equal": equal}


def summarise(suite: Suite, work: Work, precision: Precision, turns: AllTurns) -> dict[str, Any]:
    """Returns a row of results: the engine and CTranslate2 in one precision, the other peers in fp32."""
    fastest: dict[str, Contender] = {}
    for contender, its in turns.items():
        if contender.precision is compared(contender.library, precision):
            known = fastest.setdefault(contender.library, contender)
            if its.median_seconds < turns[known].median_seconds:
                fastest[contender.library] = contender
    ours = fastest.pop("ours")
    rivals = {library: fastest[library] for library in _PEERS if library in fastest}
    counted = [ours, *rivals.values()]
    row: dict[str, Any] = {
        "work": work.name,
        "precision": precision.value,
        "setting": ours.setting,
        "step_ms": 1e3 * statistics.median(turns[ours].step_seconds),
        "python_share": statistics.median(turns[ours].python_shares),
        "tokens_per_second": _rate(turns[ours]),
        "peers": {
            library: {
                "setting": rival.setting,
                "tokens_per_second": _rate(turns[rival]),
                "ratio": turns[rival].median_seconds / turns[ours].median_seconds,
                "bar": _bar(suite, work, precision, library),
            }
            for library, rival in rivals.items()
        },
        "seconds": {
            c.name: its.seconds for c, its in turns.items() if c.precision is precision or c in counted
        },
    }
    if work.references:
        row["bleu"] = {contender.name: _bleu(suite, work, turns[contender]) for contender in counted}
    return row


def medians(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns the median ratio to each peer, of all precisions and of each, for imported checkpoints."""
    ratios: dict[str, dict[str, list[float]]] = {library: defaultdict(list) for library in _MEDIAN_BARS}
    for row in rows:
        for library, peer in row["peers"].items():
            for name in ("all", row["precision"]):
                ratios[library][name].append(peer["ratio"])
    return {
        library: {"bar": bar} | {name: statistics.median(its) for name, its in ratios[library].items()}
        for library, bar in _MEDIAN_BARS.items()
        if ratios[library]
    }


def medians_table(found: Mapping[str, Mapping[str, float]]) -> Table:
    """Returns the result of `medians` as a table for the terminal."""
    rows, compared_precisions = [], (Precision.FP32, Precision.INT8, Precision.INT4)
    for library, its in found.items():
        shown = (f"{its[name]:.2f}" if name in its else "" for name in compared_precisions)
        rows.append((_PEERS[library], *shown, _with_bar(its["all"], its["bar"])))
    return table("medians of the ratios", ("", *compared_precisions, "all / bar"), rows)


def agreement_table(agreement: Sequence[dict[str, Any]]) -> Table:
    """Returns the results of `equal_targets` as a table for the terminal."""
    names = list(dict.fromkeys(name for row in agreement for name in row["equal"]))
    title = "equal targets: fp32 with ours in fp32, others with the same library's fp32"
    rows = [
        (row["work"], str(row["requests"]), *(str(row["equal"].get(name, "")) for name in names))
        for row in agreement
    ]
    return table(title, ("", "of", *names), rows)


def speed_table(report: dict[str, Any]) -> Table:
    """Returns speeds, ratios, bars and quality as a table for the terminal."""
    columns = ["", "type", "ms/step", "floor", "python", "ours"]
    for name in _PEERS.values():
        columns += [name, "ratio / bar"]
    columns.append(f"BLEU: ours, {', '.join(_PEERS.values())}")
    rows = []
    for row in report["results"]:
        cells = [row["work"], row["precision"], f"{row['step_ms']:.2f}"]
        cells += [f"{row['floor_ms']:.2f}" if "floor_ms" in row else "", f"{row['python_share']:.1%}"]
        cells.append(_speed(row))
        for library in _PEERS:
            peer = row["peers"].get(library)
            cells += [_speed(peer), _with_bar(peer["ratio"], peer["bar"])] if peer else ["", ""]
        cells.append(" ".join(f"{bleu['score']:.2f}" for bleu in row.get("bleu", {}).values()))
        rows.append(cells)
    return table("tokens/s with encoding; how many times as fast as the peer, and the bar", columns, rows)


def _speed(row: dict[str, Any]) -> str:
    return f"{row['tokens_per_second']:.0f} {row['setting']}".strip()


def _with_bar(ratio: float, bar: float | None) -> str:
    if bar is None:
        return f"{ratio:.2f}"
    outcome = "[green]met[/]" if ratio >= bar else "[red]missed[/]"
    return f"{ratio:.2f} / {bar:.2f} {outcome}"


def compared(library: str, precision: Precision) -> Precision:
    """Returns the precision in which a library is compared; most peers run only in fp32 here."""
    if library == "ctranslate2":
        return Precision.INT8 if precision is Precision.INT4 else precision  # its least on a CPU
    return precision if library == "ours" else Precision.FP32


def _bar(suite: Suite, work: Work, precision: Precision, library: str) -> float | None:
    if isinstance(suite.model, Checkpoint):
        return _IMPORTED_BARS.get(library)
    bars = _BARS.get(library, _BARS_CTRANSLATE2.get(work.name))
    return None if bars is None else bars[1 if precision is Precision.FP32 else 0]


def _rate(turns: Turns) -> float:
    return sum(map(len, turns.targets)) / turns.median_seconds


def _bleu(suite: Suite, work: Work, turns: Turns) -> dict[str, Any]:
    metric = BLEU(tokenize="none", force=True)  # the references are cut into words already
    assert isinstance(suite.model, TrainedModel)
    score = metric.corpus_score(suite.model.tokenizer.decode_batch(turns.targets), [work.references])
    return {"score": score.score, "signature": str(metric.get_signature())}
