"""Threads beside the event loop that callers share fairly: for long texts, pictures and large answers."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

from seq2seq_serve.server.errors import Cancelled, DeadlineExceeded, Unavailable
from seq2seq_serve.server.service.shares import Shares

_Result = TypeVar("_Result")

# Called often; raises if the work must end because its caller has left or the server drains.
Checkpoint = Callable[[], None]

_BYTES_PER_SECOND = 500_000  # about what one core cuts into tokens or sentences of the slowest texts


class FairThread:
    """One thread, which works for callers in turn.

    A second thread would only take the interpreter from the event loop and the engines more often. Owned by
    `Calls`; used on the event loop only. Invariant: work whose caller has left does not start, or ends at its
    next checkpoint.

    Args:
        name: The name of the thread.
        max_bytes: The size of the work that may wait or run, shared by the callers.

    Attributes:
        shares: The bytes of the work that waits or runs.
    """

    def __init__(self, name: str, max_bytes: float = math.inf) -> None:
        self.shares = Shares(max_bytes, "sources of {} bytes wait to be read")
        self._is_draining = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        # A lock goes to its waiters in the order in which they came. A caller waits for the thread once at a
        # time, so all callers get it in turn.
        self._turn = asyncio.Lock()
        self._turns = WeakValueDictionary[str, asyncio.Lock]()

    async def run(
        self,
        work: Callable[[Checkpoint], _Result],
        num_bytes: int,
        caller: str,
        deadline: float | None,
        *,
        is_accepted: bool = False,
    ) -> _Result:
        """Returns the result of `work`.

        Args:
            work: Touches no state of the event loop, and calls its checkpoint every few milliseconds.
            num_bytes: The size of the work.
            caller: The name of the caller.
            deadline: Monotonic seconds.
            is_accepted: Whether the work is for a call that is finished while the server drains.

        Raises:
            Overloaded: Too much work waits, and the caller would have more than its share of it.
            DeadlineExceeded: The deadline passed before the end of the work.
            Unavailable: The server drains.
        """
        loop, has_left = asyncio.get_running_loop(), threading.Event()

        def checkpoint() -> None:
            if has_left.is_set():
                raise Cancelled("the caller has left")
            if self._is_draining and not is_accepted:
                raise Unavailable("the server is shutting down")

        def begin() -> _Result:
            try:
                checkpoint()
                return work(checkpoint)
            finally:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(self.shares.give_back, caller, num_bytes)

        checkpoint()
        self.shares.take(caller, num_bytes, self.shares.held.total() / _BYTES_PER_SECOND)
        own_turn = self._turns.setdefault(caller, asyncio.Lock())
        job: Future[_Result] | None = None
        try:
            async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
                async with own_turn, self._turn:
                    job = self._pool.submit(begin)
                    return await asyncio.wrap_future(job)
        except TimeoutError:
            text = "the deadline passed before the sources were read, or the answer was built"
            raise DeadlineExceeded(text) from None
        finally:
            has_left.set()
            if job is None or job.cancel():  # the thread will not begin it
                self.shares.give_back(caller, num_bytes)

    def drain(self) -> None:
        """Ends work with `Unavailable`, because the engines would refuse its requests."""
        self._is_draining = True

    def stop(self) -> None:
        """Ends the thread; running work ends at its next checkpoint."""
        self.drain()
        self._pool.shutdown(wait=False, cancel_futures=True)
