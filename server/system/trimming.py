"""Returns freed memory, which Python's collector and glibc would keep, to the operating system.

Messages of megabytes are not needed any more when they are answered, but would still count against the
container's limit. With another C library than glibc, only Python's garbage is collected.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A full garbage collection visits all live objects, which stops all threads for a tenth of a second while a
# thousand requests wait. So Python itself only collects young objects; `Trimmer` runs full collections.
_GC_THRESHOLDS = (2_000, 10, 2**31 - 1)
_COLLECT_SECONDS = 60.0
_PAUSES = 50  # pause between collections that free memory, as a multiple of the last one's duration

_STATM = Path("/proc/self/statm")  # Linux
_SLACK_BYTES = 64 * 2**20
_MANY_LOOKS = 30
_SELDOM = 4
_MAX_LOOKS = 600


def spare_what_lives() -> None:
    """Exclude all objects that exist now from garbage collection, and leave full collections to `Trimmer`."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def resident_bytes() -> int:
    """Returns this process's resident memory; 0 if it cannot be read: without a free descriptor, for one."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class Trimmer:
    """Collects garbage, and lets glibc return memory while the process has more than its base.

    Owned by the app or a core's process, which call `look` every second. Memory is trimmed at each of the
    first `_MANY_LOOKS` calls that find more, then at every fourth. Memory that is in use at `_MAX_LOOKS`
    calls in a row is needed, and becomes the new base. Garbage is collected before memory is trimmed, for at
    most a fiftieth of the time, and at least once a minute.
    """

    def __init__(self, measure: Callable[[], int] = resident_bytes) -> None:
        self._measure = measure
        self._malloc_trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._base_bytes = measure()
        self._num_looks = 0  # calls in a row that found more
        self._collected_at, self._collect_seconds = time.monotonic(), 0.0

    def look(self) -> bool:
        """Collect garbage if the process has grown; returns whether `trim` must follow."""
        is_wanted = self._is_trim_wanted()
        self._collect(_PAUSES * self._collect_seconds if is_wanted else math.inf)
        return is_wanted and self._malloc_trim is not None

    def trim(self) -> None:
        """Return freed memory; takes a millisecond for each megabyte.

        It releases the GIL, but threads that allocate memory wait for it.
        """
        self._malloc_trim(0)

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
        """Collect garbage if the last collection ended at least `pause_seconds` or a minute ago."""
        begun = time.monotonic()
        if begun - self._collected_at >= min(pause_seconds, _COLLECT_SECONDS):
            gc.collect()
            self._collected_at = time.monotonic()
            self._collect_seconds = self._collected_at - begun
