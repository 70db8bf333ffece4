"""Measures the times of a real engine, turn by turn, and fits the terms of `EngineTimes` to them."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.load.engine import DrivenEngine, server_flags, thread_engine
from benchmarks.load.generator import Generator
from benchmarks.load.mix import MAX_TARGET_LENGTH, MIX, ONLY_GREEDY, draw_jobs
from benchmarks.scale.model import EngineTimes, blend
from benchmarks.serving import RunningServer, serving
from seq2seq_serve.bundle.manifest import load_bundle
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.server.config import ProviderPolicy, RunnerConfig, Speculation
from seq2seq_serve.server.engine.plan import Move, Selected
from seq2seq_serve.server.engine.request import Request
from seq2seq_serve.server.engine.result import Turn
from seq2seq_serve.server.engine.state import Sequence as Row
from seq2seq_serve.server.runner.runner import OnnxRunner

# What is counted of a turn: its rows, and what each further term of `EngineTimes` is multiplied with.
COLUMNS = (
    "rows",
    "sampling_row_seconds",
    "beam_row_seconds",
    "position_seconds",
    "encode_seconds",
    "token_seconds",
)
TERMS = COLUMNS[1:]
SIGNED = TERMS[:2]  # beside a greedy row; the others cannot be negative
# Numbers of rows between which a turn's time is a straight line, where enough turns were measured.
_KNOTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
_LEAST_TURNS = 10
_INTERRUPTED = 3  # the fit leaves out turns that took more than 3 times the fitted time
_ROUNDS = 12  # of the weighted least squares
_PERCENTILES = np.arange(0.005, 1, 0.01)  # the middle of each

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


class _MeasuredRunner(OnnxRunner):
    """Counts what each turn runs, in the order of `COLUMNS`, and takes its time.

    Attributes:
        seconds: Processor time of the engine's thread, by turn.
        machine_seconds: Time for which the graphs ran and rows were copied, by turn.
    """

    def reset(self) -> None:
        """Forget all turns so far."""
        self.repeats_steps = False  # a turn is one step
        self._counts = np.zeros(len(COLUMNS))
        self._began = self._machine_seconds = 0.0
        self.turns: list[np.ndarray] = []
        self.seconds: list[float] = []
        self.machine_seconds: list[float] = []

    def encode(self, first_row: int, requests: list[Request]) -> None:
        self._counts[COLUMNS.index("encode_seconds")] += 1
        self._counts[COLUMNS.index("token_seconds")] += sum(request.encode_tokens for request in requests)
        with self._timed():
            super().encode(first_row, requests)

    def step(self, rows: tuple[Row, ...], num_steps: int = 1) -> Selected:
        num_sampling = sum(row.request.sampling is not None for row in rows)
        num_beam = sum(row.request.beam is not None for row in rows)
        num_positions = sum(row.memory_length + row.cache_length for row in rows)
        self._counts += (len(rows), num_sampling, num_beam, num_positions, 0, 0)
        with self._timed():
            return super().step(rows, num_steps)

    def move(self, moves: Iterable[Move]) -> int:
        with self._timed():
            return super().move(moves)

    def end_turn(self, _: Turn) -> None:
        """End a turn, and begin the next one; the time of the first one is not known."""
        now = time.thread_time()  # others may share the core, so wall time would not do
        if self._began:
            self.seconds.append(now - self._began)
            self.machine_seconds.append(self._machine_seconds)
            self.turns.append(self._counts)
        self._counts, self._began, self._machine_seconds = np.zeros(len(COLUMNS)), now, 0.0

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._machine_seconds += time.perf_counter() - began


def measure(bundle: Path) -> dict[str, Any]:
    """Fit an engine and a server, both on the first core, with the client on the last; as `fit`."""
    usable = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, usable[:1])  # the processes that start from now on inherit it
    with serving(bundle, server_flags(_CONFIG)) as server, Generator(usable[-1:]) as generator:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # its OpenMP counts one core
            found = fit(pool.submit(measure_turns, bundle, _CONFIG, _LEVELS).result())
        times = _with_grpc(found["times"], server, generator)
        return found | {"times": dataclasses.asdict(times)}


def measure_turns(
    bundle: Path,
    config: RunnerConfig,
    levels: Sequence[int],
    num_rounds: int = 9,
    *,
    of_machine: bool = False,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Decode the mix in closed loops with few and with many requests in flight.

    Args:
        bundle: The folder of a bundle.
        config: The settings of its runner.
        levels: Numbers of requests in flight.
        num_rounds: How often each of them is measured.
        of_machine: Whether to take the time of the graphs alone, and not the processor time of whole turns.

    Returns:
        For each loop what each turn ran `(turns, columns)`, and its seconds `(turns,)`.
    """
    runner = _MeasuredRunner(load_bundle(bundle), config)
    runner.reset()
    engine = DrivenEngine(thread_engine(runner, runner.end_turn))
    found = []
    for number in range(num_rounds):
        for level in levels:
            runner.reset()
            engine.closed_loop(draw_jobs(16 + 2 * level, MIX, seed=100 * number + level), level)
            seconds = runner.machine_seconds if of_machine else runner.seconds
            found.append((np.array(runner.turns), np.array(seconds)))
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


def fit(measured: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    """Fit the times to the turns of several levels, by least squares of their relative errors.

    Turns that took more than three times the fitted time, in which the machine did something else, are left
    out of a second fit.

    Returns:
        The `times`; the `num_turns` that were measured; the share of the variance of their times that is
        `explained`; `total_error`, of the worst level: predicted by measured time of all its turns, less 1;
        and the `spread`, percentiles of measured by predicted times.

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
    return {
        "times": EngineTimes(tuple(zip(knots, curve, strict=True)), **dict(zip(TERMS, terms, strict=True))),
        "num_turns": len(seconds),
        "explained": float(1 - residual.var() / seconds[usual].var()),
        "total_error": float(max(errors, key=abs)),
        "spread": np.quantile(seconds / (design @ found), _PERCENTILES).tolist(),
    }


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
    least[num_terms - len(TERMS) :] = [-np.inf if name in SIGNED else 0.0 for name in TERMS]
    weights = 1 / seconds
    for number in range(_ROUNDS):
        found = np.zeros(num_terms)
        found[kept], *_ = np.linalg.lstsq(design[:, kept] * weights[:, None], seconds * weights, rcond=None)
        if _ROUNDS // 2 <= number < _ROUNDS - 1:
            kept &= found >= least
        found = found.clip(least)
        weights = 1 / np.maximum(design @ found, seconds.min())
    return found
