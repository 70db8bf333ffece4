"""Gives freed memory back to the machine, which glibc would keep for later allocations.

Many messages of megabytes at once are freed when they are answered, and would still count against the limit
of the container. With another C library than glibc nothing is done.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

_STATM = Path("/proc/self/statm")  # Linux
_SLACK_BYTES = 64 * 2**20
_MANY_LOOKS = 30
_SELDOM = 4
_MAX_LOOKS = 600


def resident_bytes() -> int:
    """Memory that this process has; 0 where it cannot be read, such as for want of a file descriptor."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class Trimmer:
    """Asks glibc to give memory back while the process has more than before.

    Owned by the app, which calls `look` every second, on a thread beside the event loop. It trims at each of
    the first `_MANY_LOOKS` that find more, then at every fourth. What is in use at `_MAX_LOOKS` in a row is
    needed, and becomes the new base.
    """

    def __init__(self, measure: Callable[[], int] = resident_bytes) -> None:
        self._measure = measure
        self._malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._base_bytes = measure()
        self._num_looks = 0  # in a row that found more

    def look(self) -> None:
        """Trim where the process has grown: about a millisecond for each megabyte that is given back.

        The GIL is released, but other threads wait where they need the heap.
        """
        now = self._measure()
        if not now:
            return
        self._base_bytes = min(self._base_bytes or now, now)
        if self._malloc_trim is None or now <= self._base_bytes + _SLACK_BYTES:
            self._num_looks = 0
            return
        self._num_looks += 1
        if self._num_looks > _MAX_LOOKS:
            self._base_bytes = now
        elif self._num_looks <= _MANY_LOOKS or self._num_looks % _SELDOM == 0:
            self._malloc_trim(0)
