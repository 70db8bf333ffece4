"""Work with texts beside the event loop: bounded, cancelled with its call, and never in the way of others."""

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from seq2seq_serve.server.errors import Cancelled, DeadlineExceeded, Overloaded, Unavailable
from seq2seq_serve.server.service import text_threads
from seq2seq_serve.server.service.text_threads import TextThreads

SHORT, LONG = 10_000, 1_000_000


@asynccontextmanager
async def threads() -> AsyncIterator[TextThreads]:
    made = TextThreads()
    try:
        yield made
    finally:
        made.stop()


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


async def begin(made: TextThreads, num_bytes: int = LONG, caller: str = "a") -> tuple[Held, asyncio.Future]:
    held = Held()
    task = asyncio.ensure_future(made.run(held, num_bytes, caller, None))
    await asyncio.to_thread(held.begun.wait, 20)
    return held, task


def test_only_small_texts_are_cut_on_the_loop():
    async def run():
        async with threads() as made:
            here = threading.current_thread().name
            names = [
                await made.run(lambda _: threading.current_thread().name, size, "a", None)
                for size in (100, SHORT, LONG)
            ]
            assert names[0] == here
            assert len({*names}) == 3

    asyncio.run(run())


def test_short_texts_do_not_wait_for_long_ones():
    async def run():
        async with threads() as made:
            held, task = await begin(made)
            assert await made.run(lambda _: "short", SHORT, "a", None) == "short"
            held.go.set()
            await task

    asyncio.run(run())


def test_work_of_a_caller_who_leaves_stops_or_is_not_begun_and_nothing_is_logged(caplog):
    async def run():
        async with threads() as made:
            running, first = await begin(made)
            waiting = Held()
            second = asyncio.ensure_future(made.run(waiting, LONG, "a", None))
            await asyncio.sleep(0)
            for task in (second, first):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            running.go.set()
            assert await made.run(lambda _: "next", LONG, "a", None) == "next"
            assert isinstance(running.error, Cancelled)
            assert not waiting.begun.is_set()
            running.error = None

    asyncio.run(run())
    gc.collect()  # an exception that nobody asked for is logged when its future is freed
    assert not caplog.records


def test_what_waits_is_bounded_and_who_comes_too_late_hears_when_to_come_again(monkeypatch):
    async def run():
        monkeypatch.setattr(text_threads, "_MAX_WAITING_BYTES", LONG + 1)
        async with threads() as made:
            held, task = await begin(made, 3 * LONG)  # one is taken, however long
            with pytest.raises(Overloaded, match="wait to be read") as caught:
                await made.run(held, LONG, "a", None)
            assert caught.value.retry_after_seconds > 1
            held.go.set()
            await task
            await made.run(held, LONG, "a", None)

    asyncio.run(run())


def test_callers_have_the_thread_in_turn():
    """The thread ran calls in order of arrival, so a caller with many calls held up all others."""

    async def run():
        async with threads() as made:
            held, first = await begin(made)
            order = []
            tasks = [
                asyncio.ensure_future(made.run(lambda _, name=name: order.append(name), LONG, name, None))
                for name in "aaabbc"
            ]
            await asyncio.sleep(0)
            held.go.set()
            await asyncio.gather(first, *tasks)
            assert order == ["b", "c", "a", "b", "a", "a"]

    asyncio.run(run())


def test_what_waits_is_shared_by_callers(monkeypatch):
    """One caller could fill the bound, and everybody else was refused."""

    async def run():
        monkeypatch.setattr(text_threads, "_MAX_WAITING_BYTES", 4 * LONG)
        async with threads() as made:
            held, first = await begin(made)
            tasks = [first]
            for name, num_taken in (("a", 3), ("b", 2), ("c", 1)):
                for _ in range(num_taken):
                    tasks.append(asyncio.ensure_future(made.run(lambda _: None, LONG, name, None)))
                    await asyncio.sleep(0)
                with pytest.raises(Overloaded, match=f"{LONG * (num_taken + (name == 'a'))} of them this"):
                    await made.run(lambda _: None, LONG, name, None)
            held.go.set()
            await asyncio.gather(*tasks)
            await made.run(lambda _: None, 5 * LONG, "a", None)

    asyncio.run(run())


def test_a_text_counts_until_the_thread_has_ended_with_it(monkeypatch):
    """It counted until its caller left, and a caller who always left kept the thread busy without limit."""

    async def run():
        monkeypatch.setattr(text_threads, "_MAX_WAITING_BYTES", LONG + 1)
        async with threads() as made:
            held, task = await begin(made)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(Overloaded, match="wait to be read"):
                await made.run(lambda _: None, LONG, "a", None)
            held.go.set()
            while made._long.num_bytes:
                await asyncio.sleep(0)
            assert isinstance(held.error, Cancelled)
            await made.run(lambda _: None, LONG, "a", None)

    asyncio.run(run())


def test_a_deadline_ends_the_waiting():
    async def run():
        async with threads() as made:
            held, task = await begin(made)
            with pytest.raises(DeadlineExceeded, match="the deadline passed before"):
                await made.run(lambda _: None, LONG, "a", time.monotonic())
            held.go.set()
            await task

    asyncio.run(run())


def test_draining_ends_what_waits_and_what_runs():
    async def run():
        async with threads() as made:
            held, running = await begin(made)
            waiting = asyncio.ensure_future(made.run(lambda _: None, LONG, "a", None))
            await asyncio.sleep(0)
            made.drain()
            held.go.set()
            for task in (running, waiting, made.run(lambda _: None, SHORT, "a", None)):
                with pytest.raises(Unavailable, match="shutting down"):
                    await task

    asyncio.run(run())
