"""Assigns running sequences to rows of the buffers; the runner owns the rows' contents."""

from __future__ import annotations

from collections.abc import Iterable

from seq2seq_serve.server.engine.records import Move, Sequence


class Slots:
    """The rows of the preallocated buffers.

    Owned by the scheduler. Invariant: the running sequences occupy rows 0..n-1 without a hole, the sequence
    at index i has `row == i`, and at most `num_reserved` sequences run.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots}, and must be at least 1")
        self.num_slots = num_slots
        self.num_reserved = 0
        self.rows: tuple[Sequence, ...] = ()

    @property
    def num_free(self) -> int:
        """The number of rows that are not reserved."""
        return self.num_slots - self.num_reserved

    def reserve(self, count: int) -> None:
        """Reserve `count` slots for a request; a negative count returns them."""
        self.num_reserved += count
        assert 0 <= self.num_reserved <= self.num_slots

    def add(self, newcomers: Iterable[Sequence]) -> None:
        """Give newcomers the first free rows, in order. Without newcomers `rows` stays the same object."""
        newcomers = tuple(newcomers)
        assert len(self.rows) + len(newcomers) <= self.num_reserved
        for row, sequence in enumerate(newcomers, len(self.rows)):
            assert sequence.row is None
            sequence.row = row
        self.rows += newcomers

    def remove(self, leavers: Iterable[Sequence]) -> tuple[Move, ...]:
        """Remove sequences, and fill their rows from the end.

        Returns:
            The fewest moves that close the holes; they read and write different rows.
        """
        holes = {sequence.row for sequence in leavers}
        if not holes:
            return ()
        num_left = len(self.rows) - len(holes)
        rows = list(self.rows[:num_left])
        movers = (sequence for sequence in self.rows[num_left:] if sequence.row not in holes)
        moves = []
        for hole, mover in zip(
            sorted(row for row in holes if row is not None and row < num_left), movers, strict=True
        ):
            assert mover.row is not None
            moves.append(Move(mover.row, hole, mover.cache_length, mover.memory_length))
            mover.row = hole
            rows[hole] = mover
        for sequence in leavers:
            sequence.row = None
        self.rows = tuple(rows)
        return tuple(moves)
