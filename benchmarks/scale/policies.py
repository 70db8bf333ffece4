"""How a client chooses a replica for a call. Each client has a balancer of its own."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.scale.model import OK, Call, Replica

_MAX_RATIO = 10  # of a weight to the mean weight, as in gRPC
_NUM_STARTS = 1 << 32

Load = Callable[[Replica], float]


class Balancer(Protocol):
    """Spreads the calls of one client over the replicas that it knows."""

    def know(self, replicas: Sequence[Replica]) -> None:
        """Use these replicas from now on."""

    def choose(self, call: Call, now: float) -> Replica:
        """Returns the replica for a call."""

    def ended(self, call: Call, now: float) -> None:
        """Take note of a call of this client that has ended."""


class Random:
    """Chooses any replica."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._replicas: Sequence[Replica] = ()

    def know(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas

    def choose(self, call: Call, now: float) -> Replica:
        return self._chance.choice(self._replicas)

    def ended(self, call: Call, now: float) -> None:
        pass


class RoundRobin:
    """Chooses the replicas in turn, from any one on, as gRPC's `round_robin`."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._replicas: Sequence[Replica] = ()
        self._place = 0

    def know(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._place = self._chance.randrange(len(replicas))

    def choose(self, call: Call, now: float) -> Replica:
        self._place = (self._place + 1) % len(self._replicas)
        return self._replicas[self._place]

    def ended(self, call: Call, now: float) -> None:
        pass


class LeastLoad:
    """Chooses the replica with the least load, of all or of a few that are drawn.

    Args:
        chance: Draws replicas, and decides between equal ones.
        load: Returns what the client knows of a replica's load; None counts its own calls in flight by their
            slots.
        num_choices: Number of replicas that are drawn for a call; None compares all.
    """

    def __init__(
        self, chance: random.Random, load: Load | None = None, num_choices: int | None = None
    ) -> None:
        self._chance = chance
        self._own: Counter[int] = Counter()
        self._counts = load is None
        self._load: Load = load or (lambda replica: self._own[replica.index])
        self._num_choices = num_choices
        self._replicas: Sequence[Replica] = ()

    def know(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas

    def choose(self, call: Call, now: float) -> Replica:
        replicas = self._replicas
        if self._num_choices is None:
            loads = list(map(self._load, replicas))
            least = min(loads)
            start = self._chance.randrange(len(loads))  # else the first ones would get all ties
            try:
                place = loads.index(least, start)
            except ValueError:
                place = loads.index(least)
            found = replicas[place]
        else:
            drawn = [self._chance.choice(replicas) for _ in range(self._num_choices)]
            found = min(drawn, key=self._load)
        if self._counts:
            self._own[found.index] += call.num_slots
        return found

    def ended(self, call: Call, now: float) -> None:
        if self._counts and call.replica is not None:
            self._own[call.replica.index] -= call.num_slots


@dataclass(slots=True)
class _Weight:
    value: float = 0.0
    since: float = math.inf  # when the first report came


class WeightedRoundRobin:
    """gRPC's `weighted_round_robin` (gRFC A58): turns in proportion to requests/s over utilization.

    A replica reports both when a call ends. One without a usable weight gets the mean of the others. All have the
    same weight until two have a usable one.

    Args:
        chance: Draws where the sequence of turns begins.
        blackout_seconds: Time after a replica's first report in which its reports are not used.
        update_seconds: Time between two uses of the reports.
    """

    def __init__(
        self, chance: random.Random, blackout_seconds: float = 10.0, update_seconds: float = 1.0
    ) -> None:
        self._blackout_seconds = blackout_seconds
        self._update_seconds = update_seconds
        self._reports: dict[int, _Weight] = {}
        self._shares: list[float] = []  # weights as shares of the largest, by the place of the replica
        self._next_update = 0.0
        self._replicas: Sequence[Replica] = ()
        self._turn = chance.randrange(_NUM_STARTS)

    def know(self, replicas: Sequence[Replica]) -> None:
        known = {replica.index for replica in replicas}
        self._reports = {index: report for index, report in self._reports.items() if index in known}
        self._replicas = replicas
        self._next_update = 0.0

    def choose(self, call: Call, now: float) -> Replica:
        if now >= self._next_update:
            self._update(now)
        # The static stride scheduler of the gRFC: in each round a replica is skipped unless its share has added up to
        # a whole turn since its last one.
        while True:
            round_number, place = divmod(self._turn, len(self._replicas))
            self._turn += 1
            share = self._shares[place]
            if (share * round_number + place / 2) % 1 >= 1 - share:
                return self._replicas[place]

    def ended(self, call: Call, now: float) -> None:
        replica = call.replica
        if call.code != OK or replica is None:
            return
        report = self._reports.setdefault(replica.index, _Weight())
        report.since = min(report.since, now)
        if replica.utilization > 0:
            report.value = replica.requests_per_second / replica.utilization

    def _update(self, now: float) -> None:
        self._next_update = now + self._update_seconds
        usable = {
            index: report.value
            for index, report in self._reports.items()
            if now - report.since >= self._blackout_seconds and report.value > 0
        }
        if len(usable) < 2:
            self._shares = [1.0] * len(self._replicas)
            return
        mean = sum(usable.values()) / len(usable)
        weights = [
            min(max(usable.get(replica.index, mean), mean / _MAX_RATIO), mean * _MAX_RATIO)
            for replica in self._replicas
        ]
        self._shares = [weight / max(weights) for weight in weights]
