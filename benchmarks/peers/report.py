"""Summarises the turns of `benchmarks.peers`: numbers of equal targets, speeds, and their ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sacrebleu.metrics.bleu import BLEU

from benchmarks.peers.work import Contender, Suite, Work
from benchmarks.report import markdown, median
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.training.run import TrainedModel

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
    def tokens_per_second(self) -> float:
        """The tokens of all targets by the median duration."""
        return sum(map(len, self.targets)) / median(self.seconds)


AllTurns = Mapping[Contender, Turns]


def equal_targets(work: Work, turns: AllTurns) -> dict[str, int]:
    """Counts equal targets: each fp32 peer's with ours, and other contenders' with their library's fp32.

    Raises:
        ValueError: A target does not have the exact length of the work, so times cannot be compared.
    """
    wanted = [work.search.most(source) for source in work.sources]
    for contender, its in turns.items():
        lengths = [len(target) for target in its.targets]
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
    return equal


def summarise(suite: Suite, work: Work, precision: Precision, turns: AllTurns) -> dict[str, Any]:
    """Returns a row of results: the engine and CTranslate2 in one precision, `generate` in fp32.

    The faster setting of each counts.
    """
    fastest: dict[str, Contender] = {}
    for contender in sorted(turns, key=lambda one: median(turns[one].seconds)):
        if contender.precision is compared(contender.library, precision):
            fastest.setdefault(contender.library, contender)
    ours = fastest["ours"]
    seconds = {library: median(turns[contender].seconds) for library, contender in fastest.items()}
    row: dict[str, Any] = {
        "work": work.name,
        "precision": precision.value,
        "setting": ours.setting,
        "step_ms": 1e3 * median(turns[ours].step_seconds),
        "python_share": median(turns[ours].python_shares),
        "tokens_per_second": turns[ours].tokens_per_second,
        "peers": {
            library: {
                "setting": fastest[library].setting,
                "tokens_per_second": turns[fastest[library]].tokens_per_second,
                "ratio": seconds[library] / seconds["ours"],
            }
            for library in _PEERS
            if library in fastest
        },
        "seconds": {
            contender.name: its.seconds
            for contender, its in turns.items()
            if contender.precision in (precision, fastest[contender.library].precision)
        },
    }
    if work.references:
        row["bleu"] = {contender.name: _bleu(suite, work, turns[contender]) for contender in fastest.values()}
    return row


def compared(library: str, precision: Precision) -> Precision:
    """Returns the precision in which a library is compared; transformers runs only in fp32 here."""
    if library == "ctranslate2":
        return Precision.INT8 if precision is Precision.INT4 else precision  # its least on a CPU
    return precision if library == "ours" else Precision.FP32


def medians(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns the median ratio to each peer over all rows."""
    ratios = {
        library: [row["peers"][library]["ratio"] for row in rows if library in row["peers"]]
        for library in _PEERS
    }
    return {library: median(its) for library, its in ratios.items() if its}


def speed_table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns speeds in tokens/s, encoding included, ratios and quality as a Markdown table."""
    shown = []
    for row in rows:
        cells = [row["work"], row["precision"], f"{row['step_ms']:.2f}"]
        cells += [f"{row['floor_ms']:.2f}" if "floor_ms" in row else "", f"{row['python_share']:.1%}"]
        cells.append(_speed(row))
        for library in _PEERS:
            peer = row["peers"].get(library)
            cells += [_speed(peer), f"{peer['ratio']:.2f}"] if peer else ["", ""]
        cells.append(" ".join(f"{bleu['score']:.2f}" for bleu in row.get("bleu", {}).values()))
        shown.append(cells)
    columns = ["work", "precision", "ms a step", "floor", "python", "ours"]
    for name in _PEERS.values():
        columns += [name, "ratio"]
    return markdown([*columns, "BLEU of each"], shown, num_left=2)


def _speed(row: dict[str, Any]) -> str:
    return f"{row['tokens_per_second']:.0f} {row['setting']}".strip()


def _bleu(suite: Suite, work: Work, turns: Turns) -> dict[str, Any]:
    metric = BLEU(tokenize="none", force=True)  # the references are cut into words already
    assert isinstance(suite.model, TrainedModel)
    score = metric.corpus_score(suite.model.tokenizer.decode_batch(turns.targets), [work.references])
    return {"score": score.score, "signature": str(metric.get_signature())}
