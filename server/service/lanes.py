"""Threads beside the event loop that callers share fairly."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

_Result = TypeVar("_Result")


class Lane:
    """One thread, which works for callers in turn.

    One, since more would only take the interpreter from the event loop and the engines more often. Used on
    the event loop only.

    Attributes:
        num_bytes: By caller, the size of what waits for the thread or is in work on it.
    """

    def __init__(self, name: str) -> None:
        self.num_bytes = Counter[str]()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        # Locks are given in the order of asking. A caller asks for the thread once at a time, so that all who
        # ask have it in turn.
        self._turn = asyncio.Lock()
        self._turns = WeakValueDictionary[str, asyncio.Lock]()

    async def run(self, work: Callable[[], _Result], num_bytes: int, caller: str) -> _Result:
        """Returns the result of `work`, which is not begun where its caller has left."""
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
        """End the thread after what it works on."""
        self._pool.shutdown(wait=False, cancel_futures=True)
