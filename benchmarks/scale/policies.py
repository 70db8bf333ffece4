"""How a client chooses a replica for a call. Each client has a balancer of its own."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import simpy

from benchmarks.scale.model import OK, Call, Replica
from seq2seq_serve.server.statistics import correction_at_end

_MAX_RATIO = 10  # of a weight to the mean weight, as in gRPC
_NUM_STARTS = 1 << 32

Load = Callable[[Replica], float]


class Balancer:
    """Spreads the calls of one client over the replicas that it knows.

    Owned by the cluster.

    Args:
        env: The simulation, for its clock.
        chance: Source of random choices.
    """

    def __init__(self, env: simpy.Environment, chance: random.Random) -> None:
        self._env = env
        self._chance = chance
        self._replicas: Sequence[Replica] = ()

    def know(self, replicas: Sequence[Replica]) -> None:
        """Use these replicas from now on."""
        self._replicas = replicas

    def choose(self) -> Replica:
        """Returns the replica for the next call."""
        raise NotImplementedError

    def sent(self, call: Call, replica: Replica) -> None:
        """Take note of a call of this client that is sent to a replica."""

    def ended(self, call: Call) -> None:
        """Take note of a call of this client that has ended."""


class Random(Balancer):
    """Chooses any replica."""

    def choose(self) -> Replica:
        return self._chance.choice(self._replicas)


class RoundRobin(Balancer):
    """Chooses the replicas in turn, from any one on, as gRPC's `round_robin`."""

    def know(self, replicas: Sequence[Replica]) -> None:
        super().know(replicas)
        self._place = self._chance.randrange(len(replicas))

    def choose(self) -> Replica:
        self._place = (self._place + 1) % len(self._replicas)
        return self._replicas[self._place]


class LeastLoad(Balancer):
    """Chooses the replica with the least load, of all or of a few that are drawn.

    Args:
        env: As for every balancer.
        chance: Draws replicas, and decides between equal ones.
        load: Returns what the client knows of a replica's load; None counts its own calls in flight by their
            slots.
        num_choices: Number of replicas that are drawn for a call; None compares all.
    """

    def __init__(
        self,
        env: simpy.Environment,
        chance: random.Random,
        load: Load | None = None,
        num_choices: int | None = None,
    ) -> None:
        super().__init__(env, chance)
        self._own: Counter[Replica] = Counter()
        self._load: Load = load or self._own.__getitem__
        self._num_choices = num_choices

    def choose(self) -> Replica:
        if self._num_choices is not None:
            drawn = [self._chance.choice(self._replicas) for _ in range(self._num_choices)]
            return min(drawn, key=self._load)
        loads = list(map(self._load, self._replicas))
        least = min(loads)
        start = self._chance.randrange(len(loads))  # otherwise the first ones would get all ties
        place = loads.index(least, start) if least in loads[start:] else loads.index(least)
        return self._replicas[place]

    def sent(self, call: Call, replica: Replica) -> None:
        self._own[replica] += call.num_slots

    def ended(self, call: Call) -> None:
        assert call.replica is not None
        self._own[call.replica] -= call.num_slots


@dataclass(slots=True)
class _Weight:
    value: float = 0.0
    since: float = math.inf  # when the first report came


class WeightedRoundRobin(Balancer):
    """gRPC's `weighted_round_robin` (gRFC A58): turns in proportion to requests/s over utilization.

    A replica reports both when a call ends. One without a usable weight gets the mean of the others. All have
    the same weight until two have a usable one.

    Args:
        env: As for every balancer.
        chance: Draws where the sequence of turns begins.
        is_averaged: Whether the reports are averages over some seconds, as this project's; otherwise the
            utilization is that of a moment.
        blackout_seconds: Time after a replica's first report in which its reports are not used.
        update_seconds: Time between two uses of the reports.
    """

    def __init__(
        self,
        env: simpy.Environment,
        chance: random.Random,
        *,
        is_averaged: bool = True,
        blackout_seconds: float = 1.0,
        update_seconds: float = 0.5,
    ) -> None:
        super().__init__(env, chance)
        self._is_averaged = is_averaged
        self._blackout_seconds = blackout_seconds
        self._update_seconds = update_seconds
        self._reports: dict[int, _Weight] = {}
        self._shares: list[float] = []  # weights as shares of the largest, by the place of the replica
        self._next_update = 0.0
        self._turn = chance.randrange(_NUM_STARTS)

    def know(self, replicas: Sequence[Replica]) -> None:
        super().know(replicas)
        known = {replica.index for replica in replicas}
        self._reports = {index: report for index, report in self._reports.items() if index in known}
        self._next_update = 0.0

    def choose(self) -> Replica:
        if self._env.now >= self._next_update:
            self._update(self._env.now)
        # The static stride scheduler of the gRFC: in each round a replica is skipped unless its share has
        # added up to a whole turn since its last one.
        while True:
            round_number, place = divmod(self._turn, len(self._replicas))
            self._turn += 1
            share = self._shares[place]
            if (share * round_number + place / 2) % 1 >= 1 - share:
                return self._replicas[place]

    def ended(self, call: Call) -> None:
        replica = call.replica
        if call.code != OK or replica is None:
            return
        report = self._reports.setdefault(replica.index, _Weight())
        report.since = min(report.since, self._env.now)
        calls_per_second, slots_wanted = replica.recent_load.averages()
        calls_per_second += correction_at_end(self._env.now - call.queued)
        if not self._is_averaged:
            slots_wanted = replica.num_slots_wanted
        if slots_wanted > 0:
            report.value = calls_per_second * replica.num_slots / slots_wanted

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
