"""Questions about many servers, answered by the model."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.progress import Progress

from benchmarks.load.mix import MAX_TARGET_LENGTH, quantile
from benchmarks.scale.cluster import Cluster, MakeBalancer, Summary, Traffic, summarize
from benchmarks.scale.model import Call, Process, Replica
from benchmarks.scale.policies import LeastLoad, Load, Random, RoundRobin
from benchmarks.scale.times import EngineTimes
from seq2seq_serve.server.config import QueueLimits

Figures = dict[str, Any]

RATES = (100, 10_000, 1_000_000)
_WARM_UP_SECONDS = 10.0
_GROWING_SIZE = 5  # replicas before the rate rises
_GROWTH_BEGINS = 60.0


@dataclass(frozen=True)
class Servers:
    """The servers that are asked about, and what is asked of them.

    Attributes:
        num_slots: Slots of a server, where the question is not their number.
        num_clients: Number of clients or proxies, each of which balances by itself.
        latency_seconds: The objective: p99 of the whole answer.
        wait_seconds: The objective: p99 of the wait for a slot.
    """

    num_slots: int = 32
    num_clients: int = 8
    latency_seconds: float = 1.0
    wait_seconds: float = 0.1

    def are_within(self, summary: Summary) -> bool:
        """Returns whether all calls were answered, and within the objective."""
        return (
            summary.refused + summary.failed == 0
            and summary.latency_p99 <= self.latency_seconds
            and summary.wait_p99 <= self.wait_seconds
        )


@dataclass(frozen=True)
class Plan:
    """Extent of the simulations.

    Attributes:
        num_calls: Number of calls whose figures count, at least.
        sizes: Numbers of replicas, rising.
        slots: Numbers of slots to try.
        full_scale_seconds: Simulated time at the largest of `RATES`; 0 leaves it out.
    """

    num_calls: int
    sizes: tuple[int, ...]
    slots: tuple[int, ...]
    full_scale_seconds: float


@dataclass(frozen=True)
class Policy:
    """How clients spread their calls.

    Attributes:
        num_clients: Number of clients that balance by themselves; None for those of the servers.
        scrape_seconds: Age of the gauges that clients look at; None if they do not.
    """

    name: str
    make: MakeBalancer
    num_clients: int | None = None
    scrape_seconds: float | None = None


def _wanted(replica: Replica) -> float:
    return replica.num_slots_wanted


def _seen(replica: Replica) -> float:
    return replica.seen_load


def _least(load: Load | None = None, num_choices: int | None = None) -> MakeBalancer:
    return lambda env, chance: LeastLoad(env, chance, load, num_choices)


RANDOM = Policy("random", Random)
ROUND_ROBIN = Policy("round robin", RoundRobin)
LEAST = Policy("least requests, one balancer", _least(), num_clients=1)
TWO_OWN = Policy("two choices, own counts", _least(num_choices=2))
POLICIES = (
    RANDOM,
    ROUND_ROBIN,
    Policy("round robin, one balancer", RoundRobin, num_clients=1),
    LEAST,
    Policy("least requests, own counts", _least()),
    Policy("least requests, everybody's counts", _least(_wanted)),
    Policy("least requests, gauges 1 s old", _least(_seen), scrape_seconds=1.0),
    Policy("least requests, gauges 15 s old", _least(_seen), scrape_seconds=15.0),
    Policy("two choices, one balancer", _least(num_choices=2), num_clients=1),
    TWO_OWN,
    Policy("two choices, gauges 1 s old", _least(_seen, 2), scrape_seconds=1.0),
    Policy("two choices, gauges 15 s old", _least(_seen, 2), scrape_seconds=15.0),
)


class Answers:
    """Runs the simulations of one engine's times.

    Args:
        times: Times of an engine.
        servers: The servers.
        plan: Extent of the simulations.
        progress: Shows the questions.
    """

    def __init__(self, times: EngineTimes, servers: Servers, plan: Plan, progress: Progress) -> None:
        self._times = times
        self._servers = servers
        self._plan = plan
        self._progress = progress
        self.capacity = self._capacity(servers.num_slots)

    def all(self) -> Figures:
        """Answer every question."""
        return {
            "servers": dataclasses.asdict(self._servers),
            "capacity": self.capacity,
            "by_slots": self.by_slots(),
            "by_size": (by_size := self.by_size()),
            "replicas": self.replicas(by_size),
            "policies": self.policies(),
            "clients_of_own_counts": self.clients(),
            "jump": self.jump(),
            "ramp": self.ramp(),
            "one_lost": self.one_lost(),
        }

    def by_slots(self) -> list[Figures]:
        """The capacity of a replica by its number of slots, and the slots in use at the objective."""
        rows = []
        for num_slots in self._progress.track(self._plan.slots, description="slots"):
            size = 8
            rate = self._best_rate(size, ROUND_ROBIN, num_slots)
            row: Figures = {"slots": num_slots, "capacity": self._capacity(num_slots), "rate": rate}
            if rate:
                calls, summary = self._run(size, rate, ROUND_ROBIN, num_slots)
                # Little's law: the rate of arrivals times the time for which each call holds its slots.
                held = statistics.mean((call.end - call.admitted) * call.num_slots for call in calls)
                row["slots_in_use"] = rate * held / num_slots
                row |= {"latency_p99": summary.latency_p99, "wait_p99": summary.wait_p99}
            rows.append(row)
        return rows

    def by_size(self) -> list[Figures]:
        """The rate that a replica can take within the objective, by the number of replicas and the policy.

        Raises:
            RuntimeError: The engine is too slow for the objective, however many replicas there are.
        """
        policies = (RANDOM, ROUND_ROBIN, TWO_OWN, LEAST)
        cells = [(policy, size) for policy in policies for size in self._plan.sizes]
        rows = []
        for policy, size in self._progress.track(cells, description="numbers of replicas"):
            rate = self._best_rate(size, policy)
            if not rate and size == max(self._plan.sizes):
                slots = self._servers.num_slots
                raise RuntimeError(
                    f"{size} servers of {slots} slots do not meet the objective at any rate ({policy.name})"
                )
            rows.append({"policy": policy.name, "size": size, "rate": rate})
        return rows

    def replicas(self, by_size: Sequence[Figures]) -> list[Figures]:
        """The number of replicas for each of `RATES`, by policy."""
        rows = []
        for policy in dict.fromkeys(row["policy"] for row in by_size):
            found = {row["size"]: row["rate"] for row in by_size if row["policy"] == policy}
            for rate in RATES:
                rows.append({"policy": policy, "rate": rate, "replicas": _size_for(rate, found)})
        if self._plan.full_scale_seconds:
            size = next(
                row["replicas"]
                for row in rows
                if row["policy"] == ROUND_ROBIN.name and row["rate"] == RATES[-1]
            )
            seconds = self._plan.full_scale_seconds
            cluster = self._cluster(size)
            warm_up = seconds / 2
            traffic = Traffic.steady(RATES[-1], seconds)
            calls = cluster.run(traffic.calls(self._servers.num_clients, seed=1), seconds + 2)
            figures = dataclasses.asdict(summarize(calls, warm_up, seconds))
            rows.append(
                {"policy": ROUND_ROBIN.name, "rate": RATES[-1], "replicas": size, "simulated": figures}
            )
        return rows

    def policies(self) -> list[Figures]:
        """The p99 of 16 replicas by policy and load, for like and for unlike replicas."""
        size, most = 16, self._servers.num_slots
        mixes: Mapping[str, tuple[Sequence[int], Sequence[float], tuple[float, ...]]] = {
            "like": ([most] * size, [1.0] * size, (0.6, 0.8, 0.9)),
            "2 of 16 half as fast": (
                [most] * size,
                [2.0] * 2 + [1.0] * (size - 2),
                (0.6, 0.8),
            ),
            f"half with {most}, half with {most // 4} slots": (
                [most, most // 4] * (size // 2),
                [1.0] * size,
                (0.6, 0.8),
            ),
        }
        cells = [
            (name, slots, slowness, load, policy)
            for name, (slots, slowness, loads) in mixes.items()
            for load in loads
            for policy in POLICIES
        ]
        rows = []
        for name, slots, slowness, load, policy in self._progress.track(cells, description="policies"):
            capacity = sum(
                self._capacity(count) / factor for count, factor in zip(slots, slowness, strict=True)
            )
            _, summary = self._simulate(slots, load * capacity, policy, slowness)
            rows.append({"replicas": name, "load": load, "policy": policy.name} | dataclasses.asdict(summary))
        return rows

    def clients(self) -> list[Figures]:
        """The p99 at 80 % of the capacity when each of many clients counts its own calls only."""
        size, load = 32, 0.8
        rows = []
        for num_clients in self._progress.track((1, 8, 64, 512), description="clients"):
            for policy in (ROUND_ROBIN, TWO_OWN):
                several = dataclasses.replace(policy, num_clients=num_clients)
                _, summary = self._run(size, load * self.capacity, several)
                rows.append({"clients": num_clients, "policy": policy.name} | dataclasses.asdict(summary))
        return rows

    def jump(self) -> list[Figures]:
        """The latencies and refusals after the rate jumps from half of the capacity to one and a half."""
        rate = self.capacity * _GROWING_SIZE
        rates = ((0.0, 0.5 * rate), (_GROWTH_BEGINS, 1.5 * rate))
        cells = [
            (pod_seconds, learn_seconds, max_waiting)
            for pod_seconds, learn_seconds in ((10.0, 1.0), (60.0, 30.0), (120.0, 30.0))
            for max_waiting in (1024, 2 * self._servers.num_slots)
        ]
        return [
            self._grow(rates, 0.5, *cell) for cell in self._progress.track(cells, description="a sudden rise")
        ]

    def ramp(self) -> list[Figures]:
        """The latencies while the rate rises from 40 to 120 % of the capacity in 8 minutes, by threshold."""
        rate = self.capacity * _GROWING_SIZE
        steps = 32
        rates = (
            (0.0, 0.4 * rate),
            *((_GROWTH_BEGINS + 15.0 * i, (0.4 + 0.8 * (i + 1) / steps) * rate) for i in range(steps)),
        )
        thresholds = (0.2, 0.3, 0.4, 0.5, 0.7)
        return [
            self._grow(rates, threshold, 60.0, 30.0, 1024)
            for threshold in self._progress.track(thresholds, description="a slow rise")
        ]

    def one_lost(self) -> list[Figures]:
        """The latencies while one of several replicas is lost and replaced."""
        cells = [(size, load) for load in (0.5, 0.6, 0.7, 0.8) for size in (3, 5, 10, 30)]
        return [
            self._one_lost(size, load) for size, load in self._progress.track(cells, description="one lost")
        ]

    def _cluster(self, size: int, seed: int = 0) -> Cluster:
        servers = self._servers
        return Cluster(
            self._times, [servers.num_slots] * size, RoundRobin, num_clients=servers.num_clients, seed=seed
        )

    def _simulate(
        self, slots: Sequence[int], rate: float, policy: Policy, slowness: Sequence[float] | None = None
    ) -> tuple[list[Call], Summary]:
        """Simulate a steady rate."""
        seconds = _WARM_UP_SECONDS + max(20.0, self._plan.num_calls / rate)
        num_clients = policy.num_clients or self._servers.num_clients
        cluster = Cluster(
            self._times,
            slots,
            policy.make,
            num_clients=num_clients,
            slowness=slowness,
            scrape_seconds=policy.scrape_seconds,
        )
        calls = cluster.run(Traffic.steady(rate, seconds).calls(num_clients, seed=1), seconds + 60)
        return calls, summarize(calls, _WARM_UP_SECONDS, seconds)

    def _run(
        self, size: int, rate: float, policy: Policy, num_slots: int | None = None
    ) -> tuple[list[Call], Summary]:
        """Simulate like replicas at a rate for each."""
        return self._simulate([num_slots or self._servers.num_slots] * size, rate * size, policy)

    def _capacity(self, num_slots: int) -> float:
        """Returns the calls per second of a replica that always has waiting calls."""
        count = 1500
        limits = QueueLimits(max_waiting_requests=count, max_waiting_tokens=count * MAX_TARGET_LENGTH)
        cluster = Cluster(self._times, [num_slots], RoundRobin, queue_limits=limits)
        calls = list(itertools.islice(Traffic.steady(1e6, 1.0).calls(1, seed=1), count))
        for call in calls:
            call.arrival = 0.0
        ends = [call.end for call in cluster.run(calls)][count // 5 : -count // 5]
        seconds = (ends[-1] - ends[0]) / (len(ends) - 1)
        return 1 / (seconds + self._times.call_seconds)  # gRPC had its time before the first turn

    def _best_rate(self, size: int, policy: Policy, num_slots: int | None = None) -> float:
        """Returns the highest rate of a replica within the objective, by bisection; 0 if there is none."""
        low, high = 0.0, 1.05 * (self._capacity(num_slots) if num_slots else self.capacity)
        for _ in range(7):
            rate = (low + high) / 2
            _, summary = self._run(size, rate, policy, num_slots)
            low, high = (rate, high) if self._servers.are_within(summary) else (low, rate)
        return low

    def _grow(
        self,
        rates: Sequence[tuple[float, float]],
        threshold: float,
        pod_seconds: float,
        learn_seconds: float,
        max_waiting: int,
    ) -> Figures:
        seconds = rates[-1][0] + 240.0
        cluster = Cluster(
            self._times,
            [self._servers.num_slots] * _GROWING_SIZE,
            RoundRobin,
            num_clients=self._servers.num_clients,
            queue_limits=QueueLimits(max_waiting_requests=max_waiting),
            scrape_seconds=15.0,
        )
        scaler = Autoscaler(cluster, threshold, pod_seconds, learn_seconds)
        cluster.env.process(scaler.run())
        traffic = dataclasses.replace(Traffic.steady(1.0, seconds), rates=rates)
        calls = cluster.run(traffic.calls(self._servers.num_clients, seed=1), seconds + 30)
        windows = [(begin, summarize(calls, begin, begin + 5.0)) for begin in range(0, int(seconds), 5)]
        bad = [
            begin
            for begin, summary in windows
            if summary.count
            and begin >= _GROWTH_BEGINS
            and (summary.refused or not summary.latency_p99 <= self._servers.latency_seconds)
        ]
        return {
            "threshold": threshold,
            "pod_seconds": pod_seconds,
            "learn_seconds": learn_seconds,
            "max_waiting": max_waiting,
            "first_pod_seconds": scaler.first_ready - _GROWTH_BEGINS,
            "bad_seconds": 5 * len(bad),
            "recovered_seconds": max(bad) + 5 - _GROWTH_BEGINS if bad else 0.0,
            "worst_p99": max(
                summary.latency_p99 for _, summary in windows if not math.isnan(summary.latency_p99)
            ),
            "refused": summarize(calls, _GROWTH_BEGINS, seconds).refused,
            "most_waiting": scaler.most_waiting,
            "replicas": scaler.history,
            "latency_p99_by_time": [(begin, summary.latency_p99) for begin, summary in windows],
        }

    def _one_lost(self, size: int, load: float) -> Figures:
        lost_at, back_after, learn = 30.0, 60.0, 30.0
        seconds = lost_at + back_after + learn + 60
        traffic = Traffic.steady(load * self.capacity * size, seconds)
        tried: list[Summary] = []
        during: list[Summary] = []
        retried, recovered = 0, []
        for seed in range(max(1, math.ceil(self._plan.num_calls / (load * self.capacity * size * 60)))):
            cluster = self._cluster(size, seed)

            def lose(cluster: Cluster = cluster) -> Process:
                yield cluster.env.timeout(lost_at)
                cluster.kill(cluster.replicas[0])
                yield cluster.env.timeout(back_after)
                cluster.replicas.append(cluster.make_replica(self._servers.num_slots))
                cluster.tell_within(learn)

            cluster.env.process(lose())
            calls = cluster.run(traffic.calls(self._servers.num_clients, seed), seconds + 60)
            tried.append(summarize(calls, 5.0, lost_at - 1))
            during.append(summarize(calls, lost_at - 1, lost_at + back_after))
            retried += sum(call.num_tries > 1 for call in calls)
            waits = [
                begin
                for begin in range(int(lost_at), int(seconds), 5)
                if not summarize(calls, begin, begin + 5.0).latency_p99 <= self._servers.latency_seconds
            ]
            recovered.append(max(waits, default=lost_at - 5) + 5 - lost_at)
        return {
            "size": size,
            "load": load,
            "load_without_one": load * size / (size - 1),
            "latency_p99_before": quantile([each.latency_p99 for each in tried], 0.5),
            "latency_p99_during": quantile([each.latency_p99 for each in during], 0.5),
            "retried": retried / len(tried),
            "refused": quantile([each.refused for each in during], 0.5),
            "recovered_seconds": quantile(recovered, 0.5),
        }


class Autoscaler:
    """KEDA and the horizontal pod autoscaler, on the load in replicas.

    The load is the number of wanted slots as a number of full replicas; there are as many replicas as it
    needs at the threshold. A replica is ready `pod_seconds` after the decision, and each client learns of it
    within `learn_seconds`, when it asks DNS again.

    Args:
        cluster: Its gauges are scraped; the autoscaler adds replicas to it.
        threshold: Share of the slots that should be wanted.
        pod_seconds: From the decision to a ready replica.
        learn_seconds: Longest time until a client knows a ready replica.

    Attributes:
        first_ready: Time at which the first added replica was ready; infinite before.
        most_waiting: Largest number of slots at once, as seen at a decision, that calls waited for.
        history: Time and number of ready replicas at each change.
    """

    tolerance = 0.1  # of the horizontal pod autoscaler: smaller deviations change nothing
    period_seconds = 15.0  # between two decisions; KEDA's metrics are asked at each
    max_size = 50

    def __init__(self, cluster: Cluster, threshold: float, pod_seconds: float, learn_seconds: float) -> None:
        self._cluster = cluster
        self._threshold = threshold
        self._pod_seconds = pod_seconds
        self._learn_seconds = learn_seconds
        self._num_wanted = len(cluster.replicas)
        self.first_ready = math.inf
        self.most_waiting = 0
        self.history: list[tuple[float, int]] = [(0.0, self._num_wanted)]

    def run(self) -> Process:
        """Decide at each period, on gauges that are up to a scrape old; it only scales up."""
        env, replicas = self._cluster.env, self._cluster.replicas
        while True:
            yield env.timeout(self.period_seconds)
            self.most_waiting = max(
                self.most_waiting,
                sum(max(replica.num_slots_wanted - replica.num_slots, 0) for replica in replicas),
            )
            load = sum(replica.seen_load / replica.num_slots for replica in replicas)
            ratio = load / self._threshold / len(replicas)
            wanted = math.ceil(load / self._threshold)
            limit = max(2 * len(replicas), len(replicas) + 4)  # of the default behaviour in a period
            if (
                ratio > 1 + self.tolerance
                and (wanted := min(wanted, limit, self.max_size)) > self._num_wanted
            ):
                env.process(self._start(wanted - self._num_wanted))
                self._num_wanted = wanted

    def _start(self, count: int) -> Process:
        cluster = self._cluster
        yield cluster.env.timeout(self._pod_seconds)
        num_slots = cluster.replicas[0].num_slots
        cluster.replicas += [cluster.make_replica(num_slots) for _ in range(count)]
        self.first_ready = min(self.first_ready, cluster.env.now)
        self.history.append((cluster.env.now, len(cluster.replicas)))
        cluster.tell_within(self._learn_seconds)


def _size_for(rate: float, by_size: Mapping[int, float]) -> int:
    """Returns the least number of replicas for a rate; between the simulated sizes, that of the smaller one.

    Beyond the largest simulated size a replica takes as much as at that size.
    """
    best = math.inf
    sizes = sorted(by_size)
    for size, larger in zip(sizes, [*sizes[1:], math.inf], strict=True):
        needed = max(math.ceil(rate / by_size[size]), size) if by_size[size] else math.inf
        if needed < larger:
            best = min(best, needed)
    assert isinstance(best, int)
    return best
