import random
from collections import Counter

import pytest
import simpy

from benchmarks.scale.model import Call, Replica
from benchmarks.scale.policies import Balancer, LeastLoad, Random, RoundRobin
from benchmarks.scale.times import EngineTimes


def make_replicas(env: simpy.Environment, *slots: int) -> list[Replica]:
    times = EngineTimes(((1, 0.01),))
    return [Replica(env, index, times, count, lambda call: None) for index, count in enumerate(slots)]


def send(balancer: Balancer, num_tokens: int = 10) -> Replica:
    replica, call = balancer.choose(), Call(0.0, 5, num_tokens)
    balancer.sent(call, replica)
    call.replica = replica
    return replica


@pytest.fixture
def env() -> simpy.Environment:
    return simpy.Environment()


def test_random_choices_reach_every_replica_about_equally(env):
    balancer = Random(env, random.Random(0))
    balancer.know(make_replicas(env, 4, 4, 4))
    found = Counter(balancer.choose().index for _ in range(3000))
    assert all(number == pytest.approx(1000, rel=0.1) for number in found.values())


def test_round_robin_gives_each_replica_its_turn(env):
    balancer = RoundRobin(env, random.Random(0))
    balancer.know(make_replicas(env, 4, 4, 4))
    found = [balancer.choose().index for _ in range(9)]
    assert all(sorted(found[i : i + 3]) == [0, 1, 2] for i in range(7))


def test_least_requests_counts_the_own_calls_until_they_end(env):
    balancer = LeastLoad(env, random.Random(0))
    first, second = make_replicas(env, 4, 4)
    balancer.know([first, second])
    assert {send(balancer), send(balancer)} == {first, second}
    for replica, beside in ((first, second), (second, first)):
        ended = Call(0.0, 5, 1)
        ended.replica = replica
        balancer.ended(ended)
        assert send(balancer) is replica
        assert beside.num_slots_wanted == 0, "the own count decides, not the replica's"


def test_least_requests_of_many_clients_follows_a_stale_gauge_to_one_replica(env):
    replicas = make_replicas(env, 4, 4, 4)
    for replica, seen in zip(replicas, (7, 2, 3), strict=True):
        replica.seen_load = seen
    balancer = LeastLoad(env, random.Random(0), lambda replica: replica.seen_load)
    balancer.know(replicas)
    assert {send(balancer).index for _ in range(20)} == {1}


def test_two_choices_take_the_less_loaded_of_two_that_are_drawn(env):
    replicas = make_replicas(env, 4, 4, 4)
    for replica, seen in zip(replicas, (7, 2, 3), strict=True):
        replica.seen_load = seen
    balancer = LeastLoad(env, random.Random(0), lambda replica: replica.seen_load, num_choices=2)
    balancer.know(replicas)
    found = Counter(balancer.choose().index for _ in range(9000))
    # Of the 9 ordered pairs, 5 have the least one, 3 more the middle one.
    assert [found[index] / 1000 for index in (1, 2, 0)] == pytest.approx([5, 3, 1], rel=0.1)
