"""The part of the event loop that the requests of batches take, beside other calls."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

# Of the processor, in one round of the event loop. A call needs some ten rounds until it is answered, and
# each costs batches some of their speed: where there are no other calls, they take as much as they can.
_BESIDE_SECONDS = 0.0002
_RECENT_SECONDS = 1.0


class Pace:
    """Work that waits for its turn, of which a round of the event loop does a part.

    A piece of work lasts until it awaits anything, and what it took is known when the next one asks. It is
    counted in time of the event loop's thread, without what other threads and processes take. Owned by
    `Calls`; used on the event loop only.

    Args:
        clock: Returns the seconds for which the event loop's thread has run.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._other_at = -_RECENT_SECONDS  # when there was the last other call
        self._alone_at = 0.0  # when there have been no other calls for some time
        self._ends_at: float | None = None  # the part of the present round; None before the first work of it
        self._num_pieces = 0  # of work, in the present round
        self._is_scheduled = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    def make_way(self) -> None:
        """Take only a part of each round for some time: there are other calls.

        A single one is not enough: it may be the rest of bulk work, which clients send without a batch.
        """
        now = time.monotonic()
        if now < self._other_at + _RECENT_SECONDS:
            self._alone_at = now + _RECENT_SECONDS
        self._other_at = now

    def has_time(self) -> bool:
        """Whether the present round has time for one more piece of work, which then begins."""
        if time.monotonic() >= self._alone_at:
            return True
        if self._ends_at is None:
            self._ends_at, self._num_pieces = self._clock() + _BESIDE_SECONDS, 0
            self._schedule()
        elif self._clock() >= self._ends_at:
            return False
        self._num_pieces += 1
        return True

    async def turn(self) -> None:
        """Waits for a round that has time for one more piece of work."""
        woken = asyncio.get_running_loop().create_future()
        self._waiting.append(woken)
        await woken
        while not self.has_time():
            woken = asyncio.get_running_loop().create_future()
            self._waiting.appendleft(woken)
            await woken

    async def next_round(self) -> None:
        """Waits for a round in which no work waits."""
        await asyncio.sleep(0)
        while self._waiting:
            await asyncio.sleep(0)

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_round)

    def _begin_round(self) -> None:
        """Wake as many as the last round had time for, and one more."""
        self._ends_at, self._is_scheduled = None, False
        for _ in range(min(len(self._waiting), self._num_pieces + 1)):
            woken = self._waiting.popleft()
            if not woken.done():
                woken.set_result(None)
            self._schedule()
