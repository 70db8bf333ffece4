import dataclasses
import math
from collections import Counter

import pytest

from benchmarks.load.mix import MIX, Mode
from benchmarks.scale.answers import POLICIES, Autoscaler
from benchmarks.scale.cluster import Cluster, Traffic, summarize
from benchmarks.scale.model import LATE, OK, REFUSED
from benchmarks.scale.policies import RoundRobin
from benchmarks.scale.times import EngineTimes
from seq2seq_serve.server.config import QueueLimits

TIMES = EngineTimes(
    rows_seconds=((0, 1e-3), (1, 1.2e-3)),
    sampling_row_seconds=3e-4,
    beam_row_seconds=1e-4,
    position_seconds=1e-6,
    encode_seconds=1e-3,
    token_seconds=1e-4,
    call_seconds=5e-4,
    wire_seconds=1e-3,
)


def run(policy, *, rate=150.0, seconds=8.0, slots=(8, 8, 8, 4), deadline_seconds=math.inf):
    traffic = Traffic(((0.0, rate),), seconds, MIX, deadline_seconds)
    cluster = Cluster(
        TIMES,
        slots,
        policy.make,
        num_clients=policy.num_clients or 8,
        queue_limits=QueueLimits(max_waiting_requests=30),
        scrape_seconds=policy.scrape_seconds,
    )
    return cluster, cluster.run(traffic.calls(policy.num_clients or 8, seed=4))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_every_call_ends_once_and_every_slot_comes_back(policy):
    cluster, calls = run(policy, rate=250.0, seconds=3.0, deadline_seconds=0.5)
    expected = list(Traffic(((0.0, 250.0),), 3.0, MIX).calls(policy.num_clients or 8, seed=4))
    assert sorted(call.arrival for call in calls) == [call.arrival for call in expected]
    assert {call.code for call in calls} <= {OK, REFUSED, LATE}
    assert len({call.code for call in calls}) > 1
    for replica in cluster.replicas:
        assert replica.num_slots_wanted == replica._slots_in_use == replica._num_rows == 0
        assert replica._num_positions == 0


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_equal_seeds_give_equal_results(policy):
    once, again = (run(policy, seconds=2.0)[1] for _ in range(2))
    assert [(call.arrival, call.end) for call in once] == [(call.arrival, call.end) for call in again]


def test_work_is_the_same_however_it_is_spread():
    # What rows and encoded tokens cost does not depend on the policy; turns and encode calls are shared.
    times = dataclasses.replace(TIMES, rows_seconds=((0, 0.0), (1, 2e-4)), encode_seconds=0.0)
    found = []
    for policy in POLICIES[:2]:
        cluster = Cluster(times, (8, 8), policy.make, num_clients=policy.num_clients or 8)
        cluster.run(Traffic.steady(20.0, 10.0).calls(policy.num_clients or 8, seed=1))
        found.append(sum(replica.work_seconds for replica in cluster.replicas))
    assert found[0] == pytest.approx(found[1], rel=0.01)


def test_traffic_has_its_rates_and_shares():
    traffic = Traffic(((0.0, 100.0), (30.0, 300.0)), 60.0, {Mode.GREEDY: 0.8, Mode.BEAM: 0.2})
    calls = list(traffic.calls(2, seed=0))
    assert [call.arrival for call in calls] == sorted(call.arrival for call in calls)
    assert sum(call.arrival < 30 for call in calls) == pytest.approx(3000, rel=0.05)
    assert sum(call.arrival >= 30 for call in calls) == pytest.approx(9000, rel=0.03)
    assert max(call.arrival for call in calls) < 60
    shares = Counter(call.mode for call in calls)
    assert shares[Mode.BEAM] / len(calls) == pytest.approx(0.2, abs=0.02)
    assert {call.source_length for call in calls} == set(range(10, 41))
    assert {call.num_tokens for call in calls} == set(range(4, 65))
    assert Counter(call.client for call in calls).keys() == {0, 1}


def test_calls_of_a_killed_replica_are_retried_on_the_others():
    cluster = Cluster(TIMES, (8, 8), RoundRobin, num_clients=4)
    killed = cluster.replicas[0]

    def lose():
        yield cluster.env.timeout(2.0)
        assert killed.num_slots_wanted
        cluster.kill(killed)

    cluster.env.process(lose())
    calls = cluster.run(Traffic.steady(60.0, 5.0).calls(4, seed=2))
    assert {call.code for call in calls} == {OK}
    retried = [call for call in calls if call.num_tries > 1]
    assert retried
    for call in retried:
        assert call.replica is not killed
        assert call.queued >= 2.08  # a backoff of 0.1 seconds, a fifth less or more
    assert all(call.replica is not killed for call in calls if call.arrival > 2)


def test_a_summary_counts_the_calls_of_its_window():
    _, calls = run(POLICIES[0], rate=400.0)
    summary = summarize(calls, 2.0, 6.0)
    window = [call for call in calls if 2 <= call.arrival < 6]
    assert summary.count == len(window)
    assert summary.refused == sum(call.code == REFUSED for call in window) / len(window) > 0.1
    assert summary.failed == 0
    assert summary.wait_p50 < summary.first_token_p50 < summary.latency_p50 < summary.latency_p99


def test_the_autoscaler_adds_replicas_that_clients_learn_of():
    cluster = Cluster(TIMES, (8, 8), RoundRobin, num_clients=4, scrape_seconds=15.0)
    scaler = Autoscaler(cluster, threshold=0.5, pod_seconds=20.0, learn_seconds=10.0)
    cluster.env.process(scaler.run())
    traffic = Traffic(((0.0, 20.0), (10.0, 250.0)), 90.0, MIX)
    calls = cluster.run(traffic.calls(4, seed=0), until=100.0)
    # The gauges of 15 s show the load to the decision at 15 s or 30 s, which adds at most four.
    assert scaler.first_ready in (35.0, 50.0)
    assert scaler.history[1][1] <= 6
    added = {call.replica.index: call.queued for call in reversed(calls) if call.replica.index > 1}
    assert set(added) >= set(range(2, scaler.history[1][1]))
    assert scaler.first_ready < min(added.values()) < scaler.first_ready + 10
