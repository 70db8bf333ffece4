"""The engine over cores with fake runners: the queue, the way to the cores and back, and cores that end."""

import asyncio
import threading
from collections import Counter
from concurrent.futures import Future

import pytest

from seq2seq_serve.server.config import QueueLimits
from seq2seq_serve.server.engine.async_engine import AsyncEngine
from seq2seq_serve.server.engine.core import Core
from seq2seq_serve.server.engine.result import FinishReason, Load
from seq2seq_serve.server.errors import DeadlineExceeded, Overloaded, Unavailable
from seq2seq_serve.server.models.cores import ThreadCore
from tests.server.driver import DrivenEngine
from tests.server.fakes import FakeRunner, expected_tokens, make_request


@pytest.mark.parametrize(("stream", "lengths"), [(False, [9, 5, 5, 2]), (True, [5, 2, 9, 5])])
def test_the_longest_sources_of_a_call_come_first_unless_it_streams(stream, lengths):
    runner = FakeRunner(1)
    with DrivenEngine(runner).started() as engine:
        engine.submit(*(make_request((20,) * length, stream=stream) for length in (5, 2, 9, 5)))
    assert [len(source) for batch in runner.encoded for source in batch] == lengths


def test_cores_get_what_they_have_slots_for_and_a_few_ahead():
    runners = FakeRunner(16), FakeRunner(16)
    with DrivenEngine(*runners).started() as engine:
        engine.submit(*(make_request((20, number)) for number in range(3, 60)))
        assert [len(core.requests) for core in engine.cores] == [18, 18]
        engine.turn(4)
        assert engine.engine.load() == Load(57 - 32, 32, 32, 32 * 4)
        assert engine.engine.num_slots_wanted() == 57
    assert [len(runner.encoded[0]) for runner in runners] == [16, 16]


def test_a_deadline_ends_running_and_waiting_requests():
    with DrivenEngine(FakeRunner(1)).started() as engine:
        running = make_request((10, 5), deadline=3.5)
        ahead = make_request((10, 6), deadline=2.5)
        waiting = make_request((10, 7), deadline=2.5)
        [[first], [second], [third]] = map(engine.submit, (running, ahead, waiting))
        assert third.core is None
        engine.turn(3)
        assert second.result.finish_reason is third.result.finish_reason is FinishReason.DEADLINE
        assert first.result is None
        engine.turn(1)
        assert isinstance(first.result.error, DeadlineExceeded)
        assert 0 < len(first.result.best.token_ids) < len(expected_tokens((10, 5), 8))


def test_cancelling_what_waits_has_ended_or_was_never_there_is_harmless():
    with DrivenEngine(FakeRunner(1)).started() as engine:
        running, ahead, waiting = (make_request((10, number)) for number in (5, 6, 7))
        streams = engine.submit(running, ahead, waiting)
        engine.turn()
        for request in (waiting, ahead, make_request((9, 9))):
            engine.cancel(request)
        engine.finish()
        engine.cancel(running)
        reasons = [stream.result.finish_reason for stream in streams]
    assert reasons == [FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.CANCELLED]


def test_deadlines_that_cannot_be_met_are_refused_once_the_first_have_passed():
    """Only requests that succeeded taught how long one has its slots: without any, all were accepted."""
    num_accepted = 0
    with DrivenEngine(FakeRunner(1)).started() as engine:
        for _ in range(100):
            deadline = engine.now + 5.5
            try:
                engine.submit(make_request((20, 4), max_new_tokens=60, deadline=deadline, arrival=engine.now))
                num_accepted += 1
            except Overloaded:
                pass
            engine.turn()
        results = [update.result for turn in engine.turns for update in turn.updates]
        assert not any(result and result.error is None for result in results)
    assert 0 < num_accepted < 40


