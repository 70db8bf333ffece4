"""A thread beside the event loop that callers share fairly."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

_Result = TypeVar("_Result")


def has_room(held: Counter[str], num_bytes: int, caller: str, limit: int) -> bool:
    """Returns whether a caller may hold more bytes: all fit, or the caller stays within its share.

    Args:
        held: The bytes that each caller holds.
        num_bytes: The bytes that are new.
        caller: The name of their caller.
        limit: The bytes that callers share.
    """
    if not held or held.total() + num_bytes <= limit:
        return True
    return held[caller] + num_bytes <= limit // len(held.keys() | {caller})


class Lane:
    """One thread, which works for callers in turn.

    A second thread would only take the interpreter from the event loop and the engines more often. Owned by
    the object that creates it; used on the event loop only.

    Attributes:
        num_bytes: Maps a caller to the size of its work that waits or runs.
    """

    def __init__(self, name: str) -> None:
        self.num_bytes = Counter[str]()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        # A lock goes to its waiters in the order in which they came. A caller waits for the thread once at a
        # time, so all callers get it in turn.
        self._turn = asyncio.Lock()
        self._turns = WeakValueDictionary[str, asyncio.Lock]()

    async def run(self, work: Callable[[], _Result], num_bytes: int, caller: str) -> _Result:
        """Returns the result of `work`, which does not start if its caller has left."""
        loop, own_turn = asyncio.get_running_loop(), self._turns.setdefault(caller, asyncio.Lock())
        self.num_bytes[caller] += num_bytes
        job: Future[_Result] | None = None

        def give_back() -> None:
            self.num_bytes[caller] -= num_bytes
            if not self.num_bytes[caller]:
                del self.num_bytes[caller]

        def give_back_soon(_: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(give_back)

        try:
            async with own_turn, self._turn:
                job = self._pool.submit(work)
                return await asyncio.wrap_future(job)  # a cancellation cancels a job that waits
        finally:
            if job is None:
                give_back()
            else:
                job.add_done_callback(give_back_soon)

    def stop(self) -> None:
        """Ends the thread after the work that runs on it."""
        self._pool.shutdown(wait=False, cancel_futures=True)
