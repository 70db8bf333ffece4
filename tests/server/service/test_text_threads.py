"""Work with texts beside the event loop: bounded, cancelled with its call, and never in the way of others."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from server.errors import Cancelled, DeadlineExceeded, Overloaded, Unavailable
from server.service import text_threads
from server.service.text_threads import TextThreads

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


async def begin(made: TextThreads, num_bytes: int = LONG) -> tuple[Held, asyncio.Future]:
    held = Held()
    task = asyncio.ensure_future(made.run(held, num_bytes, None))
    await asyncio.to_thread(held.begun.wait, 20)
    return held, task


def test_only_small_texts_are_cut_on_the_loop():
    async def run():
        async with threads() as made:
            here = threading.current_thread().name
            names = [
                await made.run(lambda _: threading.current_thread().name, size, None)
                for size in (100, SHORT, LONG)
            ]
            assert names[0] == here
            assert len({*names}) == 3

    asyncio.run(run())


def test_short_texts_do_not_wait_for_long_ones():
    async def run():
        async with threads() as made:
            held, task = await begin(made)
            assert await made.run(lambda _: "short", SHORT, None) == "short"
            held.go.set()
            await task

    asyncio.run(run())


def test_work_of_a_caller_who_leaves_stops_or_is_not_begun():
    async def run():
        async with threads() as made:
            running, first = await begin(made)
            waiting = Held()
            second = asyncio.ensure_future(made.run(waiting, LONG, None))
            await asyncio.sleep(0)
            for task in (second, first):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            running.go.set()
            assert await made.run(lambda _: "next", LONG, None) == "next"
            assert isinstance(running.error, Cancelled)
            assert not waiting.begun.is_set()

    asyncio.run(run())


def test_what_waits_is_bounded_and_who_comes_too_late_hears_when_to_come_again(monkeypatch):
    async def run():
        monkeypatch.setattr(text_threads, "_MAX_WAITING_BYTES", LONG + 1)
        async with threads() as made:
            held, task = await begin(made, 3 * LONG)  # one is taken, however long
            with pytest.raises(Overloaded, match="are waiting to be cut") as caught:
                await made.run(held, LONG, None)
            assert caught.value.retry_after_seconds > 1
            held.go.set()
            await task
            await made.run(held, LONG, None)

    asyncio.run(run())


def test_a_deadline_ends_the_waiting():
    async def run():
        async with threads() as made:
            held, task = await begin(made)
            with pytest.raises(DeadlineExceeded, match="the deadline passed before"):
                await made.run(lambda _: None, LONG, time.monotonic())
            held.go.set()
            await task

    asyncio.run(run())


def test_draining_ends_what_waits_and_what_runs():
    async def run():
        async with threads() as made:
            held, running = await begin(made)
            waiting = asyncio.ensure_future(made.run(lambda _: None, LONG, None))
            await asyncio.sleep(0)
            made.drain()
            held.go.set()
            for task in (running, waiting, made.run(lambda _: None, SHORT, None)):
                with pytest.raises(Unavailable, match="shutting down"):
                    await task

    asyncio.run(run())
