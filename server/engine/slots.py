"""Assigns running sequences to rows of the buffers; the runner owns the rows' contents."""

from __future__ import annotations

from collections.abc import Iterable

from seq2seq_serve.server.engine.records import Move, Search, Sequence


class Slots:
    """The rows of the preallocated buffers.

    Owned by the scheduler. Invariant: the running sequences occupy rows 0..n-1 without a hole, the sequence
    at index i has `row == i`, and at most `num_reserved` sequences run. The same holds for the running
    requests and the rows of the memory, if the sequences of a request share one.

    Args:
        num_slots: The number of rows.
        shares_memory: Whether the sequences of a request share one row of the memory. Otherwise each has the
            row of the memory that has the number of its own row.
    """

    def __init__(self, num_slots: int, *, shares_memory: bool = False) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots}, and must be at least 1")
        self.num_slots = num_slots
        self.num_reserved = 0
        self.rows: tuple[Sequence, ...] = ()
        self.shares_memory = shares_memory
        self._in_memory: list[Search] = []  # by the row of the memory

    @property
    def num_free(self) -> int:
        """The number of rows that are not reserved."""
        return self.num_slots - self.num_reserved

    def reserve(self, count: int) -> None:
        """Reserve `count` slots for a request; a negative count returns them."""
        self.num_reserved += count
        assert 0 <= self.num_reserved <= self.num_slots

    def take_memory(self, search: Search) -> None:
        """Give a new request the first free row of the memory, if requests have one."""
        if self.shares_memory:
            search.memory_row = len(self._in_memory)
            self._in_memory.append(search)

    def return_memory(self, leavers: Iterable[Search]) -> tuple[Move, ...]:
        """Remove requests from the memory, and fill their rows from the end; returns as `remove`."""
        holes = {search.memory_row for search in leavers} - {None}
        num_left = len(self._in_memory) - len(holes)
        movers = [search for search in self._in_memory[num_left:] if search.memory_row not in holes]
        moves = []
        for hole in sorted(row for row in holes if row is not None and row < num_left):
            mover = movers.pop()
            assert mover.memory_row is not None
            moves.append(Move(mover.memory_row, hole, 0, mover.request.memory_length))
            mover.memory_row = hole
            self._in_memory[hole] = mover
        del self._in_memory[num_left:]
        return tuple(moves)

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
            memory_length = 0 if self.shares_memory else mover.memory_length
            moves.append(Move(mover.row, hole, mover.cache_length, memory_length))
            mover.row = hole
            rows[hole] = mover
        for sequence in leavers:
            sequence.row = None
        self.rows = tuple(rows)
        return tuple(moves)
