import math
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import simpy

from benchmarks.load.mix import Mode
from benchmarks.scale.model import LATE, LOST, OK, REFUSED, Call, Core, Replica
from benchmarks.scale.times import EngineTimes
from seq2seq_serve.server.config import QueueLimits
from seq2seq_serve.server.engine.engine import Engine
from seq2seq_serve.server.engine.records import Beam, Branches, Request, Selected
from seq2seq_serve.server.engine.records import Sequence as Row
from seq2seq_serve.server.errors import DeadlineExceeded, Overloaded
from tests.server.fakes import EOS_ID, FakeRunner, make_request, selected

TIMES = EngineTimes(
    rows_seconds=((1, 2.3e-3), (2, 2.4e-3), (5, 3.6e-3)),
    beam_row_seconds=2e-4,
    position_seconds=1e-6,
    encode_seconds=1e-3,
    token_seconds=1e-4,
)


def run(
    calls: Sequence[Call], num_slots: int, times: EngineTimes = TIMES, *, num_cores: int = 0, **options
) -> Replica:
    """Let one replica serve calls, in the order of their arrival."""
    env = simpy.Environment()
    ended: list[Call] = []
    core = Core(env) if num_cores else None
    replica = Replica(env, 0, times, num_slots, ended.append, core=core, **options)

    def arrive():
        for call in calls:
            yield env.timeout(call.arrival - env.now)
            replica.submit(call)

    env.process(arrive())
    env.run()
    assert sorted(map(id, ended)) == sorted(map(id, calls)), "each call ends once"
    assert replica.num_slots_wanted == replica._slots_in_use == replica._num_rows == 0
    assert replica._num_positions == replica._waiting_slots == replica._waiting_work == 0
    assert not replica._ending
    return replica


def draw_calls(count: int, rate: float, seed: int, *, deadline_seconds: float = math.inf) -> list[Call]:
    chance = random.Random(seed)
    now, calls = 0.0, []
    for _ in range(count):
        now += chance.expovariate(rate)
        mode = chance.choices((Mode.GREEDY, Mode.BEAM), (0.8, 0.2))[0]
        lengths = chance.randint(1, 40), chance.randint(1, 30)
        calls.append(Call(now, *lengths, mode, deadline=now + deadline_seconds))
    return calls


class TimedRunner(FakeRunner):
    """Its targets never end early, and its clock goes on by the times of the model."""

    now = 0.0
    arrive: Callable[[], None]

    def encode(self, first_row: int, requests: list[Request]) -> None:
        super().encode(first_row, requests)
        self.now += TIMES.encode_seconds
        self.now += TIMES.token_seconds * sum(request.encode_tokens for request in requests)

    def step(self, rows: tuple[Row, ...]) -> Selected:
        self.now += TIMES.turn_seconds(len(rows))
        for row in rows:
            mode = Mode.GREEDY if row.request.beam is None else Mode.BEAM
            self.now += TIMES.mode_seconds(mode)
            self.now += TIMES.position_seconds * (row.memory_length + row.cache_length)
        branches = {
            number: Branches(
                list(range(EOS_ID + 1, EOS_ID + 1 + row.num_branches)), [-1.0] * row.num_branches
            )
            for number, row in enumerate(rows)
            if row.num_branches > 1
        }
        self.arrive()
        return selected(rows, [EOS_ID + 1] * len(rows), branches)


def run_engine(
    calls: Sequence[Call], num_slots: int, *, queue_limits: QueueLimits | None = None
) -> list[tuple[float, float, str]]:
    """Let the server's engine serve the calls; returns when each got its slots, its end and its status."""
    runner = TimedRunner(num_slots)
    results: dict[Request, tuple[float, float, str]] = {}

    def deliver(turn):
        for update in turn.updates:
            if update.result is not None:
                queue_seconds = update.result.timings.queue_seconds
                error = update.result.error
                code = OK if error is None else LATE if isinstance(error, DeadlineExceeded) else str(error)
                results[update.request] = (update.request.arrival + queue_seconds, runner.now, code)

    engine = Engine(
        runner, model_name="timed", deliver=deliver, clock=lambda: runner.now, queue_limits=queue_limits
    )
    requests = [
        make_request(
            (9,) * call.source_length,
            request_id=str(number),
            max_new_tokens=call.num_tokens,
            arrival=call.arrival,
            beam=Beam(4) if call.mode is Mode.BEAM else None,
            deadline=call.deadline if call.deadline < math.inf else None,
        )
        for number, call in enumerate(calls)
    ]
    left = list(requests)

    def arrive() -> None:
        end = runner.now
        while left and left[0].arrival <= end:
            request = left.pop(0)
            runner.now = request.arrival
            try:
                engine.submit(request)
            except Overloaded:
                results[request] = (math.nan, request.arrival, REFUSED)
        runner.now = end

    runner.arrive = arrive
    while left or engine._scheduler.has_work:
        if not engine._scheduler.has_work:
            runner.now = left[0].arrival
            arrive()
        engine.run_turn()
    return [results[request] for request in requests]


