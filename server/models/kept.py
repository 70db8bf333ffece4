"""Keeps what was read from the same bytes again and again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

_Owner = TypeVar("_Owner", bound=Hashable)
_Value = TypeVar("_Value")
_BYTES_OF_VALUE = 4096  # of memory, beside what grows with the message


class Kept(Generic[_Owner, _Value]):
    """The most recently used values that were read from messages, up to a bound. Owned by one thread.

    Equal messages share a value, so it must not change.

    Args:
        most_bytes: The most memory that the kept values take.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        # With their bytes, the most recently used last
        self._values = OrderedDict[tuple[_Owner, Hashable], tuple[_Value, int]]()

    def get(self, owner: _Owner, key: Hashable) -> _Value | None:
        """Returns the value of a key, if it is kept."""
        found = self._values.get((owner, key))
        if found is None:
            return None
        self._values.move_to_end((owner, key))
        return found[0]

    def keep(self, owner: _Owner, key: Hashable, value: _Value, num_bytes: int) -> None:
        """Keeps a value, and drops those that were not used for the longest time while there are too many.

        A value that is larger than the bound is not kept.

        Args:
            owner: The object that `forget` names.
            key: Identifies the message among those of the owner.
            value: The value.
            num_bytes: The memory that the value and the key take, beside that of a small value.
        """
        num_bytes += _BYTES_OF_VALUE
        if num_bytes > self._most_bytes or (owner, key) in self._values:
            return
        self._values[owner, key] = value, num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._most_bytes:
            _, (_, freed) = self._values.popitem(last=False)
            self._num_bytes -= freed

    def forget(self, owner: _Owner) -> None:
        """Drops all values of an owner."""
        for each in [each for each in self._values if each[0] == owner]:
            self._num_bytes -= self._values.pop(each)[1]
