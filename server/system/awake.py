"""A clock that does not count the time for which this process was paused."""

from __future__ import annotations

import time
from collections.abc import Callable

_MOST_SECONDS = 2.0  # that a watcher's rounds are apart; it makes one each second


class AwakeClock:
    """Seconds since some moment, without pauses of the whole process.

    After a pause (of a virtual machine, of a cgroup, by SIGSTOP, or of the event loop), a watcher that looked
    at another clock would take those for dead that it has not listened to. Here a pause counts as two
    seconds. Any thread may read the clock; its owner calls `tick` in each round.

    Args:
        clock: Returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._state = clock(), 0.0  # the last tick, and the awake seconds until then; one value for threads

    def tick(self) -> None:
        """Begin a round of the watcher."""
        now = self._clock()
        ticked_at, seconds = self._state
        self._state = now, seconds + min(now - ticked_at, _MOST_SECONDS)

    def __call__(self) -> float:
        """Returns the awake seconds."""
        ticked_at, seconds = self._state
        return seconds + min(self._clock() - ticked_at, _MOST_SECONDS)