def test_a_caller_beside_a_flood_is_accepted_and_answered_soon():
    """A caller with ten requests a second got one in a hundred answers beside a flood of a thousand."""
    ended, latest = Counter(), 0.0
    with DrivenEngine(FakeRunner(2), max_waiting_requests=18).started() as engine:
        for number in range(400):
            for caller in ("flood",) * 10 + (("calm",) if number % 20 == 0 else ()):
                try:
                    engine.submit(make_request((13, 4), max_new_tokens=3, caller=caller, arrival=engine.now))
                except Overloaded:
                    assert caller == "flood"
            engine.turn()
        engine.finish()
        for turn in engine.turns:
            for update in turn.updates:
                assert update.result.error is None
                ended[update.request.caller] += 1
                if update.request.caller == "calm":
                    latest = max(latest, update.result.timings.total_seconds)
    assert ended["calm"] == 20
    assert ended["flood"] > 200
    assert latest <= 9.0  # two others' three turns, and its own


async def test_a_core_that_ends_while_the_engine_stops_is_not_started_again():
    engine = DrivenEngine(FakeRunner(1))
    await engine.engine.start()
    core, stop = engine.cores[0], engine.cores[0].stop

    async def end_and_stop():
        core.kill()  # its end was on the way
        await stop()

    core.stop = end_and_stop
    await engine.engine.stop()
    await asyncio.sleep(0)
    assert not core.is_ready
    assert not engine.engine._restarts


async def test_a_core_that_is_built_while_its_engine_stops_ends_too():
    """It lived on, with its memory, as the engine stopped what it had before."""
    is_building, may_go, built = threading.Event(), threading.Event(), Future[Core]()

    def build(deliver, died):
        is_building.set()
        may_go.wait()
        core = Core(FakeRunner(1), model_name="fake", deliver=deliver, died=died)
        core.start()
        built.set_result(core)
        return core

    handle = ThreadCore(1, build)
    starting = asyncio.create_task(handle.start(lambda turns: None, lambda cause: None))
    await asyncio.to_thread(is_building.wait)
    starting.cancel()
    await asyncio.wait({starting})
    await handle.stop()
    may_go.set()
    core = await asyncio.wrap_future(built)
    await asyncio.to_thread(core._thread.join, 20)
    assert not core._thread.is_alive()


@pytest.mark.parametrize(
    ("is_recurrent", "options", "num_steps"),
    [
        (False, {"prefix_ids": (5, 6, 7)}, 3),
        (True, {"prefix_ids": (5, 6, 7)}, 6),  # steps read the prefix
        (False, {"prefix_ids": (5, 6, 7), "is_score": True, "max_new_tokens": 1}, 1),
    ],
)
def test_a_caller_is_charged_for_all_steps_of_a_request(is_recurrent, options, num_steps):
    charged = []
    with DrivenEngine(FakeRunner(1, is_recurrent=is_recurrent)).started() as engine:
        engine.engine._queue.release = lambda request, seconds, steps: charged.append(steps)
        engine.submit(make_request((20, 5), **{"max_new_tokens": 3} | options))
        engine.finish()
    assert charged == [num_steps]


def test_an_engine_whose_cores_are_gone_accepts_up_to_its_bound_and_says_why_it_is_not_healthy():
    async def run():
        engine = DrivenEngine(FakeRunner(1), max_waiting_requests=4)
        await engine.engine.start()
        engine.cores[0].start = never
        engine.cores[0].kill()
        engine.submit(*(make_request((3, number)) for number in range(4)))
        with pytest.raises(Overloaded):
            engine.submit(make_request((3, 4)))
        assert engine.engine.problem() == "fake: the engine has ended, and is being started again"
        assert engine.engine.fatal_problem() is None
        await engine.engine.stop()

    async def never(turned, ended):
        await asyncio.Event().wait()

    asyncio.run(run())


async def test_a_failed_core_restart_is_retried_and_a_failed_first_start_raises(monkeypatch, caplog):
    pauses = []
    monkeypatch.setattr("seq2seq_serve.server.engine.async_engine._WATCH_SECONDS", 0.5)
    engine = DrivenEngine(FakeRunner(1), FakeRunner(1))
    start, tries = engine.cores[0].start, 0

    async def fail(turned, ended):
        nonlocal tries
        tries += 1
        if tries <= 3:
            raise ValueError("no memory is left")
        await start(turned, ended)

    await engine.engine.start()
    engine.cores[0].start = fail
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: (pauses.append(seconds), sleep(0))[1])
    engine.cores[0].kill()
    while not engine.cores[0].is_ready:
        await sleep(0)
    monkeypatch.undo()
    tries = 0
    second = AsyncEngine("fake", engine.cores, QueueLimits(), print)
    with pytest.raises(ValueError, match="no memory is left"):
        await second.start()
    await engine.engine.stop()
    assert [pause for pause in pauses if pause != 0.5] == [1.0, 2.0, 4.0]
    assert caplog.text.count("not started again: no memory is left") == 3


