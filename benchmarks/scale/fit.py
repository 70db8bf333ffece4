"""Measures the times of a real engine, turn by turn, and fits the terms of `EngineTimes` to them."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks.load.generator import Generator
from benchmarks.load.inprocess import InProcessEngine
from benchmarks.load.mix import MAX_TARGET_LENGTH, MIX, ONLY_GREEDY, Mode, draw_jobs
from benchmarks.scale.times import EngineTimes, blend
from benchmarks.serving import RunningServer, serving
from seq2seq_serve.bundle.manifest import load_bundle
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.server.config import ProviderPolicy, RunnerConfig, Speculation
from seq2seq_serve.server.engine.plan import Selected
from seq2seq_serve.server.engine.request import Request
from seq2seq_serve.server.engine.result import Turn
from seq2seq_serve.server.engine.state import Sequence as Row
from seq2seq_serve.server.runner.runner import OnnxRunner

# What is counted of a turn: its rows, and what each further term of `EngineTimes` is multiplied with.
_ROWS = "rows"
_TERMS = (
    "sampling_row_seconds",
    "beam_row_seconds",
    "position_seconds",
    "encode_seconds",
    "token_seconds",
)
_COLUMNS = (_ROWS, *_TERMS)
_SIGNED = ("sampling_row_seconds", "beam_row_seconds")  # beside a greedy row; the others cannot be negative
# Numbers of rows between which a turn's time is a straight line, where enough turns were measured.
_KNOTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
_LEAST_TURNS = 10
_INTERRUPTED = 3  # the fit leaves out turns that took more than 3 times the fitted time
_ROUNDS = 12  # of the weighted least squares

_LEVELS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)  # requests in flight
_NUM_PINGS = 200
_CONFIG = RunnerConfig(
    shares_threads=True,
    provider=ProviderPolicy.CPU,
    precision=Precision.INT8,
    num_threads=1,
    max_slots=160,  # enough for 64 requests of the mix
    max_source_length=MAX_TARGET_LENGTH,
    max_target_length=MAX_TARGET_LENGTH,
    speculative=Speculation.OFF,
)


@dataclass(frozen=True)
class Fit:
    """The fitted times, and how well they describe the turns that they were fitted to.

    Attributes:
        num_turns: Number of measured turns.
        explained: Share of the variance of the turns' times that the fit explains.
        total_error: Predicted by measured time of all turns of a level, less 1; the worst level.
    """

    times: EngineTimes
    num_turns: int
    explained: float
    total_error: float


class _MeasuredRunner(OnnxRunner):
    """Counts what each turn runs: rows, those of some modes, positions, encode calls and their tokens."""

    counts: np.ndarray

    def encode(self, first_row: int, requests: list[Request]) -> None:
        self.counts[_COLUMNS.index("encode_seconds")] += 1
        self.counts[_COLUMNS.index("token_seconds")] += sum(request.encode_tokens for request in requests)
        super().encode(first_row, requests)

    def step(self, rows: tuple[Row, ...]) -> Selected:
        self.counts[_COLUMNS.index(_ROWS)] += len(rows)
        for row in rows:
            if (mode := _mode(row.request)) is not Mode.GREEDY:
                self.counts[_COLUMNS.index(f"{mode.value}_row_seconds")] += 1
        self.counts[_COLUMNS.index("position_seconds")] += sum(
            row.memory_length + row.cache_length for row in rows
        )
        return super().step(rows)


class _Meter:
    """Takes the processor time of each turn of an engine in this process, and what it ran."""

    def __init__(self, runner: _MeasuredRunner) -> None:
        self._runner = runner
        self.reset()

    def reset(self) -> None:
        """Forget all turns so far."""
        self._runner.counts = np.zeros(len(_COLUMNS))
        self.turns: list[np.ndarray] = []
        self.seconds: list[float] = []
        self._began = time.process_time()  # others may share the core, so wall time would not do

    def note(self, _: Turn) -> None:
        """End a turn, and begin the next one."""
        now = time.process_time()
        self.seconds.append(now - self._began)
        self.turns.append(self._runner.counts)
        self._runner.counts = np.zeros(len(_COLUMNS))
        self._began = now


def measure(bundle: Path, num_rounds: int) -> Fit:
    """Fit an engine and a server, both on the first core, with the client on the last."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])  # the processes that start from now on inherit it
    flags = ["--provider", "cpu", "--precision", "int8", "--threads", "1"]
    for name in ("max_slots", "max_source_length", "max_target_length"):
        flags += [f"--{name.replace('_', '-')}", str(getattr(_CONFIG, name))]
    with serving(bundle, flags) as server, Generator(cores[-1:]) as generator:
        # In a process of its own, whose processor time is that of the turns.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            found = fit(pool.submit(measure_turns, bundle, _CONFIG, _LEVELS, num_rounds).result())
        return dataclasses.replace(found, times=_with_grpc(found.times, server, generator))


