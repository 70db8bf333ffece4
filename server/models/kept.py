"""Keeps what was read from the same bytes again and again."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

_Value = TypeVar("_Value")
_BYTES_OF_VALUE = 512  # that a value has beside what grows with the bytes it was read from


class Kept(Generic[_Value]):
    """The newest values that were read from messages, up to a bound. Owned by one thread.

    Callers with equal messages share a value, so it must not change.

    Args:
        most_bytes: The most bytes from which the kept values were read.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._values: dict[Hashable, tuple[_Value, int]] = {}  # with their bytes, the newest last

    def get(self, key: Hashable) -> _Value | None:
        """Returns the value of a key, if it is kept."""
        found = self._values.get(key)
        return None if found is None else found[0]

    def keep(self, key: Hashable, value: _Value, num_bytes: int) -> None:
        """Keeps a value, and drops the oldest ones while the bound is exceeded.

        A value that is larger than the bound is not kept.

        Args:
            key: Identifies the message.
            value: The value.
            num_bytes: The number of bytes of the message.
        """
        num_bytes += _BYTES_OF_VALUE
        if num_bytes > self._most_bytes or key in self._values:
            return
        self._values[key] = value, num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._most_bytes:
            _, freed = self._values.pop(next(iter(self._values)))
            self._num_bytes -= freed