@pytest.mark.parametrize("is_killable", [True, False])
async def test_a_hung_core_is_killed_or_reported_as_a_fatal_problem(is_killable, monkeypatch, caplog):
    monkeypatch.setattr("seq2seq_serve.server.engine.async_engine._WATCH_SECONDS", 0.0)
    engine = DrivenEngine(FakeRunner(1))
    core, kills = engine.cores[0], []
    await engine.engine.start()
    core.can_be_killed, core.kill = is_killable, lambda: kills.append(True)
    [stream] = engine.submit(make_request((20, 3)))
    assert engine.engine.problem() is None
    core.age, engine.now = 70.0, 70.0
    core.silent_seconds = lambda: 70.0
    problem = "fake: no sign of life from the engine for 70 seconds"
    assert engine.engine.problem() == problem
    assert engine.engine.fatal_problem() == (None if is_killable else problem)
    while not kills:
        await asyncio.sleep(0)
    core.age = 0.0
    engine.finish()
    assert stream.result.error is None
    core.ended("it was killed")
    cause = "the server ended an instance whose turn took 70 seconds, and at most 60 are usual"
    assert f"model fake: {cause}; its 0 requests end" in caplog.text
    while not core.is_ready:
        await asyncio.sleep(0)
    core.ended("it was killed")
    assert "model fake: it was killed; its 0 requests end" in caplog.text
    await engine.engine.stop()


@pytest.mark.parametrize(("start_seconds", "longest"), [(0.5, 60), (40.0, 200)])
async def test_a_turn_may_take_several_times_as_long_as_the_start(start_seconds, longest):
    """An encoding of a large model on a slow machine took a minute, and was taken for a hung core."""
    engine = DrivenEngine(FakeRunner(1))
    core, start = engine.cores[0], engine.cores[0].start

    async def start_slowly(turned, ended):
        engine.now += start_seconds
        await start(turned, ended)

    core.start = start_slowly
    await engine.engine.start()
    core.age = longest - 1.0
    assert engine.engine.problem() is None
    core.age = longest + 1.0
    assert engine.engine.problem() is not None
    core.age = 0.0
    await engine.engine.stop()


async def test_a_core_is_restarted_after_its_steps_have_failed_for_some_seconds(monkeypatch):
    """After an idle hour, the first failures ended it."""
    monkeypatch.setattr("seq2seq_serve.server.engine.async_engine._WATCH_SECONDS", 0.0)
    engine = DrivenEngine(FakeRunner(1, fail_steps=range(100)))
    core, kills = engine.cores[0], []
    await engine.engine.start()
    core.kill = lambda: kills.append(True)
    for now, is_killed in ((3600.0, False), (3605.0, False), (3620.0, True)):
        engine.now = now
        for number in range(4):
            engine.submit(make_request((13, number)))
            engine.finish()
        for _ in range(3):  # looks at the core
            await asyncio.sleep(0)
        assert bool(kills) is is_killed
    assert core.fault == "whose steps failed for 21 seconds"
    await engine.engine.stop()


def failing(*_args, **_options):
    raise RuntimeError("this place was told to fail")


