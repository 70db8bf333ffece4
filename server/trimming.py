"""Gives freed memory back to the machine: what Python's collector and glibc would keep for later.

Many messages of megabytes at once are no longer needed when they are answered, and would still count against
the limit of the container. With another C library than glibc, only Python's part is done.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

# Python's collector of cycles looks at everything that lives, which stops all threads for a tenth of a second
# where a thousand requests wait. So by itself it looks at what is young, and at the whole only now and then.
_GC_THRESHOLDS = (2_000, 10, 2**31 - 1)
_COLLECT_SECONDS = 60.0
_PAUSES = 50  # between collections for the sake of memory, as a multiple of the last one's duration

_STATM = Path("/proc/self/statm")  # Linux
_SLACK_BYTES = 64 * 2**20
_MANY_LOOKS = 30
_SELDOM = 4
_MAX_LOOKS = 600


def spare_what_lives() -> None:
    """Let Python's collector skip all objects that exist now, and look at old ones only now and then."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def resident_bytes() -> int:
    """Memory that this process has; 0 where it cannot be read, such as for want of a file descriptor."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class Trimmer:
    """Collects garbage, and asks glibc to give memory back while the process has more than before.

    Owned by the app, which calls `look` every second. It trims at each of the first `_MANY_LOOKS` that find
    more, then at every fourth. What is in use at `_MAX_LOOKS` in a row is needed, and becomes the new base.
    Garbage is collected before memory is trimmed, for at most a fiftieth of the time; and once a minute at
    least.
    """

    def __init__(self, measure: Callable[[], int] = resident_bytes) -> None:
        self._measure = measure
        self._malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._base_bytes = measure()
        self._num_looks = 0  # in a row that found more
        self._collected_at, self._collect_seconds = time.monotonic(), 0.0

    async def look(self) -> None:
        """Collect and trim where the process has grown: a millisecond for each megabyte that is given back.

        Trimming releases the GIL, but other threads wait where they need the heap.
        """
        is_wanted = self._is_trim_wanted()
        self._collect(_PAUSES * self._collect_seconds if is_wanted else math.inf)
        if is_wanted and self._malloc_trim is not None:
            await asyncio.to_thread(self._malloc_trim, 0)

    def _is_trim_wanted(self) -> bool:
        now = self._measure()
        if not now:
            return False
        self._base_bytes = min(self._base_bytes or now, now)
        if now <= self._base_bytes + _SLACK_BYTES:
            self._num_looks = 0
            return False
        self._num_looks += 1
        if self._num_looks > _MAX_LOOKS:
            self._base_bytes = now
            return False
        return self._num_looks <= _MANY_LOOKS or self._num_looks % _SELDOM == 0

    def _collect(self, pause_seconds: float) -> None:
        """Collect garbage if the last collection ended at least that long ago."""
        begun = time.monotonic()
        if begun - self._collected_at >= min(pause_seconds, _COLLECT_SECONDS):
            gc.collect()
            self._collected_at = time.monotonic()
            self._collect_seconds = self._collected_at - begun
