"""Compares the model with real servers, on the same calls at the same times."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import grpc
from rich.progress import Progress

from benchmarks.load.generator import Generator, Run
from benchmarks.load.mix import MAX_TARGET_LENGTH, MIX, ONLY_GREEDY, Job, draw_jobs, quantile, throughput
from benchmarks.scale.cluster import Cluster
from benchmarks.scale.fit import Fit, MeasuredEngine, measure_turns
from benchmarks.scale.model import Call
from benchmarks.scale.policies import RoundRobin
from benchmarks.scale.times import EngineTimes
from benchmarks.serving import RunningServer, serving
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.protos.open_inference_pb2 import ModelStatisticsRequest
from seq2seq_serve.protos.open_inference_pb2_grpc import GRPCInferenceServiceStub
from seq2seq_serve.server.config import ProviderPolicy, RunnerConfig

Figures = dict[str, Any]

BAR = 0.15  # largest relative error of the whole latency
_QUANTILES = {"p50": 0.5, "p99": 0.99}
_LEVELS = (1, 2, 3, 4, 6, 8, 12, 16)  # requests in flight of a fit for servers of few slots
_ALL_LEVELS = (*_LEVELS, 32, 64)
_MAX_SLOTS = 160  # enough for 64 requests of the mix
_NUM_PINGS = 200
_SEEDS = range(5)  # the client's first choice of a server is random, and changes all later ones


@dataclass(frozen=True)
class Setup:
    """Servers on the cores of this machine.

    Attributes:
        name: For the tables.
        slots: Slots of each server.
        cores: The core of each server, counted among the usable ones.
    """

    name: str
    slots: tuple[int, ...]
    cores: tuple[int, ...]


SETUPS = (
    Setup("two servers of 8 slots, a core each", (8, 8), (0, 1)),
    Setup("three servers of 8 slots on one core", (8, 8, 8), (0, 0, 0)),
    Setup("servers of 16 and of 4 slots, a core each", (16, 4), (0, 1)),
)


@dataclass(frozen=True)
class Plan:
    """Extent of the comparison.

    Attributes:
        setups: The servers.
        loads: Arrival rates, as shares of the capacity.
        num_rounds: Number of rounds, each with its own fit and capacity.
        num_calls: Number of calls of a run.
    """

    setups: tuple[Setup, ...]
    loads: tuple[float, ...]
    num_rounds: int
    num_calls: int


def _engine_config(num_slots: int) -> RunnerConfig:
    """Returns the settings of an engine, in this process as in a server."""
    return RunnerConfig(
        shares_threads=True,
        provider=ProviderPolicy.CPU,
        precision=Precision.INT8,
        num_threads=1,
        max_slots=num_slots,
        max_source_length=MAX_TARGET_LENGTH,
        max_target_length=MAX_TARGET_LENGTH,
    )


@dataclass(frozen=True)
class _Counted:
    """The work of a server since it started; `steps` has the number of steps by their rows."""

    cpu_seconds: float
    num_encodes: int
    steps: Counter[int]

    @classmethod
    def of(cls, server: RunningServer) -> _Counted:
        with grpc.insecure_channel(server.address) as channel:
            stub = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
            (model,) = stub.ModelStatistics(ModelStatisticsRequest()).model_stats
        steps = Counter({each.batch_size: each.compute_infer.count for each in model.batch_stats})
        return cls(server.cpu_seconds(), model.inference_stats.compute_input.count, steps)

    def since(self, before: _Counted) -> _Counted:
        num_encodes = self.num_encodes - before.num_encodes
        return _Counted(self.cpu_seconds - before.cpu_seconds, num_encodes, self.steps - before.steps)


def validate(bundle: Path, plan: Plan, progress: Progress) -> list[Figures]:
    """Run real servers and the model; returns the figures of each setup and load."""
    cores = sorted(os.sched_getaffinity(0))
    rows: list[Figures] = []
    task = progress.add_task("real servers", total=len(plan.setups) * plan.num_rounds * len(plan.loads))
    for setup in plan.setups:
        found: dict[float, list[Figures]] = {load: [] for load in plan.loads}
        with _servers(bundle, setup, cores) as servers, Generator(cores[-1:]) as generator:
            own_cores = [cores[core % len(cores)] for core in setup.cores]
            address = "ipv4:" + ",".join(server.address for server in servers)
            for seed in range(plan.num_rounds):
                fits = _fit_on(bundle, own_cores, _LEVELS)
                times = EngineTimes.median([each.times for each in fits])
                times = _with_grpc(times, servers[0], generator)
                in_flight = 2 * sum(setup.slots)
                jobs = draw_jobs(6 * in_flight, MIX, seed)
                run = generator.closed_loop(address, jobs, in_flight=in_flight, stream=False)
                capacity = throughput(run.outcomes, in_flight).requests_per_second
                for load in plan.loads:
                    jobs = draw_jobs(plan.num_calls, MIX, seed)
                    before = [_Counted.of(server) for server in servers]
                    run = generator.open_loop(address, jobs, rate=load * capacity, stream=False)
                    work = [
                        _Counted.of(server).since(each) for server, each in zip(servers, before, strict=True)
                    ]
                    cpu_seconds = sum(each.cpu_seconds for each in work)
                    # The load generator takes its part of the last core.
                    slowness = [1 / (1 - run.cpu_share * (core == cores[-1])) for core in own_cores]
                    # The machine's speed changes, because others use its caches and memory.
                    factor = cpu_seconds / predicted_seconds(times, jobs, work)
                    by_fit = simulate(run, setup, times, slowness)
                    clusters = simulate(run, setup, times.scaled(factor), slowness)
                    figures = {
                        "requests_per_second": load * capacity,
                        "times": dataclasses.asdict(times),
                        "fit_total_error": max((each.total_error for each in fits), key=abs),
                        "lateness_p99": run.lateness_seconds,
                        "loop_lag_p99": run.lag_seconds,
                        "generator_cpu_share": run.cpu_share,
                        "load_average": os.getloadavg()[0],
                        "cpu_seconds": cpu_seconds,
                        "slower_than_fit": factor,
                        "by_fit_alone": compare(run, by_fit),
                    }
                    found[load].append(figures | compare(run, clusters))
                    progress.advance(task)
        for load, rounds in found.items():
            rows.append({"setup": setup.name, "load": load, "rounds": rounds} | _medians(rounds))
    return rows


def simulate(run: Run, setup: Setup, times: EngineTimes, slowness: Sequence[float]) -> list[Cluster]:
    """Let the model serve the calls of a real run, at the times when they were sent, with several seeds.

    Args:
        run: The real run.
        setup: The servers.
        times: Times of their engines, where nothing else uses the core.
        slowness: Factor of these times, for each server.
    """
    outcomes = sorted(run.outcomes, key=lambda one: one.sent)
    clusters = []
    for seed in _SEEDS:
        # The balancer of the project's clients, which the generator uses.
        cluster = Cluster(times, setup.slots, RoundRobin, cores=setup.cores, slowness=slowness, seed=seed)
        cluster.run([Call.of(outcome.job, outcome.sent) for outcome in outcomes])
        clusters.append(cluster)
    return clusters


def predicted_seconds(times: EngineTimes, jobs: Sequence[Job], work: Sequence[_Counted]) -> float:
    """Returns the processor time that the work of a run takes by the fitted times.

    Args:
        times: The fitted times.
        jobs: All jobs of the run.
        work: What the servers counted.
    """
    seconds = times.encode_seconds * sum(each.num_encodes for each in work)
    for each in work:
        seconds += sum(count * times.turn_seconds(num_rows) for num_rows, count in each.steps.items())
    for job in jobs:
        call = Call.of(job, 0.0)
        num_later = call.num_tokens - 1  # turns in which a beam has all its rows
        num_positions = call.source_length * (1 + num_later * call.num_slots)
        num_positions += call.num_slots * num_later * call.num_tokens // 2
        seconds += times.mode_seconds(call.mode) * (1 + num_later * call.num_slots)
        seconds += times.position_seconds * num_positions + times.token_seconds * call.source_length
    return seconds + times.call_seconds * len(jobs)


def compare(run: Run, clusters: Sequence[Cluster]) -> Figures:
    """Returns the quantiles of the real times, and of those of all simulated calls."""
    calls = [call for cluster in clusters for call in cluster.ended]
    real = {
        "latency": [outcome.end - outcome.sent for outcome in run.outcomes],
        "wait": [outcome.queue_seconds for outcome in run.outcomes],
        "first_token": [outcome.first_token_seconds for outcome in run.outcomes],
    }
    simulated = {
        "latency": [call.end - call.arrival for call in calls],
        "wait": [call.admitted - call.queued for call in calls],
        "first_token": [call.first - call.queued for call in calls],
    }
    return {
        f"{name}_{label}": {"real": quantile(real[name], q), "model": quantile(simulated[name], q)}
        for name in real
        for label, q in _QUANTILES.items()
    }


def measure_times(bundle: Path, num_rounds: int, progress: Progress) -> list[Fit]:
    """Measure the times of an engine alone on the first core, and of gRPC with the client on the last."""
    cores = sorted(os.sched_getaffinity(0))
    alone = Setup("one server", (_MAX_SLOTS,), (0,))
    fits = []
    with _servers(bundle, alone, cores) as (server,), Generator(cores[-1:]) as generator:
        for _ in progress.track(range(num_rounds), description="rounds"):
            (found,) = _fit_on(bundle, cores[:1], _ALL_LEVELS)
            times = _with_grpc(found.times, server, generator)
            fits.append(dataclasses.replace(found, times=times))
    return fits


def _fit_on(bundle: Path, cores: Sequence[int], levels: Sequence[int]) -> list[Fit]:
    """Fit the times of an engine on each core, on all at once, because they share caches and memory."""
    with ProcessPoolExecutor(len(cores), get_context("spawn")) as pool:
        return list(pool.map(_fit, [bundle] * len(cores), cores, [levels] * len(cores)))


def _fit(bundle: Path, core: int, levels: Sequence[int]) -> Fit:
    os.sched_setaffinity(0, {core})
    engine = MeasuredEngine(bundle, _engine_config(_MAX_SLOTS))
    engine.warm_up()
    return measure_turns(engine, MIX, levels, num_jobs=40)


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


@contextmanager
def _servers(bundle: Path, setup: Setup, cores: Sequence[int]) -> Iterator[list[RunningServer]]:
    with ExitStack() as stack:
        servers = []
        for num_slots, core in zip(setup.slots, setup.cores, strict=True):
            config = _engine_config(num_slots)
            flags = ["--provider", config.provider.value, "--precision", Precision.INT8.value]
            for name in ("max_slots", "max_source_length", "max_target_length"):
                flags += [f"--{name.replace('_', '-')}", str(getattr(config, name))]
            os.sched_setaffinity(0, {cores[core % len(cores)]})  # the server inherits the affinity
            try:
                servers.append(stack.enter_context(serving(bundle, [*flags, "--threads", "1"])))
            finally:
                os.sched_setaffinity(0, cores)
        yield servers


def _medians(rounds: Sequence[Figures]) -> Figures:
    """Returns the medians of the rounds, and the errors of the model's."""
    figures: Figures = {}
    if "slower_than_fit" in rounds[0]:
        figures["slower_than_fit"] = statistics.median(each["slower_than_fit"] for each in rounds)
    by_fit_alone = [each["by_fit_alone"] for each in rounds if "by_fit_alone" in each]
    if by_fit_alone:
        figures["by_fit_alone"] = _medians(by_fit_alone)
    for name, value in rounds[0].items():
        if not isinstance(value, dict) or "real" not in value:
            continue
        real = statistics.median(each[name]["real"] for each in rounds)
        model = statistics.median(each[name]["model"] for each in rounds)
        figures[name] = {"real": real, "model": model, "error": model / real - 1}
    return figures
