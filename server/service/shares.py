"""Bounds that callers share fairly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from seq2seq_serve.server.errors import Overloaded


class Shares:
    """What callers hold of something that is bounded.

    Owned by its user; used on the event loop only. A caller may hold what all others leave; beyond the bound,
    its own equal part of it.

    Args:
        limit: The amount that callers share.
        name: Describes what is held, with `{}` for its amount, such as "{} requests are open".

    Attributes:
        held: The amount by caller; those without any are not in it.
    """

    def __init__(self, limit: float, name: str) -> None:
        self.held = Counter[str]()
        self.limit = limit
        self._name = name

    @contextmanager
    def taken(self, caller: str, amount: int) -> Iterator[None]:
        """Counts an amount until the block ends; raises as `take`."""
        self.take(caller, amount)
        try:
            yield
        finally:
            self.give_back(caller, amount)

    def take(self, caller: str, amount: int, retry_after_seconds: float = 1.0) -> None:
        """Counts an amount until `give_back`.

        Raises:
            Overloaded: Too much is held, and the caller would have more than its part.
        """
        total, own = self.held.total(), self.held[caller]
        is_in_part = not total or own + amount <= self.limit // len(self.held.keys() | {caller})
        if total + amount > self.limit and not is_in_part:
            raise Overloaded(
                f"{self._name.format(total)}, {own} of them this caller's: the limit is {self.limit}, shared "
                "by the callers",
                retry_after_seconds=retry_after_seconds,
            )
        self.held[caller] += amount

    def give_back(self, caller: str, amount: int) -> None:
        """Ends the count of an amount."""
        self.held[caller] -= amount
        self.held += Counter()  # forgets callers without any
