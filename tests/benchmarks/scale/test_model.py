import dataclasses
import math
import random
from collections import Counter

import pytest

from benchmarks.load.mix import BEAM_SIZE, MIX, Job, Mode, Outcome
from benchmarks.scale.model import (
    EngineTimes,
    Group,
    Policy,
    best_rate,
    capacity,
    draw_calls,
    simulate,
)
from seq2seq_serve.server.config import QueueLimits
from seq2seq_serve.server.engine import scheduler

TIMES = EngineTimes(
    rows_seconds=((1, 1.2e-3), (2, 1.4e-3), (8, 4e-3)),
    sampling_row_seconds=3e-4,
    beam_row_seconds=1e-4,
    position_seconds=1e-6,
    encode_seconds=1e-3,
    token_seconds=1e-4,
    call_seconds=5e-4,
    wire_seconds=1e-3,
)
# Few calls a second, so that long times are simulated quickly.
SLOW = EngineTimes(tuple((rows, 20 * seconds) for rows, seconds in TIMES.rows_seconds), call_seconds=0.01)


def serve(calls: list[tuple[float, Job]], times: EngineTimes = TIMES, num_slots: int = 8) -> list[Outcome]:
    return simulate(Group(times, num_slots), calls)


def make_job(source_length: int, num_tokens: int, mode: Mode = Mode.GREEDY) -> Job:
    return Job((5,) * source_length, num_tokens, mode, seed=0)


# The simulation against queueing theory, where that has an exact answer. A slot is a server of the theory.

TURN_SECONDS = 1e-3


def mean_wait(num_slots: int, load: float, num_turns: list[int]) -> float:
    """The mean wait of Poisson arrivals, in turns."""
    chance = random.Random(3)
    rate = num_slots * load * len(num_turns) / sum(num_turns) / TURN_SECONDS
    now, calls = 0.0, []
    for number in num_turns:
        now += chance.expovariate(rate)
        calls.append((now, make_job(1, number)))
    outcomes = serve(calls, EngineTimes(((1, TURN_SECONDS),)), num_slots)
    return sum(outcome.queue_seconds for outcome in outcomes) / len(outcomes) / TURN_SECONDS


def draw_geometric(count: int, mean: int) -> list[int]:
    chance = random.Random(4)
    return [1 + int(math.log(1 - chance.random()) / math.log(1 - 1 / mean)) for _ in range(count)]


def test_one_slot_waits_as_in_m_g_1():
    # Pollaczek and Khinchine, with the squared coefficient of variation of a geometric distribution.
    mean, load = 6, 0.6
    expected = mean * load / (1 - load) * (1 + (1 - 1 / mean)) / 2
    assert mean_wait(1, load, draw_geometric(6000, mean)) == pytest.approx(expected, rel=0.08)


def test_slots_wait_as_the_servers_of_m_m_c():
    mean, load, num_slots = 8, 0.7, 3
    offered = num_slots * load
    terms = [offered**k / math.factorial(k) for k in range(num_slots)]
    last = offered**num_slots / math.factorial(num_slots) / (1 - load)
    expected = last / (sum(terms) + last) / (num_slots * (1 - load)) * mean  # Erlang C
    expected += 0.5 * (1 - terms[0] / (sum(terms) + last))  # to the end of the turn that runs
    assert mean_wait(num_slots, load, draw_geometric(10_000, mean)) == pytest.approx(expected, rel=0.08)


# The parts around the engine.


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("num_tokens", [1, 2, 9])
def test_a_call_alone_takes_the_fitted_times(mode, num_tokens):
    (outcome,) = serve([(1.0, make_job(11, num_tokens, mode))])
    expected = 1e-3 + 11e-4 + 5e-4 + 1e-3  # encoding, gRPC and the wire
    row_seconds = {Mode.BEAM: 1e-4, Mode.SAMPLING: 3e-4}.get(mode, 0.0)
    for number in range(num_tokens):
        num_rows = BEAM_SIZE if mode is Mode.BEAM and number else 1
        expected += TIMES.turn_seconds(num_rows) + num_rows * (row_seconds + 1e-6 * (11 + number))
    assert outcome.end - outcome.arrival == pytest.approx(expected)
    assert (outcome.code, outcome.num_tokens) == ("OK", num_tokens)
    assert outcome.queue_seconds == 0


@pytest.mark.parametrize("policy", Policy)
def test_every_call_ends_once_and_too_many_are_refused(policy):
    group = Group(TIMES, 8, num_servers=4, policy=policy, queue=QueueLimits(max_waiting_requests=20))
    calls = list(draw_calls(rate=200.0, seconds=4.0))
    outcomes = simulate(group, calls)  # it checks that every slot is back
    assert [outcome.arrival for outcome in outcomes] == [at for at, _ in calls]
    codes = Counter(outcome.code for outcome in outcomes)
    assert set(codes) == {"OK", "Overloaded"}
    assert all(outcome.end > outcome.arrival for outcome in outcomes)
    assert [outcome.end for outcome in simulate(group, calls)] == [outcome.end for outcome in outcomes]


def test_a_proxy_that_counts_open_calls_meets_an_objective_at_a_higher_rate_than_turns():
    group = Group(SLOW, 8, num_servers=4)
    in_turn, counted = (
        best_rate(dataclasses.replace(group, policy=policy), 200, latency_seconds=20.0, wait_seconds=4.0)
        for policy in Policy
    )
    assert 0 < in_turn["rate"] < counted["rate"] < capacity(SLOW, 8)
    assert 0 < in_turn["slots_in_use"] < 1


def test_arrivals_have_the_rates_and_shares():
    calls = list(draw_calls(rate=200.0, seconds=60.0))
    times = [at for at, _ in calls]
    assert times == sorted(times)
    assert max(times) < 60
    assert len(times) == pytest.approx(12_000, rel=0.03)
    shares = Counter(job.mode for _, job in calls)
    for mode, share in MIX.items():
        assert shares[mode] / len(calls) == pytest.approx(share, abs=0.02)
    # The gap before a call does not depend on its mode: once both came from one seed.
    beams = [
        at - before for before, (at, job) in zip(times, calls[1:], strict=False) if job.mode is Mode.BEAM
    ]
    assert sum(beams) / len(beams) == pytest.approx(60 / len(times), rel=0.08)


def test_a_full_core_gathers_requests_for_an_encode_call(monkeypatch):
    """Where an encode call takes as long as five steps, as on a GPU, one for each request costs a third."""
    times = EngineTimes(((1, 0.3e-3), (64, 0.35e-3)), encode_seconds=1.5e-3)
    calls = [(0.0, make_job(20, 16 + number % 33)) for number in range(1000)]
    ends = []
    for share in (scheduler._GATHERED_SHARE, 10**6):
        monkeypatch.setattr(scheduler, "_GATHERED_SHARE", share)
        ends.append(max(outcome.end for outcome in serve(calls, times, num_slots=64)))
    assert ends[0] < 0.75 * ends[1], ends
