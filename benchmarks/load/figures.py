"""The three measurements of `benchmarks.load`. In each, all contenders alternate within every round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.progress import Progress

from benchmarks.load.engine import DrivenEngine
from benchmarks.load.generator import Generator, Run
from benchmarks.load.ideal import MOST_ENCODED, replay
from benchmarks.load.mix import (
    MIX,
    ONLY_GREEDY,
    WITHOUT_SAMPLING,
    Job,
    Mode,
    Outcome,
    Throughput,
    draw_jobs,
    quantile,
    throughput,
)
from benchmarks.load.peer import PeerQueue
from benchmarks.report import median
from benchmarks.serving import RunningServer

IN_FLIGHT = 64
SERVICE_LOAD = 0.7  # share of the capacity at which whole latencies are compared with the peer's
_MIXES = {"mix": MIX, "greedy": ONLY_GREEDY}
_STEP_SECONDS, _STEP_ROWS = "seq2seq_decode_step_seconds", "seq2seq_step_batch_size"

BESIDE_IDEAL = [f"{name}_p{q}" for name in ("first_token", "inter_token") for q in (50, 99)]

Figures = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """Extent of the measurements.

    Attributes:
        num_rounds: Number of timed rounds.
        open_seconds: Duration of the arrivals in an open loop.
        loads: Arrival rates of the sweep, as shares of the capacity.
        batch_sizes: Largest batches to try with CTranslate2.
        rate_ratios: Rising ratios of our rate to CTranslate2's, at which latencies are compared.
        num_jobs: Jobs of a closed loop; a multiple of `IN_FLIGHT`.
    """

    num_rounds: int
    open_seconds: float
    loads: tuple[float, ...]
    batch_sizes: tuple[int, ...] = ()
    rate_ratios: tuple[float, ...] = ()
    num_jobs: int = 4 * IN_FLIGHT


@dataclass(frozen=True)
class Bench:
    """The server, the load generator and the plan of the measurements."""

    plan: Plan
    server: RunningServer
    generator: Generator
    progress: Progress

    def rounds(self, label: str) -> Iterable[int]:
        """Returns the round numbers; the first one, 0, is the warm-up."""
        return self.progress.track(range(self.plan.num_rounds + 1), description=label)

    def closed_loop(self, jobs: list[Job], *, stream: bool) -> Throughput:
        """Run a closed loop through gRPC that is always full."""
        run = self.generator.closed_loop(self.server.address, jobs, in_flight=IN_FLIGHT, stream=stream)
        return throughput(run.outcomes, IN_FLIGHT)

    def open_loop(self, shares: Mapping[Mode, float], rate: float, seed: int, *, stream: bool) -> Run:
        """Run an open loop through gRPC, at a rate that does not depend on the answers."""
        jobs = self.jobs(shares, rate, seed)
        return self.generator.open_loop(self.server.address, jobs, rate=rate, stream=stream)

    def jobs(self, shares: Mapping[Mode, float], rate: float, seed: int) -> list[Job]:
        """Draw the jobs of an open loop."""
        return draw_jobs(round(rate * self.plan.open_seconds), shares, seed)

    def capacity(self, shares: Mapping[Mode, float], seed: int, *, stream: bool) -> float:
        """Measure the requests per second of a closed loop that is always full."""
        return self.closed_loop(
            draw_jobs(self.plan.num_jobs, shares, seed), stream=stream
        ).requests_per_second


def measure_closed_loops(bench: Bench, engine: DrivenEngine) -> Figures:
    """Measure tokens per second through gRPC, in process, and in static batches."""
    contenders: dict[str, Callable[[list[Job]], Throughput]] = {
        "engine": lambda jobs: throughput(engine.closed_loop(jobs, IN_FLIGHT), IN_FLIGHT),
        "unary": lambda jobs: bench.closed_loop(jobs, stream=False),
        "stream": lambda jobs: bench.closed_loop(jobs, stream=True),
        "static": lambda jobs: _batch_rate(engine.static_batches(jobs, IN_FLIGHT)),
    }
    rates: dict[tuple[str, str], list[Throughput]] = defaultdict(list)
    for seed in bench.rounds("closed loops"):
        for mix, shares in _MIXES.items():
            jobs = draw_jobs(bench.plan.num_jobs, shares, seed)
            for name, run in contenders.items():
                rate = run(jobs)
                if seed:
                    rates[mix, name].append(rate)
    return {
        mix: {
            name: {
                "tokens_per_second": median(rate.tokens_per_second for rate in rates[mix, name]),
                "requests_per_second": median(rate.requests_per_second for rate in rates[mix, name]),
                "to_engine": median(
                    rate.tokens_per_second / base.tokens_per_second
                    for rate, base in zip(rates[mix, name], rates[mix, "engine"], strict=True)
                ),
            }
            for name in contenders
        }
        for mix in _MIXES
    }


def measure_sweep(bench: Bench, measure_machine: Callable[[], Figures] = dict) -> list[Figures]:
    """Measure latencies of streams at rising arrival rates; each round first measures the capacity.

    Args:
        bench: The server, the load generator and the plan.
        measure_machine: Measures the times of turns, as `fit` returns them, with which an ideal scheduler
            serves the same arrivals; by default there is none.
    """
    rows: dict[float, list[Figures]] = defaultdict(list)
    for seed in bench.rounds("arrival rates"):
        capacity = bench.capacity(MIX, seed, stream=True)
        machine = measure_machine() if seed else {}
        for load in bench.plan.loads if seed else ():
            rows[load].append(_open_figures(bench, load * capacity, seed, machine))
    return [
        {"load": load} | {name: median(row[name] for row in found) for name in found[0]}
        for load, found in rows.items()
    ]


def _open_figures(bench: Bench, rate: float, seed: int, machine: Figures) -> Figures:
    """Run one open loop, and collect figures from its clients and from the server's histograms.

    Args:
        bench: The server, the load generator and the plan.
        rate: Arrivals per second.
        seed: Seed of the requests.
        machine: As `measure_sweep` takes it.
    """
    steps, rows = bench.server.histogram(_STEP_SECONDS), bench.server.histogram(_STEP_ROWS)
    cpu_before = bench.server.cpu_seconds()
    run = bench.open_loop(MIX, rate, seed, stream=True)
    seconds = max(outcome.end for outcome in run.outcomes)
    ours = latencies(run.outcomes)
    if machine:
        ours |= _beside_ideal(ours, run.outcomes, machine)
    return ours | {
        "requests_per_second": rate,
        "step_median": bench.server.histogram(_STEP_SECONDS).since(steps).quantile(0.5),
        "step_rows_median": bench.server.histogram(_STEP_ROWS).since(rows).quantile(0.5),
        "client_cpu_share": run.cpu_share,
        "client_lateness_p99": run.lateness_seconds,
        "server_cpu_share": (bench.server.cpu_seconds() - cpu_before) / seconds,
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
    return {f"ideal_{name}": ideal[name] for name in (*BESIDE_IDEAL, "most_encoded", "busy_share")} | {
        f"{name}_to_ideal": ours[name] / ideal[name] for name in BESIDE_IDEAL
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
        "ended_early": sum(outcome.num_tokens < outcome.job.num_tokens for outcome in done),
    } | {f"{name}_p{q}": quantile(found, q / 100) for name, found in values.items() for q in (50, 99)}


def measure_against_peer(bench: Bench, queues: Mapping[tuple[str, int], PeerQueue]) -> Figures:
    """Compare whole latencies with CTranslate2's at lower and lower rates of CTranslate2.

    Args:
        bench: The server, the load generator and the plan.
        queues: CTranslate2 by its thread setting and largest batch; the best one is selected first.
    """
    ratios = bench.plan.rate_ratios

    def peer_p99(queue: PeerQueue, rate: float, seed: int) -> float:
        return _p99(queue.open_loop(bench.jobs(WITHOUT_SAMPLING, rate, seed), rate))

    rate = SERVICE_LOAD * bench.capacity(WITHOUT_SAMPLING, 0, stream=False) / ratios[len(ratios) // 2]
    settings = bench.progress.track(queues, description="CTranslate2's settings")
    tried = {setting: peer_p99(queues[setting], rate, seed=0) for setting in settings}
    best = min(tried, key=tried.__getitem__)
    rates, ours = list[float](), list[float]()
    theirs: dict[float, list[float]] = defaultdict(list)
    for seed in bench.rounds("beside CTranslate2"):
        rate = SERVICE_LOAD * bench.capacity(WITHOUT_SAMPLING, seed, stream=False)
        run = bench.open_loop(WITHOUT_SAMPLING, rate, seed, stream=False)
        if not seed:
            continue
        rates.append(rate)
        ours.append(_p99(run.outcomes))
        for ratio in ratios:
            theirs[ratio].append(peer_p99(queues[best], rate / ratio, seed))
    by_ratio = {ratio: median(found) for ratio, found in theirs.items()}
    return {
        "requests_per_second": median(rates),
        "latency_p99": median(ours),
        "ctranslate2_setting": {"threads": best[0], "max_batch_size": best[1]},
        "ctranslate2_tried_p99": {f"{threads} {size}": p99 for (threads, size), p99 in tried.items()},
        "ctranslate2_latency_p99_by_rate_ratio": by_ratio,
        "rate_ratio_at_same_p99": _ratio_at(median(ours), by_ratio),
    }


def _ratio_at(p99: float, theirs: Mapping[float, float]) -> float:
    """Returns the least ratio of our rate to theirs at which their latency is at most `p99`, interpolated.

    If no ratio is large enough, this is the last one.

    Args:
        p99: Our latency.
        theirs: Their latencies by rising ratios, and thus at falling rates.
    """
    points = list(theirs.items())
    if points[0][1] <= p99:
        return points[0][0]
    for (ratio, slower), (next_ratio, faster) in pairwise(points):
        if faster <= p99:
            return ratio + (next_ratio - ratio) * (slower - p99) / (slower - faster)
    return points[-1][0]


def _batch_rate(outcomes: Sequence[Outcome]) -> Throughput:
    seconds = max(outcome.end for outcome in outcomes)
    return Throughput(sum(outcome.num_tokens for outcome in outcomes) / seconds, len(outcomes) / seconds)


def _p99(outcomes: Sequence[Outcome]) -> float:
    return quantile([outcome.end - outcome.arrival for outcome in outcomes], 0.99)
