"""How a client chooses a replica for a call. Each client has a balancer of its own."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import simpy

from benchmarks.scale.model import Call, Replica

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
