"""Threads for long work with texts, so that the event loop and other calls never wait for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from server.errors import Cancelled, DeadlineExceeded, Overloaded, Unavailable

_Result = TypeVar("_Result")

# Raises where the work should end, because its caller has left or the server is ending. Called often.
Checkpoint = Callable[[], None]

_ON_THE_LOOP_BYTES = 2_000  # a millisecond or two
_SHORT_BYTES = 32_000
_MAX_WAITING_BYTES = 8 * 2**20
_BYTES_PER_SECOND = 500_000  # that one core cuts into tokens or sentences, about, where that takes longest


class _Lane:
    """One thread, and the bytes that wait for it or are in work on it. Owned by `TextThreads`."""

    def __init__(self, name: str) -> None:
        self.pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self.num_bytes = 0


class TextThreads:
    """Runs the text work of calls. Long texts have a thread of their own, so that short ones need not wait.

    Owned by the app; used on the event loop only. Invariant: work whose caller has left is not begun, or ends
    at its next checkpoint.
    """

    def __init__(self) -> None:
        self._short, self._long = _Lane("short-texts"), _Lane("long-texts")
        self._is_draining = False

    async def run(
        self, work: Callable[[Checkpoint], _Result], num_bytes: int, deadline: float | None
    ) -> _Result:
        """Returns the result of `work`.

        Args:
            work: Touches no state of the event loop, and calls its checkpoint every few milliseconds.
            num_bytes: The size of its texts.
            deadline: Monotonic seconds.

        Raises:
            Overloaded: Too much is waiting.
            DeadlineExceeded: The deadline passes before it is done.
            Unavailable: The server is ending.
        """
        if num_bytes <= _ON_THE_LOOP_BYTES:
            return work(lambda: None)
        if self._is_draining:
            raise Unavailable("the server is shutting down")
        lane = self._short if num_bytes <= _SHORT_BYTES else self._long
        if lane.num_bytes and lane.num_bytes + num_bytes > _MAX_WAITING_BYTES:
            raise Overloaded(
                f"texts of {lane.num_bytes} bytes are waiting to be cut into tokens, and the limit is "
                f"{_MAX_WAITING_BYTES}",
                retry_after_seconds=lane.num_bytes / _BYTES_PER_SECOND,
            )
        has_left = threading.Event()

        def checkpoint() -> None:
            if has_left.is_set():
                raise Cancelled("the caller has left")
            if self._is_draining:
                raise Unavailable("the server is shutting down")

        def begin() -> _Result:
            checkpoint()
            return work(checkpoint)

        lane.num_bytes += num_bytes
        try:
            async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
                return await asyncio.get_running_loop().run_in_executor(lane.pool, begin)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the text was cut into tokens") from None
        finally:
            has_left.set()
            lane.num_bytes -= num_bytes

    def drain(self) -> None:
        """End all work with `Unavailable`: the engines would refuse its requests."""
        self._is_draining = True

    def stop(self) -> None:
        """End the threads; what runs ends at its next checkpoint."""
        self.drain()
        for lane in (self._short, self._long):
            lane.pool.shutdown(wait=False, cancel_futures=True)
