"""Bounds that callers share fairly."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Self

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
        self._waiting: dict[Room, asyncio.Future[None]] = {}  # in the order in which they came
        self._beyond: Room | None = None

    def take(self, caller: str, amount: int, retry_after_seconds: float = 1.0) -> Room:
        """Counts an amount until the room is closed.

        Raises:
            Overloaded: Too much is held, and the caller would have more than its part.
        """
        if not self._has_room(caller, amount):
            total, own = self.held.total(), self.held[caller]
            raise Overloaded(
                f"{self._name.format(total)}, {own} of them this caller's: the limit is {self.limit}, shared "
                "by the callers",
                retry_after_seconds=retry_after_seconds,
            )
        return self.add(caller, amount)

    def add(self, caller: str, amount: int) -> Room:
        """Counts an amount as `take`, however much is held."""
        if amount:
            self.held[caller] += amount
        return Room(self, caller, amount)

    async def wait(self, caller: str, amount: int) -> Room:
        """Counts an amount as soon as there is room.

        The first one that waits does not need room if no other one is beyond the bound, so that it comes to
        its turn however large it is, and however much others hold.
        """
        if self._has_room(caller, amount):
            return self.add(caller, amount)
        room = Room(self, caller, amount)
        ready = self._waiting[room] = asyncio.get_running_loop().create_future()
        self._start_waiting()
        try:
            await ready
        except asyncio.CancelledError:
            if self._waiting.pop(room, None) is None:  # it has just been counted
                room.close()
            raise
        return room

    def _give_back(self, room: Room, amount: int) -> None:
        self.held[room.caller] -= amount
        self.held += Counter()  # forgets callers without any
        if self._beyond is room and not room.amount:
            self._beyond = None
        self._start_waiting()

    def _has_room(self, caller: str, amount: int) -> bool:
        total, own = self.held.total(), self.held[caller]
        is_in_part = not total or own + amount <= self.limit // len(self.held.keys() | {caller})
        return total + amount <= self.limit or is_in_part

    def _start_waiting(self) -> None:
        """Counts what has waited and has room now, in order."""
        for room, ready in list(self._waiting.items()):
            if not self._has_room(room.caller, room.amount):
                if self._beyond is not None:
                    continue
                self._beyond = room
            del self._waiting[room]
            self.held[room.caller] += room.amount
            if not ready.done():  # otherwise its caller leaves, and closes it
                ready.set_result(None)


class Room:
    """An amount that is counted until `close`, or the end of a block. Owned by its user.

    Attributes:
        caller: The name of the caller.
        amount: What is counted now.
    """

    def __init__(self, shares: Shares, caller: str, amount: int) -> None:
        self._shares = shares
        self.caller = caller
        self.amount = amount

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def grow(self, amount: int) -> None:
        """Counts more from now on, or as much.

        Raises:
            Overloaded: As `Shares.take`; it counts as before then.
        """
        if amount > self.amount:
            self._shares.take(self.caller, amount - self.amount)
            self.amount = amount

    def shrink(self, amount: int) -> None:
        """Counts less from now on, or as much."""
        before, self.amount = self.amount, min(amount, self.amount)
        self._shares._give_back(self, before - self.amount)

    def close(self) -> None:
        """Ends the count."""
        self.shrink(0)