@pytest.mark.parametrize(
    "break_it",
    [
        lambda core: setattr(core.scheduler, "schedule", failing),
        lambda core: setattr(core.scheduler, "record", failing),
        lambda core: setattr(core, "_result", failing),
        lambda core: setattr(core, "_deliver", failing),
        lambda core: (setattr(core._runner, "step", failing), setattr(core.scheduler, "fail", failing)),
        lambda core: (setattr(core.scheduler, "record", failing), setattr(core._runner, "close", failing)),
        None,  # where its turns are counted
    ],
    ids=["decide", "record", "result", "deliver", "clean up", "close", "count"],
)
async def test_a_bug_anywhere_ends_the_core_its_callers_get_an_answer_and_another_one_starts(
    break_it, caplog, monkeypatch
):
    """With a bug in the clean-up, a caller without a deadline waited for ever, and health said SERVING."""
    cores, records = [], []

    def build(deliver, died):
        cores.append(Core(FakeRunner(2), model_name="fake", deliver=deliver, died=died))
        cores[-1].start()
        return cores[-1]

    engine = AsyncEngine("fake", [ThreadCore(2, build)], QueueLimits(), records.append)
    await engine.start()
    if break_it is None:
        monkeypatch.setattr(engine._queue, "release", failing)
    else:
        break_it(cores[0])
    with engine.submitted([make_request((10, number)) for number in (4, 5, 6)]) as streams:
        results = [await stream.wait() for stream in streams]
    monkeypatch.undo()
    errors = [result.error for result in results]
    assert all(error is None or isinstance(error, Unavailable) for error in errors)
    assert any(errors) or break_it is None
    with engine.submitted([make_request((10, 7))]) as [stream]:
        assert (await stream.wait()).error is None
    assert engine.problem() is None
    assert sum(turn.num_core_restarts for turn in records) == 1
    assert engine.load() == Load(0, 0, 0, 0)
    await engine.stop()
    assert "told to fail" in caplog.text


async def test_a_core_is_started_again_although_its_end_cannot_be_counted(monkeypatch):
    """With a bug in the metrics, the task that starts it again ended."""
    monkeypatch.setattr("seq2seq_serve.server.engine.async_engine._FIRST_PAUSE_SECONDS", 0.0)
    engine, turns = DrivenEngine(FakeRunner(1)), []
    await engine.engine.start()

    def record(turn):
        turns.append(turn)
        if len(turns) < 4:
            failing()

    monkeypatch.setattr(engine.engine, "_record", record)
    with pytest.raises(RuntimeError, match="told to fail"):
        engine.cores[0].kill()
    for _ in range(100):
        await asyncio.sleep(0)
    assert engine.cores[0].is_ready
    await engine.engine.stop()


async def test_each_start_of_a_core_is_counted(monkeypatch):
    """Of eight kills in quick succession two were counted: a core that ends while it starts was not."""
    monkeypatch.setattr("seq2seq_serve.server.engine.async_engine._FIRST_PAUSE_SECONDS", 0.0)
    engine = DrivenEngine(FakeRunner(1))
    await engine.engine.start()
    core, start, tries = engine.cores[0], engine.cores[0].start, []

    async def start_at_the_third_try(turned, ended):
        tries.append(True)
        if len(tries) < 3:
            raise ValueError("killed while it started")
        await start(turned, ended)

    core.start = start_at_the_third_try
    core.kill()
    while not core.is_ready:
        await asyncio.sleep(0.01)
    assert sum(turn.num_core_restarts for turn in engine.turns) == 3
    await engine.engine.stop()


def test_turns_that_come_together_are_all_recorded_and_the_last_one_counts():
    engine = DrivenEngine(FakeRunner(2))
    with engine.started():
        (core,), together = engine.cores, []
        turned, core._turned = core._turned, together.extend
        engine.submit(make_request((10, 4)), make_request((10, 5), max_new_tokens=3))
        engine.turn(3)
        assert engine.turns == []
        core._turned = turned
        together[0] = together[0]._replace(is_failing=True)
        core._turned(together)
        assert [turn.num_rows for turn in engine.turns] == [2, 2, 2]
        assert core.failing_since is None
        assert engine.engine.load().num_running == len(core.requests) == 1


def test_a_core_with_failing_steps_gets_no_requests_while_another_core_works():
    broken, sound = FakeRunner(1, fail_steps=range(100)), FakeRunner(1)
    with DrivenEngine(broken, sound).started() as engine:
        for number in range(3):
            engine.submit(make_request((13, number), max_new_tokens=3))
            engine.submit(make_request((14, number), max_new_tokens=3))
            engine.finish()
        assert engine.cores[0].failing_since is not None
        assert engine.engine.problem() is None
        num_steps = broken.num_steps
        streams = [engine.submit(make_request((13, number), max_new_tokens=3))[0] for number in range(5)]
        engine.finish()
        assert broken.num_steps == num_steps
        assert all(stream.result.error is None for stream in streams)
