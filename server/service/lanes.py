"""Threads beside the event loop that callers share fairly."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

from server.futures import retrieve

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
        own_turn = self._turns.setdefault(caller, asyncio.Lock())
        self.num_bytes[caller] += num_bytes
        working: asyncio.Future[_Result] | None = None

        def give_back(_: object) -> None:
            self.num_bytes[caller] -= num_bytes
            if not self.num_bytes[caller]:
                del self.num_bytes[caller]

        try:
            async with own_turn, self._turn:
                working = asyncio.get_running_loop().run_in_executor(self._pool, work)
                working.add_done_callback(retrieve)
                return await asyncio.shield(working)
        finally:
            if working is None:
                give_back(None)
            else:
                working.add_done_callback(give_back)

    def stop(self) -> None:
        """End the thread after what it works on."""
        self._pool.shutdown(wait=False, cancel_futures=True)
