"""The model against queueing theory, where that has an exact answer.

A slot is a server of the theory: with times that do not depend on rows, a call holds it for its number of
turns.
"""

import math
import random

import pytest

from benchmarks.scale.cluster import Cluster
from benchmarks.scale.model import Call
from benchmarks.scale.policies import Random, RoundRobin
from benchmarks.scale.times import EngineTimes

TURN_SECONDS = 1e-3
TIMES = EngineTimes(((1, TURN_SECONDS),))
MEAN_TURNS = 200
NUM_CALLS = 40_000


def mean_wait(num_slots: int, load: float, draw_turns, make_balancer=RoundRobin, size: int = 1) -> float:
    """Simulate calls of one source token; returns their mean wait in units of the mean service time."""
    chance = random.Random(3)
    rate = size * num_slots * load / (MEAN_TURNS * TURN_SECONDS)
    now, calls = 0.0, []
    for _ in range(NUM_CALLS):
        now += chance.expovariate(rate)
        calls.append(Call(now, 1, draw_turns(chance)))
    ended = Cluster(TIMES, [num_slots] * size, make_balancer).run(calls)
    waits = [call.admitted - call.arrival for call in ended[NUM_CALLS // 20 :]]
    return sum(waits) / len(waits) / (MEAN_TURNS * TURN_SECONDS)


def constant(chance: random.Random) -> int:
    return MEAN_TURNS


def geometric(chance: random.Random) -> int:
    """About exponential, because a turn is short beside the mean."""
    return 1 + int(math.log(1 - chance.random()) / math.log(1 - 1 / MEAN_TURNS))


def erlang_c(num_servers: int, load: float) -> float:
    """Returns the probability of a wait in M/M/c (Erlang 1917)."""
    offered = num_servers * load
    terms = [offered**k / math.factorial(k) for k in range(num_servers)]
    last = offered**num_servers / math.factorial(num_servers) / (1 - load)
    return last / (sum(terms) + last)


@pytest.mark.parametrize("load", [0.4, 0.7])
def test_one_slot_with_equal_calls_waits_as_in_m_d_1(load):
    assert mean_wait(1, load, constant) == pytest.approx(load / (2 * (1 - load)), rel=0.06)


@pytest.mark.parametrize("load", [0.4, 0.7])
def test_one_slot_with_exponential_calls_waits_as_in_m_m_1(load):
    assert mean_wait(1, load, geometric) == pytest.approx(load / (1 - load), rel=0.08)


@pytest.mark.parametrize("num_slots", [2, 5])
def test_slots_wait_as_the_servers_of_m_m_c(num_slots):
    load = 0.7
    expected = erlang_c(num_slots, load) / (num_slots * (1 - load))
    assert mean_wait(num_slots, load, geometric) == pytest.approx(expected, rel=0.12)


def test_replicas_chosen_at_random_each_wait_as_m_m_1():
    assert mean_wait(1, 0.6, geometric, Random, size=4) == pytest.approx(1.5, rel=0.1)


def test_arrivals_in_turn_are_more_regular_than_random_ones():
    # Every fourth arrival of a Poisson process: the wait is that of E4/M/1, whose root is that of
    # s = (4 * 0.6 / (4 * 0.6 + 1 - s))**4; its mean wait is s / (1 - s).
    root = 0.5
    for _ in range(200):
        root = (4 * 0.6 / (4 * 0.6 + 1 - root)) ** 4
    assert mean_wait(1, 0.6, geometric, RoundRobin, size=4) == pytest.approx(root / (1 - root), rel=0.1)
