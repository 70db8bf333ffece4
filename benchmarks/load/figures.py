"""The measurements of `benchmarks.load`. In each, all contenders alternate within every round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.progress import Progress

from benchmarks.load.engine import DrivenEngine
from benchmarks.load.generator import Generator
from benchmarks.load.ideal import MOST_ENCODED, replay
from benchmarks.load.mix import (
    MIX,
    ONLY_GREEDY,
    Job,
    Mode,
    Outcome,
    Throughput,
    draw_jobs,
    quantile,
    throughput,
)
from benchmarks.report import median
from benchmarks.serving import RunningServer

IN_FLIGHT = 64
_MIXES = {"mix": MIX, "greedy": ONLY_GREEDY}
_BESIDE_IDEAL = [f"{name}_p{q}" for name in ("first_token", "inter_token") for q in (50, 99)]

Figures = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """The server, the load generator, and the extent of the measurements.

    Attributes:
        num_rounds: Number of timed rounds.
        open_seconds: Duration of the arrivals in an open loop.
        jobs_per_row: Jobs of a closed loop for each request in flight.
    """

    server: RunningServer
    generator: Generator
    progress: Progress
    num_rounds: int
    open_seconds: float
    jobs_per_row: int = 4

    def rounds(self, label: str) -> Iterable[int]:
        """Returns the round numbers; the first one, 0, is the warm-up."""
        return self.progress.track(range(self.num_rounds + 1), description=label)

    def closed_loop(self, jobs: list[Job], in_flight: int, *, stream: bool) -> Throughput:
        """Run a closed loop through gRPC that is always full."""
        run = self.generator.closed_loop(self.server.address, jobs, in_flight=in_flight, stream=stream)
        return throughput(run.outcomes, in_flight)


def measure_closed_loops(bench: Bench, engine: DrivenEngine, in_flight: int = IN_FLIGHT) -> Figures:
    """Measure tokens per second in process and through gRPC, and the shares of the engine's."""
    contenders: dict[str, Callable[[list[Job]], Throughput]] = {
        "engine": lambda jobs: throughput(engine.closed_loop(jobs, in_flight), in_flight),
        "unary": lambda jobs: bench.closed_loop(jobs, in_flight, stream=False),
        "stream": lambda jobs: bench.closed_loop(jobs, in_flight, stream=True),
    }
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    for seed in bench.rounds(f"closed loops of {in_flight}"):
        for mix, shares in _MIXES.items():
            jobs = draw_jobs(bench.jobs_per_row * in_flight, shares, seed)
            for name, run in contenders.items():
                rate = run(jobs).tokens_per_second
                if seed:
                    rates[mix, name].append(rate)
    return {
        mix: {
            name: {
                "tokens_per_second": median(rates[mix, name]),
                "to_engine": median(
                    rate / base for rate, base in zip(rates[mix, name], rates[mix, "engine"], strict=True)
                ),
            }
            for name in contenders
        }
        for mix in _MIXES
    }


def measure_sweep(
    bench: Bench, loads: Sequence[float], measure_machine: Callable[[], Figures] = dict
) -> list[Figures]:
    """Measure latencies of streams at rising arrival rates; each round first measures the capacity.

    Args:
        bench: The server, the load generator and the extent.
        loads: Arrival rates as shares of the capacity, the requests per second of a full closed loop.
        measure_machine: Measures the times of turns, as `fit` returns them, with which an ideal scheduler
            serves the same arrivals; by default there is none.
    """
    rows: dict[float, list[Figures]] = defaultdict(list)
    for seed in bench.rounds("arrival rates"):
        jobs = draw_jobs(bench.jobs_per_row * IN_FLIGHT, MIX, seed)
        capacity = bench.closed_loop(jobs, IN_FLIGHT, stream=True).requests_per_second
        machine = measure_machine() if seed else {}
        for load in loads if seed else ():
            rows[load].append(_open_figures(bench, load * capacity, seed, machine))
    return [
        {"load": load} | {name: median(row[name] for row in found) for name in found[0]}
        for load, found in rows.items()
    ]


def _open_figures(bench: Bench, rate: float, seed: int, machine: Figures) -> Figures:
    """Run one open loop, and collect figures from its clients and from the server."""
    jobs = draw_jobs(max(round(rate * bench.open_seconds), 1), MIX, seed)
    steps, cpu_before = bench.server.histogram("seq2seq_decode_step_seconds"), bench.server.cpu_seconds()
    run = bench.generator.open_loop(bench.server.address, jobs, rate=rate, stream=True)
    cpu_seconds = bench.server.cpu_seconds() - cpu_before
    ours = latencies(run.outcomes)
    if machine:
        ours |= _beside_ideal(ours, run.outcomes, machine)
    return ours | {
        "requests_per_second": rate,
        "step_median": bench.server.histogram("seq2seq_decode_step_seconds").since(steps).quantile(0.5),
        "client_cpu_share": run.cpu_share,
        "client_lateness_p99": run.lateness_seconds,
        "server_cpu_share": cpu_seconds / max(outcome.end for outcome in run.outcomes),
    }


def _beside_ideal(ours: Figures, outcomes: Sequence[Outcome], machine: Figures) -> Figures:
    """Returns the latencies of an ideal scheduler, and how many times as long ours are.

    Its bound of encoding is the one with the least sum of both p99.
    """
    calls = [(outcome.arrival, outcome.job) for outcome in outcomes]
    found = []
    for bound in MOST_ENCODED:
        served, busy_seconds = replay(machine["times"], machine["spread"], calls, bound)
        share = busy_seconds / max(outcome.end for outcome in served)
        found.append(latencies(served) | {"most_encoded": bound, "busy_share": share})
    ideal = min(found, key=lambda one: one["first_token_p99"] + one["inter_token_p99"])
    return {f"ideal_{name}": ideal[name] for name in (*_BESIDE_IDEAL, "most_encoded", "busy_share")} | {
        f"{name}_to_ideal": ours[name] / ideal[name] for name in _BESIDE_IDEAL
    }


def latencies(outcomes: Sequence[Outcome]) -> Figures:
    """Returns counts and quantiles of an open loop of streams.

    A step of greedy search or sampling yields a token. A step of beam search yields the tokens on which all
    hypotheses agree, and there may be none for a long time: so first tokens and gaps are those of the others.
    """
    done = [outcome for outcome in outcomes if outcome.code == "OK"]
    steady = [outcome for outcome in done if outcome.job.mode is not Mode.BEAM]
    values = {
        "latency": [outcome.end - outcome.arrival for outcome in done],
        "first_token": [outcome.first - outcome.arrival for outcome in steady],
        "inter_token": [gap for outcome in steady for gap in outcome.gaps],
    }
    return {
        "requests": len(outcomes),
        "refused": sum(outcome.code == "RESOURCE_EXHAUSTED" for outcome in outcomes),
        "failed": sum(outcome.code not in ("OK", "RESOURCE_EXHAUSTED") for outcome in outcomes),
        # A sample ends wherever the end of sequence is drawn: one in some hundred does so early.
        "ended_early": sum(
            outcome.num_tokens < outcome.job.num_tokens
            for outcome in done
            if outcome.job.mode is not Mode.SAMPLING
        ),
    } | {f"{name}_p{q}": quantile(found, q / 100) for name, found in values.items() for q in (50, 99)}
