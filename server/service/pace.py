"""The part of the event loop that the requests of batches take, beside other calls."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

# Of the processor, in one round of the event loop. A call needs some ten rounds until it is answered, half of
# them before it is known, so calls of the last second count. Each round costs batches some of their speed:
# where there are no other calls, they take as much as they can.
_BESIDE_SECONDS = 0.0002
_RECENT_SECONDS = 1.0


class Pace:
    """Work that waits for its turn, of which a round of the event loop does a part; the oldest first.

    A piece of work lasts until it awaits anything, and what it took is known when the next one asks. It is
    counted in time of the event loop's thread, without what other threads and processes take. Owned by
    `Calls`; used on the event loop only.

    Args:
        has_others: Returns whether there are other calls now.
        clock: Returns the seconds for which the event loop's thread has run.
        now: Returns monotonic seconds.
    """

    def __init__(
        self,
        has_others: Callable[[], bool],
        clock: Callable[[], float] = time.thread_time,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._has_others = has_others
        self._clock = clock
        self._now = now
        self._alone_at = now()  # when there have been no other calls for some time
        self._ends_at: float | None = None  # the part of the present round; None before the first work of it
        self._num_pieces = 0  # of work, in the present round
        self._is_scheduled = False
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_woken = 0  # of those that waited, and have not gone on yet
        self._num_back = 0  # of these, for which the present round had no time

    async def turn(self) -> None:
        """Waits until the present round has time for one more piece of work."""
        if not self._waiting and not self._num_woken and self._has_time():
            return
        place = len(self._waiting)
        while True:
            woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.insert(place, woken)
            try:
                await woken
            finally:  # the caller may have left meanwhile
                self._num_woken -= woken.done() and not woken.cancelled()
            if self._has_time():
                return
            place, self._num_back = self._num_back, self._num_back + 1

    def _has_time(self) -> bool:
        if self._has_others():
            self._alone_at = self._now() + _RECENT_SECONDS
        if self._ends_at is None and self._now() < self._alone_at:
            self._ends_at, self._num_pieces = self._clock() + _BESIDE_SECONDS, 0
            self._schedule()
        elif self._ends_at is not None and self._clock() >= self._ends_at:
            return False
        self._num_pieces += 1
        return True

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_round)

    def _begin_round(self) -> None:
        """Wake as many as the last round had time for, and one more."""
        self._ends_at, self._is_scheduled, self._num_back = None, False, 0
        while self._waiting and self._num_woken <= self._num_pieces:
            woken = self._waiting.popleft()
            if not woken.done():
                woken.set_result(None)
                self._num_woken += 1
        if self._num_woken:
            self._schedule()
