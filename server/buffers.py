"""The tensors with one row for each slot, on the device that runs the graphs.

They are allocated once and never moved, so that graphs can be bound to them by pointer. This module does not
import ONNX Runtime: a `Device` does what must be done there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import numpy as np

from bundle import names
from bundle.manifest import TensorSpec
from bundle.names import Axis, Role
from server.records import Array, Move, Sequence

_SHARED_BYTES = 1 << 20  # what several threads copy sooner than one
_MOVED_BYTES = 8  # the graph that moves rows copies words of int64

BindPointer = Callable[[Any, str, Any, tuple[int, ...], int], None]


class Device(Protocol):
    """Where buffers lie and graphs run.

    Attributes:
        is_host: Whether its memory is the process's own, so that numpy may read and write it.
        num_threads: Number of CPU threads that may be used.
        pool: A pool of that many threads, for work outside of graphs.
    """

    is_host: bool
    num_threads: int
    pool: ThreadPoolExecutor

    def value(self, array: Array) -> Any:
        """A copy of `array` on the device, with `data_ptr`, `numpy` and `update_inplace`."""

    def bind_input(self, binding: Any, name: str, dtype: Any, shape: tuple[int, ...], pointer: int) -> None:
        """Bind memory of the device as an input."""

    def bind_output(self, binding: Any, name: str, dtype: Any, shape: tuple[int, ...], pointer: int) -> None:
        """Bind memory of the device as an output."""

    def bind_new_output(self, binding: Any, name: str) -> None:
        """Let the run allocate an output, on the device."""

    def weightless(self, name: str) -> Any:
        """Creates a session of one of the graphs that come with the server."""


class Buffers:
    """All tensors of one role, shape and element type in one allocation `(G, N, …)`.

    Owned by the runner. G tensors, N slots.

    Args:
        specs: The tensors; alike but for their names.
        shape: Of one tensor: N, then the shape of a row.
        device: Where they lie.

    Attributes:
        capacity_axis: The axis of a row that is filled only up to the row's length; None where rows are full.
    """

    def __init__(self, specs: tuple[TensorSpec, ...], shape: tuple[int, ...], device: Device) -> None:
        self.index = {spec.name: i for i, spec in enumerate(specs)}
        self._element_type = specs[0].element_type
        self._row_shape = shape[1:]
        storage = np.dtype(specs[0].storage)
        self._row_bytes = math.prod(self._row_shape) * storage.itemsize
        self._num_rows = shape[0]
        self._tensor_bytes = self._num_rows * self._row_bytes
        self._device = device
        self._is_cache = specs[0].role is Role.CACHE
        capacities = (Axis.CACHE_CAPACITY, Axis.MEMORY_CAPACITY)
        self.capacity_axis = next((axis for axis in specs[0].axes if axis in capacities), None)
        self._live_axis = specs[0].axes.index(self.capacity_axis) - 1 if self.capacity_axis else None
        # Zeros: a NaN in memory's padding would leak through a mask.
        self._storage = np.zeros((len(specs), math.prod(shape)), storage)  # a row a tensor
        if device.is_host:
            self._base = int(self._storage.ctypes.data)
            self._lay_out(self._row_shape)
        else:
            self._value = device.value(self._storage.reshape(len(specs), *shape))
            self._base = int(self._value.data_ptr())
            del self._storage
            if self._row_bytes % _MOVED_BYTES:
                raise ValueError(f"a row takes {self._row_bytes} bytes, no multiple of {_MOVED_BYTES}")
            self._mover = device.weightless("move")

    def fit(self, capacity: int, num_rows: int) -> None:
        """Lay out the rows anew, on the host, with room for `capacity` positions each.

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

        list(self._device.pool.map(keep, before, after))

    def _lay_out(self, row_shape: tuple[int, ...]) -> None:
        self._row_shape = row_shape
        self._row_bytes = math.prod(row_shape) * self._storage.itemsize
        used = self._storage[:, : self._num_rows * math.prod(row_shape)]
        self._host = np.lib.stride_tricks.as_strided(
            used,
            (len(used), self._num_rows, *row_shape),
            (used.strides[0], *(np.empty((1, *row_shape), used.dtype).strides)),
        )
        axis = self._live_axis
        outer, positions = (1, 1) if axis is None else (math.prod(row_shape[:axis]), row_shape[axis])
        # (G, N, outer, positions, inner); a row that is always full is one position.
        self._positions = self._host.view()
        self._positions.shape = (*self._host.shape[:2], outer, positions, -1)
        self._parts = np.array_split(self._positions, self._device.num_threads)  # what each thread moves

    def bind_input(self, binding: Any, name: str, first_row: int, num_rows: int) -> None:
        """Bind rows of the tensor `name` as a graph's input of that name."""
        pointer = self._pointer(name, first_row)
        self._device.bind_input(binding, name, self._element_type, (num_rows, *self._row_shape), pointer)

    def bind_output(self, binding: Any, output: str, first_row: int, num_rows: int) -> None:
        """Bind rows of the tensor that a graph writes `output` to, as that output."""
        pointer = self._pointer(names.buffer_of(output), first_row)
        self._device.bind_output(binding, output, self._element_type, (num_rows, *self._row_shape), pointer)

    def move_all(self, moves: Iterable[Move]) -> int:
        """Carry out moves in order; returns the bytes copied.

        The host copies the live positions of a row; a device copies whole rows, several moves at once. A move
        without live positions in these tensors copies nothing.
        """
        if not self._device.is_host:
            touching = [move for move in moves if self._live(move)]
            return sum(self._move_on_device(batch) for batch in independent_batches(touching))
        copies = [(move.from_row, move.to_row, live) for move in moves if (live := self._live(move))]
        position_bytes = self._row_bytes // self._positions.shape[3] * len(self.index)
        num_bytes: int = sum(live.stop - live.start for _, _, live in copies) * position_bytes
        if num_bytes < _SHARED_BYTES:
            _copy_rows(self._positions, copies)
        else:
            list(self._device.pool.map(lambda part: _copy_rows(part, copies), self._parts))
        return num_bytes

    def _live(self, move: Move) -> slice | None:
        """The positions that a move copies; None where it leaves these tensors as they are."""
        start, stop = (move.num_shared, move.cache_length) if self._is_cache else (0, move.source_length)
        if start >= stop:
            return None
        return slice(start, stop) if self._live_axis is not None else slice(0, 1)

    def _move_on_device(self, moves: list[Move]) -> int:
        """Copy rows of all tensors at once, as rows of one matrix of words, whatever the element type."""
        first_rows = np.arange(len(self.index))[:, None] * self._num_rows  # (G, 1)
        from_rows = (first_rows + [move.from_row for move in moves]).ravel()  # (G*moves,)
        to_rows = (first_rows + [move.to_row for move in moves]).reshape(-1, 1)
        shape = (len(self.index) * self._num_rows, self._row_bytes // _MOVED_BYTES)
        binding = self._mover.io_binding()
        self._device.bind_input(binding, names.BUFFER, np.int64, shape, self._base)
        binding.bind_cpu_input(names.FROM_ROWS, from_rows)
        binding.bind_cpu_input(names.TO_ROWS, to_rows)
        self._device.bind_output(binding, names.out(names.BUFFER), np.int64, shape, self._base)
        self._mover.run_with_iobinding(binding)
        return len(from_rows) * self._row_bytes

    def _pointer(self, name: str, row: int) -> int:
        return self._base + self.index[name] * self._tensor_bytes + row * self._row_bytes


def _copy_rows(tensors: Array, copies: list[tuple[int, int, slice]]) -> None:
    """Copy positions of one row to another, in order; numpy lets other threads run meanwhile."""
    for from_row, to_row, live in copies:
        tensors[:, to_row, :, live] = tensors[:, from_row, :, live]


def independent_batches(moves: Iterable[Move]) -> list[list[Move]]:
    """Split moves, in order, into batches in which no row is written that another move reads or writes."""
    batches: list[list[Move]] = []
    read: set[int] = set()
    written: set[int] = set()
    for move in moves:
        is_free = move.from_row not in written and move.to_row not in read | written
        if not batches or not is_free:
            batches.append([])
            read, written = set(), set()
        batches[-1].append(move)
        read.add(move.from_row)
        written.add(move.to_row)
    return batches


class _Column(NamedTuple):
    """An input of a step.

    Attributes:
        free: The value for a row that nobody uses.
        of_row: The value for a row.
    """

    dtype: Any
    free: int
    of_row: Callable[[Sequence], int]


_COLUMNS = {
    names.TOKEN_IDS: _Column(np.int64, 0, attrgetter("next_token_id")),
    names.CACHE_LENGTHS: _Column(np.int32, 0, attrgetter("cache_length")),
    names.PREVIOUS_LENGTHS: _Column(np.int32, -1, lambda row: row.cache_length - 1),
    names.LAST_SOURCE_POSITIONS: _Column(np.int32, 0, lambda row: row.source_length - 1),
}


class Columns:
    """Inputs and outputs of a step with one element, or one row of logits, for each row.

    Owned by the runner. The selection writes its ids where the next step reads them.

    Args:
        inputs: Names of the step's inputs with one element for each row.
        num_slots: Rows that there are buffers for.
        vocab_size: V.
        device: Where they lie.
    """

    def __init__(
        self,
        inputs: Collection[str],
        num_slots: int,
        vocab_size: int,
        device: Device,
    ) -> None:
        self.num_slots = num_slots
        self._device = device
        self._vocab_size = vocab_size
        self._is_counted_by_step = names.PREVIOUS_LENGTHS in inputs
        self._host: dict[str, Array] = {
            name: np.full(num_slots, _COLUMNS[name].free, _COLUMNS[name].dtype) for name in inputs
        }
        self._logits: Any = np.zeros((num_slots, vocab_size), np.float32)
        # A host gives memory to rows in use only.
        self._penalties: Any = np.zeros((1 + num_slots, vocab_size), np.float32)
        if device.is_host:
            self._pointers = {name: int(array.ctypes.data) for name, array in self._host.items()}
            self._logits_pointer = int(self._logits.ctypes.data)
            self._penalties_pointer = int(self._penalties.ctypes.data)
        else:
            self._values = {name: device.value(array) for name, array in self._host.items()}
            self._pointers = {name: int(value.data_ptr()) for name, value in self._values.items()}
            self._logits = device.value(self._logits)
            self._logits_pointer = int(self._logits.data_ptr())
            self._penalties = device.value(self._penalties)
            self._penalties_pointer = int(self._penalties.data_ptr())
            self._writer = device.weightless("write")

    def fill(self, rows: tuple[Sequence, ...], *, is_same: bool) -> None:
        """Write the inputs of a step of `rows`.

        Where they are the rows of the step before, each has only become longer by one position.
        """
        if is_same:
            if not self._is_counted_by_step:
                self._host[names.CACHE_LENGTHS][: len(rows)] += 1
                self._write(names.CACHE_LENGTHS)
            return
        for name, array in self._host.items():
            column = _COLUMNS[name]
            array[: len(rows)] = list(map(column.of_row, rows))
            # A step may compute the rows after them, too. They write to slots that no request owns, and their
            # lengths stay below those of the others.
            array[len(rows) :] = column.free
            self._write(name)

    def read_token_ids(self, num_rows: int) -> list[int]:
        """The selected ids."""
        array = self._host[names.TOKEN_IDS]
        if not self._device.is_host:
            array[:] = self._values[names.TOKEN_IDS].numpy()
        ids: list[int] = array[:num_rows].tolist()
        return ids

    def write_token_ids(self, token_ids: list[int]) -> None:
        """Replace the ids that the next step is fed, which are the most probable ones."""
        self._host[names.TOKEN_IDS][: len(token_ids)] = token_ids
        self._write(names.TOKEN_IDS)

    def bind_input(self, binding: Any, name: str, num_rows: int) -> None:
        """Bind a column as a graph's input of that name."""
        dtype = self._host[name].dtype
        self._device.bind_input(binding, name, dtype, (num_rows,), self._pointers[name])

    def bind_output(self, binding: Any, spec: TensorSpec, num_rows: int) -> None:
        """Bind a column as the output that a graph writes the next step's input to."""
        pointer = self._pointers[names.buffer_of(spec.name)]
        shape = spec.shape({Axis.BATCH: num_rows})
        self._device.bind_output(binding, spec.name, spec.element_type, shape, pointer)

    def bind_logits(self, bind: BindPointer, binding: Any, num_rows: int, first_row: int = 0) -> None:
        """Bind the logits, with the device's `bind_output` for a step and `bind_input` for a selection."""
        pointer = self._logits_pointer + first_row * self._vocab_size * np.dtype(np.float32).itemsize
        bind(binding, names.LOGITS, np.float32, (num_rows, self._vocab_size), pointer)

    def write_penalties(self, row: int, penalties: Mapping[int, float]) -> None:
        """Write the penalties of a request into a row from 1 on; row 0 stays zero."""
        values = np.zeros((1, self._vocab_size), np.float32)
        values[0, list(penalties)] = list(penalties.values())
        if self._device.is_host:
            self._penalties[row] = values[0]
            return
        binding = self._writer.io_binding()
        self._bind_penalties(self._device.bind_input, binding, names.BUFFER)
        binding.bind_cpu_input(names.TO_ROWS, np.array([[row]]))
        binding.bind_cpu_input(names.VALUES, values)
        self._bind_penalties(self._device.bind_output, binding, names.out(names.BUFFER))
        self._writer.run_with_iobinding(binding)

    def bind_penalties(self, binding: Any) -> None:
        """Bind all rows of penalties as the selection's input."""
        self._bind_penalties(self._device.bind_input, binding, names.PENALTIES)

    def bind_selected(self, binding: Any, num_rows: int) -> None:
        """Bind the ids of the next step as the selection's output."""
        pointer = self._pointers[names.TOKEN_IDS]
        self._device.bind_output(binding, names.TOKEN_IDS, np.int64, (num_rows, 1), pointer)

    def _bind_penalties(self, bind: BindPointer, binding: Any, name: str) -> None:
        shape = (1 + self.num_slots, self._vocab_size)
        bind(binding, name, np.float32, shape, self._penalties_pointer)

    def _write(self, name: str) -> None:
        if not self._device.is_host:
            self._values[name].update_inplace(self._host[name])
