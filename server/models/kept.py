"""Keeps what was made from bytes that callers send again and again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_Value = TypeVar("_Value")


class Kept(Generic[_Value]):
    """The newest values that were made from bytes, by these. Owned by a served model; used on any thread.

    A value is shared by callers with equal bytes, and must not change.

    Args:
        most_bytes: The most bytes from which the kept values were made.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._values: dict[bytes, _Value] = {}  # the newest last
        self._changing = threading.Lock()

    def value_of(self, key: bytes, make: Callable[[], _Value]) -> _Value:
        """Returns the value of some bytes, which is made if it is not kept; raises as `make`."""
        value = self._values.get(key)
        if value is not None:
            return value
        value = make()
        if len(key) <= self._most_bytes:
            with self._changing:
                if key not in self._values:
                    self._values[key] = value
                    self._num_bytes += len(key)
                while self._num_bytes > self._most_bytes:
                    oldest = next(iter(self._values))
                    del self._values[oldest]
                    self._num_bytes -= len(oldest)
        return value
