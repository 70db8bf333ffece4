"""Work beside the event loop: bounded, cancelled with its call, and never in the way of others."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from seq2seq_serve.server.errors import Cancelled, DeadlineExceeded, Overloaded
from seq2seq_serve.server.service.calls import RemoteCall
from seq2seq_serve.server.service.fair_thread import FairThreads
from seq2seq_serve.server.telemetry.metrics import Metrics
from tests.server.service.harness import make_calls

SHORT, LONG = 10_000, 1_000_000


@asynccontextmanager
async def thread_of(max_bytes: int = 8 * LONG) -> AsyncIterator[FairThreads]:
    thread = FairThreads("long-texts", max_bytes)
    try:
        yield thread
    finally:
        thread.stop()


@asynccontextmanager
async def a_call() -> AsyncIterator[RemoteCall]:
    calls = make_calls(Metrics())
    try:
        yield calls.open("s", "m", metadata=(), peer="ipv4:1:1", remaining_seconds=None, write=None)
    finally:
        calls.close()


class Held:
    """Work that goes on until it is let go, and stops at its checkpoints."""

    def __init__(self):
        self.begun, self.go, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.error = None

    def __call__(self, checkpoint):
        self.begun.set()
        try:
            assert self.go.wait(20)
            checkpoint()
        except Exception as error:
            self.error = error
            raise
        finally:
            self.ended.set()


async def begin(thread: FairThreads, num_bytes: int = LONG, caller: str = "a") -> tuple[Held, asyncio.Future]:
    held = Held()
    task = asyncio.ensure_future(thread.run(held, num_bytes, caller, None))
    await asyncio.to_thread(held.begun.wait, 20)
    return held, task


async def test_callers_have_the_thread_in_turn():
    """The thread ran calls in order of arrival, so a caller with many calls held up all others."""
    async with thread_of() as thread:
        held, first = await begin(thread)
        order = []
        tasks = [
            asyncio.ensure_future(thread.run(lambda _, name=name: order.append(name), LONG, name, None))
            for name in "aaabbc"
        ]
        await asyncio.sleep(0)
        held.go.set()
        await asyncio.gather(first, *tasks)
        assert order == ["b", "c", "a", "b", "a", "a"]


@pytest.mark.parametrize("num_running", [1, 2])
async def test_long_work_of_others_ends_its_turn_for_short_work(num_running):
    """A sound that took 38 seconds had the thread to its end, and nobody else got an answer."""
    ends = threading.Event()
    order: list[str] = []

    def endless(checkpoint) -> None:
        while not ends.is_set():
            time.sleep(0.001)
            checkpoint()
        order.append("long")

    thread = FairThreads("files", num_running=num_running)
    long = [asyncio.ensure_future(thread.run(endless, LONG, name, None)) for name in "aaab"]
    await asyncio.sleep(0.01)
    for name in ("c", "b", "a"):  # a caller's own long work does not hold up its short work, either
        await asyncio.wait_for(thread.run(lambda _: order.append("short"), SHORT, name, None), 20)
    ends.set()
    await asyncio.gather(*long)
    assert order == ["short"] * 3 + ["long"] * 4
    assert thread._turns._num_free == num_running
    thread.stop()


async def test_the_items_of_a_batch_leave_places_for_other_calls_of_their_caller():
    """A short sound waited for 8 seconds until one of the caller's long items was read."""
    ends = threading.Event()

    def endless(checkpoint) -> None:
        while not ends.is_set():
            time.sleep(0.001)
            checkpoint()

    thread = FairThreads("files")
    items = [asyncio.ensure_future(thread.run(endless, 1, "a", None, is_accepted=True)) for _ in range(9)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(thread.run(lambda _: "short", SHORT, "a", None), 20) == "short"
    ends.set()
    await asyncio.gather(*items)
    thread.stop()


async def test_callers_have_equal_parts_of_the_turns_whatever_they_ask_for():
    """A caller with four works had four parts."""
    ends = threading.Event()
    turns: list[str] = []

    def endless(checkpoint, name) -> None:
        while not ends.is_set():
            time.sleep(0.001)
            if not turns or turns[-1] != name:
                turns.append(name)
            checkpoint()

    thread = FairThreads("files")
    works = [
        asyncio.ensure_future(thread.run(partial(endless, name=name), LONG, name[0], None))
        for name in ("a1", "a2", "a3", "a4", "b")
    ]
    while len(set(turns)) < 5:
        await asyncio.sleep(0.01)
    first = len(turns)  # from here on all of them wait
    while len(turns) < first + 20:
        await asyncio.sleep(0.01)
    ends.set()
    await asyncio.gather(*works)
    names = turns[first : first + 20]
    assert names.count("b") == 10
    assert all(names.count(name) in (2, 3) for name in ("a1", "a2", "a3", "a4"))
    thread.stop()


async def test_several_threads_work_at_once_and_no_more_than_that():
    running = most = 0
    lock, together = threading.Lock(), threading.Barrier(3)

    def work(checkpoint) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait(20)  # breaks unless three run at once
        with lock:
            running -= 1

    thread = FairThreads("files", num_running=3)
    await asyncio.gather(*(thread.run(work, SHORT, name, None) for name in "aaabbcdef"))
    assert most == 3
    thread.stop()


async def test_work_that_waits_for_its_next_turn_ends_when_its_caller_leaves():
    thread = FairThreads("files")
    released, ended = threading.Event(), threading.Event()
    begun: list[str] = []

    def passing(checkpoint) -> None:
        try:
            begun.append("passing")
            while True:
                time.sleep(0.001)
                checkpoint()
        finally:
            ended.set()

    def stubborn(_) -> None:
        begun.append("stubborn")
        assert released.wait(20)

    first = asyncio.ensure_future(thread.run(passing, SHORT, "a", None))
    while not begun:
        await asyncio.sleep(0.001)
    second = asyncio.ensure_future(thread.run(stubborn, SHORT, "b", None))
    while len(begun) < 2:
        await asyncio.sleep(0.001)
    first.cancel()
    assert await asyncio.to_thread(ended.wait, 20)  # although the other one never ends its turn
    released.set()
    await second
    await thread.run(lambda _: None, SHORT, "c", None)
    assert thread._turns._num_free == 1
    thread.stop()


async def test_what_waits_is_shared_by_callers():
    """One caller could fill the bound, and everybody else was refused."""
    async with thread_of(4 * LONG) as thread:
        held, first = await begin(thread)
        tasks = [first]
        for name, num_taken in (("a", 3), ("b", 2), ("c", 1)):
            for _ in range(num_taken):
                tasks.append(asyncio.ensure_future(thread.run(lambda _: None, LONG, name, None)))
                await asyncio.sleep(0)
            with pytest.raises(Overloaded, match=f"{LONG * (num_taken + (name == 'a'))} of them this"):
                await thread.run(lambda _: None, LONG, name, None)
        held.go.set()
        await asyncio.gather(*tasks)
        await thread.run(lambda _: None, 5 * LONG, "a", None)


async def test_a_text_counts_until_the_thread_has_ended_with_it():
    """It counted until its caller left, and a caller who always left kept the thread busy without limit."""
    async with thread_of(LONG + 1) as thread:
        held, task = await begin(thread)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(Overloaded, match="wait to be read"):
            await thread.run(lambda _: None, LONG, "a", None)
        held.go.set()
        while thread.shares.held:
            await asyncio.sleep(0)
        assert isinstance(held.error, Cancelled)
        await thread.run(lambda _: None, LONG, "a", None)


async def test_a_deadline_ends_the_waiting():
    async with thread_of() as thread:
        held, task = await begin(thread)
        with pytest.raises(DeadlineExceeded, match="the deadline passed before"):
            await thread.run(lambda _: None, LONG, "a", time.monotonic())
        held.go.set()
        await task


async def test_reading_and_building_end_at_the_deadline_of_their_call():
    """The times of words were computed for up to a second after their caller had left."""
    async with a_call() as call:
        for start in (lambda held: call.read(held, 10**6), lambda held: call.build(10**6, held)):
            held, call.deadline = Held(), time.monotonic() + 0.1
            with pytest.raises(DeadlineExceeded, match="or the answer was built"):
                await start(held)
            held.go.set()
            assert await asyncio.to_thread(held.ended.wait, 20)
            assert isinstance(held.error, Cancelled)


async def test_work_whose_caller_leaves_is_not_begun_and_others_have_their_turn():
    """Each work that a caller left behind was begun, one after another, before anybody else's."""
    go, begun = threading.Event(), threading.Event()
    done: list[str] = []

    def hold(_) -> None:
        begun.set()
        assert go.wait(20)

    thread = FairThreads("thread", 100)
    first = asyncio.ensure_future(thread.run(hold, 5, "a", None))
    await asyncio.to_thread(begun.wait, 20)
    for _ in range(3):
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        first = asyncio.ensure_future(thread.run(lambda _: done.append("left"), 5, "a", None))
        await asyncio.sleep(0.01)
    first.cancel()
    other = asyncio.ensure_future(thread.run(lambda _: done.append("other"), 7, "b", None))
    async with asyncio.timeout(20):
        while thread.shares.held["a"] != 5:  # of what the thread works on, and of nothing else
            await asyncio.sleep(0.001)
    go.set()
    await other
    assert done == ["other"]
    async with asyncio.timeout(20):
        while thread.shares.held:
            await asyncio.sleep(0.001)
    thread.stop()


async def test_work_is_given_back_once_if_no_thread_can_be_started(monkeypatch):
    """The pool keeps such work, and begins it later: it was given back again, in the place of other work."""
    thread, begun, go = FairThreads("thread", 100), threading.Event(), threading.Event()

    def refuse():
        raise RuntimeError("can't start new thread")

    def hold(_):
        begun.set()
        assert go.wait(20)

    with monkeypatch.context() as patch:
        patch.setattr(thread._pool, "_adjust_thread_count", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            await thread.run(hold, 5, "a", None)
    working = asyncio.ensure_future(thread.run(hold, 5, "a", None))
    assert await asyncio.to_thread(begun.wait, 20)
    assert thread.shares.held["a"] == 5
    go.set()
    await working
    assert not thread.shares.held
    thread.stop()
