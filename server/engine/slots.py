"""Assigns running sequences to rows of the buffers; the runner owns the rows' contents."""

from __future__ import annotations

from collections.abc import Iterable

from seq2seq_serve.server.engine.plan import Move
from seq2seq_serve.server.engine.state import Sequence


class Slots:
    """The rows of the preallocated buffers.

    Owned by the scheduler. Invariant: the running sequences occupy rows 0..n-1 without a hole, the sequence
    at index i has `row == i`, no more sequences run than slots are reserved, and their rows and keepers stay
    while `rows` is the same tuple.

    Args:
        num_slots: The number of rows.
        shares_memory: Whether the memory of a request is valid in its owner's row only.

    Attributes:
        num_free: The number of slots that are not reserved.
    """

    def __init__(self, num_slots: int, *, shares_memory: bool = False) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots}, and must be at least 1")
        self.num_slots = num_slots
        self.shares_memory = shares_memory
        self.num_free = num_slots
        self.rows: tuple[Sequence, ...] = ()

    def reserve(self, count: int) -> None:
        """Reserve `count` slots for a request; a negative count returns them."""
        self.num_free -= count
        assert 0 <= self.num_free <= self.num_slots

    def add(self, newcomers: Iterable[Sequence]) -> None:
        """Give newcomers the first free rows, in order. Without newcomers `rows` stays the same object."""
        newcomers = tuple(newcomers)
        assert len(self.rows) + len(newcomers) + self.num_free <= self.num_slots
        for row, sequence in enumerate(newcomers, len(self.rows)):
            assert sequence.row is None
            sequence.row = row
        self.rows += newcomers

    def remove(self, leavers: Iterable[Sequence]) -> tuple[Move, ...]:
        """Remove sequences, and fill their rows from the end.

        Returns:
            The fewest moves that close the holes; they read and write different rows. Before them, the moves
            by which keepers that leave hand their memory over.
        """
        leavers = tuple(leavers)
        moves = [move for leaver in leavers if (move := self._hand_over(leaver))]
        holes = {sequence.row for sequence in leavers}
        if not holes:
            return ()
        num_left = len(self.rows) - len(holes)
        rows = list(self.rows[:num_left])
        movers = (sequence for sequence in self.rows[num_left:] if sequence.row not in holes)
        for hole, mover in zip(
            sorted(row for row in holes if row is not None and row < num_left), movers, strict=True
        ):
            assert mover.row is not None
            has_memory = not self.shares_memory or mover.search.memory_owner is mover
            memory_length = mover.memory_length if has_memory else 0
            moves.append(Move(mover.row, hole, mover.cache_length, memory_length))
            mover.row = hole
            rows[hole] = mover
        for sequence in leavers:
            sequence.row = None
        self.rows = tuple(rows)
        return tuple(moves)

    def _hand_over(self, leaver: Sequence) -> Move | None:
        """Give the memory of a request to another row, if its owner leaves; returns the copy."""
        search = leaver.search
        if search.memory_owner is not leaver or not search.rows:
            return None
        owner = search.memory_owner = search.rows[0]
        if not self.shares_memory:
            return None
        assert leaver.row is not None
        assert owner.row is not None
        return Move(leaver.row, owner.row, cache_length=0, memory_length=owner.memory_length)
