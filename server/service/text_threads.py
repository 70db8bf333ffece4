"""Threads that cut long texts and decode pictures, so that the event loop and other calls do not wait."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from seq2seq_serve.server.errors import Cancelled, DeadlineExceeded, Overloaded, Unavailable
from seq2seq_serve.server.service.lanes import Lane, has_room

_Result = TypeVar("_Result")

# Called often; raises if the work must end because its caller has left or the server drains.
Checkpoint = Callable[[], None]

_ON_THE_LOOP_BYTES = 2_000  # a millisecond or two
SHORT_BYTES = 32_000
# A byte of text takes about as long to read as this many bytes of a file or tensor, and as many pixels.
BYTES_PER_TEXT_BYTE = 64
_MAX_WAITING_BYTES = 8 * 2**20
_BYTES_PER_SECOND = 500_000  # about what one core cuts into tokens or sentences of the slowest texts


class TextThreads:
    """Runs the work on the sources of calls. Short texts do not wait for long ones and for pictures.

    Owned by `Calls`; used on the event loop only. Invariant: work whose caller has left does not start, or
    ends at its next checkpoint.
    """

    def __init__(self) -> None:
        self._short, self._long = Lane("short-texts"), Lane("long-texts")
        self._is_draining = False

    async def run(
        self,
        work: Callable[[Checkpoint], _Result],
        num_bytes: int,
        caller: str,
        deadline: float | None,
        *,
        has_file: bool = False,
    ) -> _Result:
        """Returns the result of `work`.

        Args:
            work: Touches no state of the event loop, and calls its checkpoint every few milliseconds.
            num_bytes: The bytes of text that take as long to read as the sources.
            caller: The name of the caller.
            deadline: Monotonic seconds.
            has_file: Whether files are decoded, some of which take far longer than their headers say.

        Raises:
            Overloaded: Too many sources wait, and the caller would have more than its share of them.
            DeadlineExceeded: The deadline passed before the end of the work.
            Unavailable: The server drains.
        """
        if num_bytes <= _ON_THE_LOOP_BYTES and not has_file:
            return work(lambda: None)
        if self._is_draining:
            raise Unavailable("the server is shutting down")
        lane = self._short if num_bytes <= SHORT_BYTES and not has_file else self._long
        _check_room(lane.num_bytes, num_bytes, caller)
        has_left = threading.Event()

        def checkpoint() -> None:
            if has_left.is_set():
                raise Cancelled("the caller has left")
            if self._is_draining:
                raise Unavailable("the server is shutting down")

        def begin() -> _Result:
            checkpoint()
            return work(checkpoint)

        try:
            async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
                return await lane.run(begin, num_bytes, caller)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the sources were read") from None
        finally:
            has_left.set()

    def drain(self) -> None:
        """Ends all work with `Unavailable`, because the engines would refuse its requests."""
        self._is_draining = True

    def stop(self) -> None:
        """Ends the threads; running work ends at its next checkpoint."""
        self.drain()
        for lane in (self._short, self._long):
            lane.stop()


def _check_room(waiting: Counter[str], num_bytes: int, caller: str) -> None:
    """Raises Overloaded if too many bytes wait and the caller would have more than its share of them.

    Args:
        waiting: The bytes that wait or are being read, by caller.
        num_bytes: The size of the sources.
        caller: The name of their caller.
    """
    if not has_room(waiting, num_bytes, caller, _MAX_WAITING_BYTES):
        num_waiting, num_callers = waiting.total(), len(waiting.keys() | {caller})
        raise Overloaded(
            f"sources of {num_waiting} bytes wait to be read, {waiting[caller]} of them this caller's: "
            f"the limit is {_MAX_WAITING_BYTES}, shared by {num_callers} callers",
            retry_after_seconds=num_waiting / _BYTES_PER_SECOND,
        )