LIMITS = QueueLimits(max_waiting_requests=40, max_waiting_tokens=600)


@pytest.mark.parametrize("rate", [20.0, 120.0, 400.0])
@pytest.mark.parametrize("num_slots", [4, 16])
def test_calls_are_admitted_refused_and_end_as_in_the_engine(rate, num_slots):
    calls = draw_calls(400, rate, seed=1)
    run(calls, num_slots, queue_limits=LIMITS)
    expected = run_engine(calls, num_slots, queue_limits=LIMITS)
    assert [call.code for call in calls] == [code for _, _, code in expected]
    assert {call.code for call in calls} == ({OK, REFUSED} if rate > 100 else {OK})
    for call, (admitted, end, code) in zip(calls, expected, strict=True):
        if code == OK:
            assert (call.admitted, call.end) == pytest.approx((admitted, end))


@pytest.mark.parametrize("rate", [120.0, 400.0])
@pytest.mark.parametrize("num_slots", [4, 16])
def test_deadlines_are_kept_as_in_the_engine(rate, num_slots):
    calls = draw_calls(400, rate, seed=1, deadline_seconds=0.2)
    run(calls, num_slots, queue_limits=LIMITS)
    found = Counter(call.code for call in calls)
    expected = Counter(code for _, _, code in run_engine(calls, num_slots, queue_limits=LIMITS))
    # Calls that end in the same turn end in another order, so the estimates of a wait differ a little.
    for code in (OK, LATE, REFUSED):
        assert found[code] > 10
        assert found[code] == pytest.approx(expected[code], abs=0.03 * len(calls))


def test_passing_many_turns_at_once_changes_nothing():
    # On a core of its own that nobody shares, a replica runs each turn as an event.
    together, apart = (draw_calls(300, 30.0, seed=2) for _ in range(2))
    run(together, 8)
    run(apart, 8, num_cores=1)
    assert [call.end for call in together] == pytest.approx([call.end for call in apart])
    assert [call.first for call in together] == pytest.approx([call.first for call in apart])


def test_replicas_on_one_core_share_it_while_both_work():
    env = simpy.Environment()
    core, ended = Core(env), list[Call]()
    times = EngineTimes(((1, 0.1),))
    replicas = [Replica(env, index, times, 1, ended.append, core=core) for index in range(2)]
    short, long = Call(0.0, 1, 5), Call(0.0, 1, 20)
    replicas[0].submit(short)
    replicas[1].submit(long)
    env.run()
    # 0.5 and 2 seconds of work: both get half of the core until the short one ends.
    assert short.end == pytest.approx(1.0, abs=0.11)
    assert long.end == pytest.approx(2.5)


def test_grpc_takes_time_of_the_next_turn_and_the_wire_of_the_answer():
    times = EngineTimes(((1, 0.1),), call_seconds=0.01, wire_seconds=0.5)
    first, second = Call(0.0, 1, 2), Call(0.05, 1, 1)
    run([first, second], 2, times)
    assert (first.end, second.end) == pytest.approx((0.11 + 0.11 + 0.5, 0.11 + 0.11 + 0.5))


def test_a_killed_replica_ends_its_calls():
    env = simpy.Environment()
    ended: list[Call] = []
    replica = Replica(env, 0, TIMES, 1, ended.append)
    calls = [Call(0.0, 5, 50) for _ in range(3)]
    for call in calls:
        replica.submit(call)
    env.run(until=0.02)
    replica.kill()
    env.run()
    assert [call.code for call in calls] == [LOST] * 3
    assert ended == calls
