"""Clients, replicas and calls in one simulation, and what became of the calls."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import simpy

from benchmarks.load.mix import MIX, Mode, quantile
from benchmarks.scale.model import LOST, OK, REFUSED, Call, Core, Process, Replica
from benchmarks.scale.policies import Balancer
from benchmarks.scale.times import EngineTimes
from seq2seq_serve.server.config import QueueLimits

MakeBalancer = Callable[[simpy.Environment, random.Random], Balancer]

# What this project's clients do after UNAVAILABLE (`client.wire`).
_MAX_TRIES = 4
_BACKOFF_SECONDS = 0.1
_BACKOFF_FACTOR = 2
_BACKOFF_JITTER = 0.2

_SOURCE_LENGTHS, _TARGET_LENGTHS = (10, 40), (4, 64)  # those of the load benchmark
_BLOCK = 4096  # calls that are drawn at once


@dataclass(frozen=True)
class Traffic:
    """Calls that arrive as a Poisson process, with the lengths of the load benchmark.

    Attributes:
        rates: Calls per second, each with the time from which on it holds.
        seconds: Time at which the arrivals end.
        shares: Shares of the decoding modes.
        deadline_seconds: Time that each call has; None sets no deadlines.
    """

    rates: Sequence[tuple[float, float]]
    seconds: float
    shares: Mapping[Mode, float]
    deadline_seconds: float = float("inf")

    @classmethod
    def steady(cls, rate: float, seconds: float, shares: Mapping[Mode, float] = MIX) -> Traffic:
        """Returns calls of one rate."""
        return cls(((0.0, rate),), seconds, shares)

    def calls(self, num_clients: int, seed: int) -> Iterator[Call]:
        """Yields the calls in the order of their arrival; a seed always yields the same ones."""
        chance = np.random.default_rng(seed)
        modes, shares = list(self.shares), np.array(list(self.shares.values()))
        ends = [start for start, _ in self.rates[1:]] + [self.seconds]
        for (start, rate), end in zip(self.rates, ends, strict=True):
            now = start
            while now < end:
                arrivals = now + np.cumsum(chance.exponential(1 / rate, _BLOCK))
                now = arrivals[-1]
                columns = (
                    arrivals[arrivals < end],
                    chance.integers(*_SOURCE_LENGTHS, _BLOCK, endpoint=True),
                    chance.integers(*_TARGET_LENGTHS, _BLOCK, endpoint=True),
                    chance.choice(len(modes), _BLOCK, p=shares / shares.sum()),
                    chance.integers(num_clients, size=_BLOCK),
                )
                for arrival, source_length, num_tokens, mode, client in zip(
                    *(column.tolist() for column in columns), strict=False
                ):
                    deadline = arrival + self.deadline_seconds
                    yield Call(arrival, source_length, num_tokens, modes[mode], deadline, client)


class Cluster:
    """Replicas and the clients that spread calls over them.

    Args:
        times: Times of an engine.
        slots: Slots of each replica at the start.
        make_balancer: Creates the balancer of a client.
        num_clients: Number of clients.
        seed: Seed of all random choices but those of the calls.
        slowness: Factor of the times of each replica; None means 1 for all.
        cores: Number of the core of each replica, where some share one; None gives each a core of its own.
        queue_limits: Bounds of the queue of each replica.
        scrape_seconds: Time between two scrapes of the gauges; None never scrapes them.

    Attributes:
        env: The simulation; a scenario adds its processes to it.
        replicas: The replicas that live.
        ended: The calls that have ended.
    """

    def __init__(
        self,
        times: EngineTimes,
        slots: Sequence[int],
        make_balancer: MakeBalancer,
        *,
        num_clients: int = 1,
        seed: int = 0,
        slowness: Sequence[float] | None = None,
        cores: Sequence[int] | None = None,
        queue_limits: QueueLimits | None = None,
        scrape_seconds: float | None = None,
    ) -> None:
        self.env = simpy.Environment()
        self._times = times
        self._queue_limits = queue_limits
        self._chance = random.Random(seed)
        self._num_made = 0
        self._balancers = [make_balancer(self.env, self._chance) for _ in range(num_clients)]
        self.ended: list[Call] = []
        self._num_retrying = 0
        factors = slowness or [1.0] * len(slots)
        shared = {number: Core(self.env) for number, count in Counter(cores or ()).items() if count > 1}
        of_replicas = [shared.get(number) for number in cores] if cores else [None] * len(slots)
        self.replicas = [self.make_replica(*each) for each in zip(slots, factors, of_replicas, strict=True)]
        self.tell()
        if scrape_seconds is not None:
            self.env.process(self._scrape(scrape_seconds))

    def make_replica(self, num_slots: int, slowness: float = 1.0, core: Core | None = None) -> Replica:
        """Returns a new replica that no client knows yet."""
        self._num_made += 1
        return Replica(
            self.env,
            self._num_made - 1,
            self._times.scaled(slowness),
            num_slots,
            self._report,
            queue_limits=self._queue_limits,
            core=core,
        )

    def tell(self) -> None:
        """Let every client know the living replicas now."""
        for balancer in self._balancers:
            balancer.know(list(self.replicas))

    def tell_within(self, seconds: float) -> None:
        """Let every client know the living replicas at a random time of its own within `seconds`."""
        for balancer in self._balancers:
            self.env.process(self._tell_later(balancer, self._chance.uniform(0, seconds)))

    def kill(self, replica: Replica) -> None:
        """Kill a replica; every client sees its connection break."""
        self.replicas.remove(replica)
        self.tell()
        replica.kill()

    def run(self, calls: Iterable[Call], until: float | None = None) -> list[Call]:
        """Simulate until all calls have ended, or until a time; returns the ended calls."""
        arriving = self.env.process(self._arrive(calls))
        if until is not None:
            self.env.run(until)
            return self.ended
        self.env.run(arriving)
        while any(replica.num_slots_wanted for replica in self.replicas) or self._num_retrying:
            self.env.step()
        return self.ended

    def _arrive(self, calls: Iterable[Call]) -> Process:
        for call in calls:
            if (gap := call.arrival - self.env.now) > 0:
                yield self.env.timeout(gap)
            self._send(call)

    def _send(self, call: Call) -> None:
        call.code = ""
        balancer = self._balancers[call.client]
        replica = balancer.choose()
        balancer.sent(call, replica)
        replica.submit(call)

    def _report(self, call: Call) -> None:
        self._balancers[call.client].ended(call)
        if call.code == LOST and call.num_tries < _MAX_TRIES:
            self._num_retrying += 1
            self.env.process(self._retry(call))
        else:
            self.ended.append(call)

    def _retry(self, call: Call) -> Process:
        seconds = _BACKOFF_SECONDS * _BACKOFF_FACTOR ** (call.num_tries - 1)
        yield self.env.timeout(seconds * self._chance.uniform(1 - _BACKOFF_JITTER, 1 + _BACKOFF_JITTER))
        self._num_retrying -= 1
        call.first = float("nan")
        self._send(call)

    def _scrape(self, seconds: float) -> Process:
        while True:
            for replica in self.replicas:
                replica.seen_load = replica.num_slots_wanted
            yield self.env.timeout(seconds)

    def _tell_later(self, balancer: Balancer, seconds: float) -> Process:
        yield self.env.timeout(seconds)
        balancer.know(list(self.replicas))


@dataclass(frozen=True)
class Summary:
    """Figures of the calls that arrived in a window. Times are seconds.

    Attributes:
        count: Number of calls.
        refused: Share of the calls that were refused.
        failed: Share of the calls that failed otherwise.
        wait_p50: From arrival to a slot.
        first_token_p50: From arrival to the first token.
        latency_p50: From arrival to the whole answer.
    """

    count: int
    refused: float
    failed: float
    wait_p50: float
    wait_p99: float
    first_token_p50: float
    first_token_p99: float
    latency_p50: float
    latency_p99: float


def summarize(calls: Iterable[Call], after: float = 0.0, before: float = float("inf")) -> Summary:
    """Returns the figures of the calls that arrived in a window; quantiles are of those with an answer."""
    counted = [call for call in calls if after <= call.arrival < before]
    done = [call for call in counted if call.code == OK]
    waits = [call.admitted - call.arrival for call in done]
    firsts = [call.first - call.arrival for call in done]
    latencies = [call.end - call.arrival for call in done]
    count = len(counted)
    refused = sum(call.code == REFUSED for call in counted)
    return Summary(
        count,
        refused / max(count, 1),
        (count - len(done) - refused) / max(count, 1),
        *(quantile(values, q) for values in (waits, firsts, latencies) for q in (0.5, 0.99)),
    )