def measure_turns(
    bundle: Path, config: RunnerConfig, levels: Sequence[int], num_rounds: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Decode the mix in closed loops with few and with many requests in flight.

    Returns:
        For each loop what each turn ran `(turns, columns)`, and its seconds `(turns,)`.
    """
    runner = _MeasuredRunner(load_bundle(bundle), config)
    meter = _Meter(runner)
    engine = InProcessEngine(runner, meter.note)
    found = []
    for number in range(num_rounds):
        for level in levels:
            meter.reset()
            engine.closed_loop(draw_jobs(40 + 3 * level, MIX, seed=100 * number + level), level)
            found.append((np.array(meter.turns), np.array(meter.seconds)))
    engine.stop()
    return found


def _with_grpc(times: EngineTimes, server: RunningServer, generator: Generator) -> EngineTimes:
    """Add what gRPC costs: measured with calls of one token, two at a time."""
    jobs = [dataclasses.replace(job, num_tokens=1) for job in draw_jobs(_NUM_PINGS, ONLY_GREEDY, seed=0)]
    graphs_before, cpu_before = _graph_seconds(server), server.cpu_seconds()
    run = generator.closed_loop(server.address, jobs, in_flight=2, stream=False)
    cpu_seconds = server.cpu_seconds() - cpu_before - (_graph_seconds(server) - graphs_before)
    outside = [outcome.end - outcome.sent - outcome.first_token_seconds for outcome in run.outcomes]
    return dataclasses.replace(
        times, call_seconds=cpu_seconds / len(jobs), wire_seconds=statistics.median(outside)
    )


def _graph_seconds(server: RunningServer) -> float:
    """Returns the time of all encode calls and steps of a server so far."""
    names = [f"seq2seq_{name}_seconds_sum" for name in ("encode_time", "decode_step")]
    return sum(sample.value for sample in server.samples() if sample.name in names)


def fit(measured: Sequence[tuple[np.ndarray, np.ndarray]]) -> Fit:
    """Fit the times to the turns of several levels, by least squares of their relative errors.

    Turns that took more than three times the fitted time, in which the machine did something else, are left
    out of a second fit.

    Raises:
        ValueError: There are not enough turns.
    """
    turns = np.concatenate([turns for turns, _ in measured])
    seconds = np.concatenate([seconds for _, seconds in measured])
    design = _design(turns, _knots(turns[:, 0]))
    usual = seconds < _INTERRUPTED * (design @ _solve(design, seconds))
    knots = _knots(turns[usual, 0])
    design = _design(turns, knots)
    found = _solve(design[usual], seconds[usual])
    errors = [(_design(ran, knots) @ found).sum() / took.sum() - 1 for ran, took in measured]
    residual = seconds[usual] - design[usual] @ found
    curve, terms = found[: len(knots)].tolist(), found[len(knots) :].tolist()
    return Fit(
        EngineTimes(tuple(zip(knots, curve, strict=True)), **dict(zip(_TERMS, terms, strict=True))),
        num_turns=len(seconds),
        explained=float(1 - residual.var() / seconds[usual].var()),
        total_error=float(max(errors, key=abs)),
    )


def _knots(rows: np.ndarray) -> list[int]:
    """Returns the `_KNOTS` with enough turns from their number of rows up to the next.

    Raises:
        ValueError: There is none.
    """
    counts, _ = np.histogram(rows, [*_KNOTS, np.inf])
    knots = [knot for knot, count in zip(_KNOTS, counts.tolist(), strict=True) if count >= _LEAST_TURNS]
    if not knots:
        raise ValueError(f"{len(rows)} turns are not enough for a fit")
    return knots


def _design(turns: np.ndarray, knots: Sequence[int]) -> np.ndarray:
    """Returns the factors of the terms `(turns, knots + terms)`: shares of knots, and what was counted."""
    shares = np.zeros((len(turns), len(knots)))
    for shares_of_turn, num_rows in zip(shares, turns[:, 0].astype(int).tolist(), strict=True):
        for place, share in blend(num_rows, knots).items():
            shares_of_turn[place] = share
    return np.concatenate([shares, turns[:, 1:]], axis=1)


def _solve(design: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Returns the terms whose sums are closest to the seconds; one that would be negative is 0.

    The weights come from fitted times in the end: those of measured times favour turns that happened to be
    short. Only then is it certain which terms would be negative.
    """
    num_terms = design.shape[1]
    kept = np.asarray(design.any(axis=0))
    least = np.full(num_terms, -np.inf)  # a knot stands for enough turns
    least[num_terms - len(_TERMS) :] = [-np.inf if name in _SIGNED else 0.0 for name in _TERMS]
    weights = 1 / seconds
    for number in range(_ROUNDS):
        found = np.zeros(num_terms)
        found[kept], *_ = np.linalg.lstsq(design[:, kept] * weights[:, None], seconds * weights, rcond=None)
        if _ROUNDS // 2 <= number < _ROUNDS - 1:
            kept &= found >= least
        found = found.clip(least)
        weights = 1 / np.maximum(design @ found, seconds.min())
    return found


def _mode(request: Request) -> Mode:
    if request.beam is not None:
        return Mode.BEAM
    return Mode.GREEDY if request.sampling is None else Mode.SAMPLING
