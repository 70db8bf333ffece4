import random
from collections import Counter
from types import SimpleNamespace

import pytest
import simpy

from benchmarks.scale.model import OK, Call, Replica
from benchmarks.scale.policies import Balancer, LeastLoad, Random, RoundRobin, WeightedRoundRobin
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


def report(env: simpy.Environment, balancer: Balancer, replica: Replica, rate: float, wanted: float) -> None:
    """Let a very short call end on a replica whose averages are these."""
    replica.recent_load = SimpleNamespace(averages=lambda: (rate, wanted))
    call = Call(0.0, 5, 1)
    call.replica, call.code, call.queued = replica, OK, env.now - 1e-6
    balancer.ended(call)


def test_weights_are_requests_per_second_over_utilization_after_the_blackout(env):
    balancer = WeightedRoundRobin(env, random.Random(0), blackout_seconds=10.0)
    replicas = make_replicas(env, 16, 4, 8)
    balancer.know(replicas)
    report(env, balancer, replicas[0], rate=10.0, wanted=8.0)  # weight 20
    report(env, balancer, replicas[1], rate=5.0, wanted=2.0)  # weight 10
    # During the blackout all get the same; afterwards one without a report gets the mean, 15.
    assert Counter(balancer.choose().index for _ in range(300)) == {0: 100, 1: 100, 2: 100}
    env.run(until=11.0)
    found = Counter(balancer.choose().index for _ in range(4500))
    assert [found[index] for index in range(3)] == pytest.approx([2000, 1000, 1500], rel=0.01)


def test_a_replica_that_left_loses_its_weight(env):
    balancer = WeightedRoundRobin(env, random.Random(0), blackout_seconds=0.0)
    replicas = make_replicas(env, 4, 4, 4)
    balancer.know(replicas)
    for replica, rate in zip(replicas, (30.0, 10.0, 10.0), strict=True):
        report(env, balancer, replica, rate, wanted=2.0)
    balancer.know(replicas[1:])
    balancer.know(replicas)
    found = Counter(balancer.choose().index for _ in range(300))
    assert found == {0: 100, 1: 100, 2: 100}


def test_weights_of_real_replicas_are_the_rates_that_would_fill_them(env):
    # Calls of 1 second on one of 2 slots, of 4 seconds on one of 8: by Little's law 2 calls a second each.
    balancer = WeightedRoundRobin(env, random.Random(0), blackout_seconds=0.0)
    replicas = [
        Replica(env, number, EngineTimes(((1, seconds),)), slots, balancer.ended)
        for number, (seconds, slots) in enumerate(((1.0, 2), (4.0, 8)))
    ]
    balancer.know(replicas)

    def calls(replica, gap):
        for _ in range(10):
            replica.submit(Call(env.now, 5, 1))
            yield env.timeout(gap)

    for replica, gap in zip(replicas, (2.0, 9.0), strict=True):
        env.process(calls(replica, gap))
    env.run()
    weights = [balancer._reports[number].value for number in range(2)]
    assert weights == pytest.approx([2.0, 2.0], rel=0.1)
