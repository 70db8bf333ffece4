"""The tensors with one row for each slot, on the device that runs the graphs.

They are allocated once and never moved, so that graphs can be bound to them by pointer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import zip_longest
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.manifest import TensorSpec
from seq2seq_serve.bundle.names import Axis, Role
from seq2seq_serve.kernels import copy_positions, move_on_cuda, write_to_cuda
from seq2seq_serve.server.engine.plan import Move
from seq2seq_serve.server.engine.request import NO_ADAPTER, Array
from seq2seq_serve.server.engine.state import Sequence
from seq2seq_serve.server.runner.device import OnnxDevice
from seq2seq_serve.server.system.threads import on_all

_SHARED_BYTES = 1 << 20  # from here on several threads copy faster than one
# The graph that moves rows copies words of int64. A thread of its kernel copies a whole row of the matrix
# that it sees, so short rows keep a GPU busy: copying a slot of `base` as one row took an H100 milliseconds.
_WORD_BYTES, _MOVED_BYTES = 8, 256

ROW_ROLES = (Role.MEMORY, Role.CACHE, Role.STATE)  # of tensors with one row for each slot

Copy = tuple[int, int, int, int]  # the row to read, the row to write, the first position, and how many
BindPointer = Callable[[Any, str, Any, tuple[int, ...], int], None]


def num_copies(role: Role) -> int:
    """Returns the number of buffers of a tensor: a step reads one buffer of a state and writes the other."""
    return 2 if role is Role.STATE else 1


class Buffers:
    """All tensors of one role, shape and element type in one allocation `(copies * G, N, …)`.

    Owned by the runner. G tensors, N slots. A state has two copies: a step reads the current copy and writes
    the other one, which then becomes the current copy. Everything else uses the current copy.

    Args:
        specs: The tensors, which differ in their names only.
        shape: The shape of one tensor: N, then the shape of a row.
        device: Holds the tensors.

    Attributes:
        capacity_axis: The axis of a row that is filled up to the row's length; None if rows are always full.
        copy: Index of the current copy.
    """

    def __init__(self, specs: tuple[TensorSpec, ...], shape: tuple[int, ...], device: OnnxDevice) -> None:
        self.index = {spec.name: i for i, spec in enumerate(specs)}
        self._element_type = specs[0].element_type
        self._row_shape = shape[1:]
        storage = np.dtype(specs[0].storage)
        self._row_bytes = math.prod(self._row_shape) * storage.itemsize
        self._num_rows = shape[0]
        self._tensor_bytes = self._num_rows * self._row_bytes
        self._device = device
        self._role = specs[0].role
        self.copy, self.num_copies = 0, num_copies(self._role)
        capacities = (Axis.CACHE_CAPACITY, Axis.MEMORY_CAPACITY)
        self.capacity_axis = next((axis for axis in specs[0].axes if axis in capacities), None)
        self._live_axis = specs[0].axes.index(self.capacity_axis) - 1 if self.capacity_axis else None
        # Zeros: a NaN in memory's padding would leak through a mask.
        num_tensors = self.num_copies * len(specs)
        self._storage = np.zeros((num_tensors, math.prod(shape)), storage)  # one row per tensor
        self._value, self._base = device.place(self._storage.reshape(num_tensors, *shape))
        if device.is_host:
            self._lay_out(self._row_shape)
        else:
            del self._storage
            if self._row_bytes % _WORD_BYTES:
                raise ValueError(f"a row takes {self._row_bytes} bytes, which {_WORD_BYTES} does not divide")
            self._mover = device.weightless("move")

    def fit(self, capacity: int, num_rows: int) -> None:
        """Change the room of each row on the host to `capacity` positions.

        The first `num_rows` rows keep their content. Rows without gaps between them are read faster.
        """
        assert self._live_axis is not None
        before = self._positions[:, :num_rows]
        row_shape = list(self._row_shape)
        row_shape[self._live_axis] = capacity
        self._lay_out(tuple(row_shape))
        after = self._positions[:, :num_rows]
        num_kept = min(before.shape[3], capacity)

        def keep(old: Array, new: Array) -> None:
            new[:, :, :num_kept] = old[:, :, :num_kept].copy()

        if num_rows:
            on_all(self._device.pool, keep, before, after)

    def _lay_out(self, row_shape: tuple[int, ...]) -> None:
        self._row_shape = row_shape
        self._row_bytes = math.prod(row_shape) * self._storage.itemsize
        assert self._num_rows * math.prod(row_shape) <= self._storage.shape[1]
        used = self._storage[:, : self._num_rows * math.prod(row_shape)]
        self._host = np.lib.stride_tricks.as_strided(
            used,
            (len(used), self._num_rows, *row_shape),
            (used.strides[0], *(np.empty((1, *row_shape), used.dtype).strides)),
        )
        self._positions = self._host.view()
        self._positions.shape = (*self._host.shape[:2], *self._parts_of(row_shape), -1)
        self._copies = np.split(self._positions, self.num_copies)
        num_threads = self._device.num_threads
        self._parts = [np.array_split(tensors, num_threads) for tensors in self._copies]  # one per thread

    def _parts_of(self, row_shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns the axes `(outer, positions)` of a row; one that is always full has one position."""
        axis = self._live_axis
        return (1, 1) if axis is None else (math.prod(row_shape[:axis]), row_shape[axis])

    def bind_input(self, binding: Any, name: str, first_row: int, num_rows: int) -> None:
        """Bind rows of the tensor `name` as a graph's input of that name."""
        pointer = self._pointer(name, first_row, self.copy)
        self._device.bind_input(binding, name, self._element_type, (num_rows, *self._row_shape), pointer)

    def bind_output(
        self, binding: Any, output: str, first_row: int, num_rows: int, *, swaps: bool = False
    ) -> None:
        """Bind rows of a tensor as the `output` that writes it; with `swaps` rows of its next copy."""
        pointer = self._pointer(names.buffer_of(output), first_row, self._next if swaps else self.copy)
        self._device.bind_output(binding, output, self._element_type, (num_rows, *self._row_shape), pointer)

    def swap(self) -> None:
        """Make the copy that a step wrote the current one."""
        self.copy = self._next

    @property
    def _next(self) -> int:
        return (self.copy + 1) % self.num_copies

    def move_all(self, moves: Iterable[Move]) -> int:
        """Carry out moves in order; returns the number of bytes copied.

        Only the live positions of a row are copied; a move without live positions in these tensors copies
        nothing. A device carries out several moves at once.
        """
        copies = self._copies_of(moves)
        if not self._device.is_host:
            return sum(self._move_on_device(batch) for batch in independent_batches(copies))
        if not copies:
            return 0
        its = np.array(copies, np.int64)
        position_bytes = self._row_bytes // self._positions.shape[3] * len(self.index)
        num_bytes: int = sum(count for *_, count in copies) * position_bytes
        if num_bytes < _SHARED_BYTES:
            copy_positions(self._copies[self.copy], its)
        else:
            on_all(self._device.pool, lambda part: copy_positions(part, its), self._parts[self.copy])
        return num_bytes

    def _copies_of(self, moves: Iterable[Move]) -> list[Copy]:
        """Returns what moves copy of these tensors, without those that do not change them."""
        if self._role is Role.STATE:
            return [(move.from_row, move.to_row, 0, 1) for move in moves]
        if self._role is Role.CACHE:
            copies = [
                (move.from_row, move.to_row, move.num_shared, move.cache_length - move.num_shared)
                for move in moves
            ]
        else:
            copies = [(move.from_row, move.to_row, 0, move.memory_length) for move in moves]
        copies = [copy for copy in copies if copy[3] > 0]
        return copies if self._live_axis is not None else [(*copy[:2], 0, 1) for copy in copies]

    def _move_on_device(self, copies: list[Copy]) -> int:
        """Carry out independent moves: by the project's own kernel, or whole rows by a graph."""
        num_tensors, moves = len(self.index), np.array(copies, np.int64)
        outer, positions = self._parts_of(self._row_shape)
        position_bytes = self._row_bytes // (outer * positions)
        strides = self._tensor_bytes, self._row_bytes, self._row_bytes // outer, position_bytes
        shape = num_tensors, self._num_rows, outer, positions
        first = self._base + self.copy * num_tensors * self._tensor_bytes
        if move_on_cuda(first, shape, strides, moves):
            return int(moves[:, 3].sum()) * position_bytes * outer * num_tensors
        width = math.gcd(self._row_bytes, _MOVED_BYTES)  # of the rows of a matrix of words
        first_rows = (self.copy * num_tensors + np.arange(num_tensors)) * self._num_rows  # (G,)
        parts = np.arange(self._row_bytes // width)
        from_parts, to_parts = (
            ((first_rows[:, None] + rows)[:, :, None] * len(parts) + parts).reshape(-1)
            for rows in (moves[:, 0], moves[:, 1])
        )
        matrix = self.num_copies * num_tensors * self._tensor_bytes // width, width // _WORD_BYTES
        binding = self._mover.io_binding()
        self._device.bind_input(binding, names.BUFFER, np.int64, matrix, self._base)
        binding.bind_cpu_input(names.FROM_ROWS, from_parts)
        binding.bind_cpu_input(names.TO_ROWS, to_parts.reshape(-1, 1))
        self._device.bind_output(binding, names.out(names.BUFFER), np.int64, matrix, self._base)
        self._mover.run_with_iobinding(binding)
        return len(copies) * num_tensors * self._row_bytes

    def _pointer(self, name: str, row: int, copy: int) -> int:
        tensor = copy * len(self.index) + self.index[name]
        return self._base + tensor * self._tensor_bytes + row * self._row_bytes


def independent_batches(copies: Iterable[Copy]) -> list[list[Copy]]:
    """Split copies, in order, into batches in which none writes a row that another one reads or writes."""
    batches: list[list[Copy]] = []
    read: set[int] = set()
    written: set[int] = set()
    for copy in copies:
        from_row, to_row = copy[:2]
        is_free = from_row not in written and to_row not in read | written
        if not batches or not is_free:
            batches.append([])
            read, written = set(), set()
        batches[-1].append(copy)
        read.add(from_row)
        written.add(to_row)
    return batches


class _Column(NamedTuple):
    """An input of a step with one element per row.

    Attributes:
        free: The value for an unused row; None is the row itself.
        of_rows: Returns the values for the sequences of a step.
        is_fixed: Whether a sequence keeps its value as long as the rows of a step are the same tuple.
    """

    dtype: Any
    free: int | None
    of_rows: Callable[[Collection[Sequence]], list[int]]
    is_fixed: bool = False


def _of_each(value: Callable[[Sequence], int]) -> Callable[[Collection[Sequence]], list[int]]:
    return lambda rows: list(map(value, rows))


# The inputs of a step that the server can fill, by name
COLUMNS = {
    names.TOKEN_IDS: _Column(np.int64, 0, _of_each(attrgetter("next_token_id"))),
    names.CACHE_LENGTHS: _Column(np.int32, 0, _of_each(attrgetter("cache_length"))),
    names.PREVIOUS_LENGTHS: _Column(np.int32, -1, _of_each(lambda row: row.cache_length - 1)),
    names.LAST_SOURCE_POSITIONS: _Column(
        np.int32, 0, _of_each(lambda row: row.memory_length - 1), is_fixed=True
    ),
    names.OWNERS: _Column(np.int64, 0, _of_each(attrgetter("search.memory_owner.row")), is_fixed=True),
    names.CACHE_ROWS: _Column(np.int64, None, _of_each(attrgetter("row")), is_fixed=True),
    names.ADAPTER_IDS: _Column(np.int64, NO_ADAPTER, _of_each(attrgetter("request.adapter")), is_fixed=True),
}


class Columns:
    """Inputs and outputs of a step with one element, or one row of logits or attention, for each row.

    Owned by the runner. The selection writes its ids into the input of the next step.

    Args:
        inputs: Names of the step's inputs with one element for each row.
        num_rows: The most rows of a step.
        vocab_size: V.
        device: Holds them.
        attention: The step's output of attention: `(B, memory)`, or `(B, hops, memory)`; None if it has none.
        memory_capacity: The largest number of positions of memory.
        never_ids: Token ids that are never selected.

    Attributes:
        rows: Those of the last step.
    """

    def __init__(
        self,
        inputs: Collection[str],
        num_rows: int,
        vocab_size: int,
        device: OnnxDevice,
        attention: TensorSpec | None = None,
        memory_capacity: int = 0,
        never_ids: Collection[int] = (),
    ) -> None:
        self.num_rows = num_rows
        self._attention_spec = attention
        self._device = device
        self._vocab_size = vocab_size
        self._never_ids = list(never_ids)
        self._is_never = np.zeros(vocab_size, np.bool_)
        self._is_never[self._never_ids] = True
        self._row_numbers = np.arange(num_rows)
        self.rows: tuple[Sequence, ...] | None = None
        self._free: dict[str, Array] = {}
        for name in inputs:
            column = COLUMNS[name]
            free = self._row_numbers if column.free is None else column.free
            self._free[name] = np.full(num_rows, free, column.dtype)
        self._host = {name: free.copy() for name, free in self._free.items()}
        # On the host, the step itself adds one to the previous lengths.
        counted = [names.CACHE_LENGTHS] if device.is_host else [names.CACHE_LENGTHS, names.PREVIOUS_LENGTHS]
        self._lengths = [self._host[name] for name in counted if name in self._host]
        self._values, self._pointers = dict[str, Any](), dict[str, int]()
        for name, array in self._host.items():
            self._values[name], self._pointers[name] = device.place(array)
        self._logits, self._logits_pointer = device.place(np.zeros((num_rows, vocab_size), np.float32))
        # The host allocates memory only for the rows that are used.
        penalties = np.zeros((1 + num_rows, vocab_size), np.float32)
        self._penalties, self._penalties_pointer = device.place(penalties)
        if not device.is_host:
            self._writer = device.weightless("write")
        if attention is not None:
            weights = np.zeros(self._attention_shape(num_rows, memory_capacity), np.float32)
            self._attention, self._attention_pointer = device.place(weights)

    @property
    def has_attention(self) -> bool:
        """Whether a step computes attention."""
        return self._attention_spec is not None

    def fill(self, rows: tuple[Sequence, ...], *, have_grown: bool) -> None:
        """Write the inputs of a step of `rows`.

        Columns that are fixed are not written again for the tuple of the step before. If its rows
        `have_grown`, each by exactly the position that this step selected, their lengths are all that is
        written. Of another tuple, simple rows that were in the same places are not written again, either.
        """
        before, self.rows = self.rows, None
        is_known, num_rows = rows is before, len(rows)
        if have_grown:
            for lengths in self._lengths:
                lengths[:num_rows] += 1
        if have_grown and is_known:
            if names.CACHE_LENGTHS in self._host:
                self._write(names.CACHE_LENGTHS)
            self.rows = rows
            return
        places: slice | list[int] = slice(num_rows)
        written: Collection[Sequence] = rows
        if have_grown and before is not None:
            pairs = enumerate(zip_longest(rows, before[:num_rows]))
            places = [place for place, (row, other) in pairs if row is not other or not row.num_simple]
            written = [rows[place] for place in places]
        for name, array in self._host.items():
            column = COLUMNS[name]
            if is_known and column.is_fixed:
                continue
            array[places] = column.of_rows(written)
            # A captured step also computes the rows after them. These write to slots that no request owns,
            # and their lengths stay below those of the running rows.
            array[num_rows:] = self._free[name][num_rows:]
            self._write(name)
        self.rows = rows

    def pick(self, num_rows: int) -> None:
        """On the host, select the most probable id of each row; of equal ones, the smallest.

        The id is -1 if some logits of the row are NaN, as in `QuantizedChoice`.
        """
        token_ids = self._host[names.TOKEN_IDS][:num_rows]
        self._logits[:num_rows].argmax(axis=1, out=token_ids)  # the first NaN if there is one
        best = self._logits[self._row_numbers[:num_rows], token_ids]
        if self._never_ids:
            # A trained model rarely prefers one of them, so their logits are not changed before.
            for row in np.flatnonzero(self._is_never[token_ids]):
                logits = self._logits[row].copy()
                logits[self._never_ids] = -math.inf
                token_ids[row] = logits.argmax()
        if math.isnan(best.dot(best)):  # takes less time than to look at each
            token_ids[np.isnan(best)] = -1

    def read_token_ids(self, num_rows: int) -> list[int]:
        """Returns the selected ids."""
        array = self._host[names.TOKEN_IDS]
        if not self._device.is_host:
            array[:] = self._values[names.TOKEN_IDS].numpy()
        ids: list[int] = array[:num_rows].tolist()
        return ids

    def bind_attention(self, binding: Any, num_rows: int, capacity: int) -> None:
        """Bind the beginning of the attention's memory as a step's output, with `capacity` positions."""
        shape, pointer = self._attention_shape(num_rows, capacity), self._attention_pointer
        self._device.bind_output(binding, names.ATTENTION, np.float32, shape, pointer)

    def read_attention(self, num_rows: int, capacity: int) -> Array:
        """Returns the attention `(num_rows, …, capacity)` that the last step wrote."""
        array = self._attention if self._device.is_host else self._attention.numpy()
        shape = self._attention_shape(num_rows, capacity)
        weights: Array = array.reshape(-1)[: math.prod(shape)].reshape(shape)
        return weights

    def _attention_shape(self, num_rows: int, capacity: int) -> tuple[int, ...]:
        assert self._attention_spec is not None
        return self._attention_spec.shape({Axis.BATCH: num_rows, Axis.MEMORY_CAPACITY: capacity})

    def write_token_ids(self, token_ids: list[int]) -> None:
        """Replace the ids that the next step is fed; before, they are the most probable ones."""
        self._host[names.TOKEN_IDS][: len(token_ids)] = token_ids
        self._write(names.TOKEN_IDS)

    def bind_input(self, binding: Any, name: str, num_rows: int) -> None:
        """Bind the column `name` as a graph's input of that name."""
        dtype = self._host[name].dtype
        self._device.bind_input(binding, name, dtype, (num_rows,), self._pointers[name])

    def bind_output(self, binding: Any, spec: TensorSpec, num_rows: int) -> None:
        """Bind the next step's input as the graph's output `spec`, which writes it."""
        pointer = self._pointers[names.buffer_of(spec.name)]
        shape = spec.shape({Axis.BATCH: num_rows})
        self._device.bind_output(binding, spec.name, spec.element_type, shape, pointer)

    def bind_logits(
        self, bind: BindPointer, binding: Any, num_rows: int, first_row: int = 0, name: str = names.LOGITS
    ) -> None:
        """Bind the logits by `bind`: the device's `bind_output` for a step, `bind_input` for a selection."""
        pointer = self._logits_pointer + first_row * self._vocab_size * np.dtype(np.float32).itemsize
        bind(binding, name, np.float32, (num_rows, self._vocab_size), pointer)

    def write_penalties(self, row: int, penalties: Mapping[int, float]) -> None:
        """Write the penalties of a request into a row; `row` is at least 1, because row 0 stays zero."""
        values = np.zeros((1, self._vocab_size), np.float32)
        values[0, list(penalties)] = list(penalties.values())
        if self._device.is_host:
            self._penalties[row] = values[0]
            return
        if write_to_cuda(self._penalties_pointer + row * values.nbytes, values):
            return
        binding = self._writer.io_binding()
        self.bind_penalties(self._device.bind_input, binding, names.BUFFER)
        binding.bind_cpu_input(names.TO_ROWS, np.array([[row]]))
        binding.bind_cpu_input(names.VALUES, values)
        self.bind_penalties(self._device.bind_output, binding, names.out(names.BUFFER))
        self._writer.run_with_iobinding(binding)

    def bind_selected(self, binding: Any, num_rows: int, name: str) -> None:
        """Bind the ids of the next step as the output `name` of a graph that selects one for each row."""
        pointer = self._pointers[names.TOKEN_IDS]
        self._device.bind_output(binding, name, np.int64, (num_rows, 1), pointer)

    def bind_penalties(self, bind: BindPointer, binding: Any, name: str) -> None:
        """Bind all rows of penalties as the graph's input or output `name`."""
        shape = (1 + self.num_rows, self._vocab_size)
        bind(binding, name, np.float32, shape, self._penalties_pointer)

    def _write(self, name: str) -> None:
        if not self._device.is_host:
            self._values[name].update_inplace(self._host[name])
