"""A readers-writer lock, which Python's standard library does not have."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ReadersWriterLock:
    """Many threads may read at once, or one may write. Thread-safe.

    Writers have priority: while one waits, no other thread begins to read. A reading thread must not enter
    `reading` again: it would wait for a writer that waits for it.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._num_reading = 0
        self._num_waiting = 0  # writers
        self._is_writing = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """No thread writes while the block runs."""
        with self._condition:
            self._condition.wait_for(lambda: not self._is_writing and not self._num_waiting)
            self._num_reading += 1
        try:
            yield
        finally:
            with self._condition:
                self._num_reading -= 1
                self._condition.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """No other thread reads or writes while the block runs."""
        with self._condition:
            self._num_waiting += 1
            self._condition.wait_for(lambda: not self._is_writing and not self._num_reading)
            self._num_waiting -= 1
            self._is_writing = True
        try:
            yield
        finally:
            with self._condition:
                self._is_writing = False
                self._condition.notify_all()
