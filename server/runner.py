"""Runs a bundle's graphs with ONNX Runtime, which no other module of the server imports.

Buffers are allocated once, on the device that runs the graphs, with a row a slot. A step binds the first n
rows by pointer and the graph writes in place: nothing is copied, and a binding made for n rows serves every
later step of n rows. What a tensor is for is read from its role in the manifest; the runner knows no model
kind.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from bundle import names
from bundle.manifest import Bundle, TensorSpec
from bundle.names import Axis, Precision, Role, Verb
from server.records import Array, Move, Request, Sequence

_log = logging.getLogger(__name__)

_CPU, _CUDA = "cpu", "cuda"
_PROVIDERS = {_CPU: "CPUExecutionProvider", _CUDA: "CUDAExecutionProvider"}
# fp32 and int8 graphs would run on CUDA only in part: their attention has no kernel there, and would silently
# run on the CPU. fp16 has no fast kernels on the CPU.
_PRECISIONS = {_CPU: (Precision.INT8, Precision.FP32), _CUDA: (Precision.FP16,)}


@dataclass(frozen=True)
class RunnerConfig:
    """How graphs are run.

    Attributes:
        provider: "cpu" or "cuda"; "auto" is CUDA where ONNX Runtime finds it and the bundle has its graphs.
        device_id: Which device of the provider.
        precision: None takes the fastest that the bundle has for the provider.
        num_threads: Of one graph's run; None is the CPUs that this process may use.
        memory_budget_bytes: Of all slots' cache and memory.
        max_slots: The most rows of a step, however large the budget.
        max_source_length: Tokens; None is the manifest's limit, a lower one saves memory.
        max_target_length: Tokens; None is the manifest's limit, a lower one saves memory.
    """

    provider: str = "auto"
    device_id: int = 0
    precision: Precision | None = None
    num_threads: int | None = None
    memory_budget_bytes: int = 1 << 30
    max_slots: int = 256
    max_source_length: int | None = None
    max_target_length: int | None = None

    def __post_init__(self) -> None:
        if self.provider not in ("auto", *_PROVIDERS):
            raise ValueError(f"provider is {self.provider!r}, and must be auto, {' or '.join(_PROVIDERS)}")
        for name in ("num_threads", "max_slots", "max_source_length", "max_target_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, and must be at least 1")


class _Buffers:
    """All tensors of one role, shape and element type, a row a slot, in one allocation `(G, N, …)`.

    Owned by the runner; never moves.
    """

    def __init__(self, specs: list[TensorSpec], shape: tuple[int, ...], device: str, device_id: int) -> None:
        self.index = {spec.name: i for i, spec in enumerate(specs)}
        self.dtype = np.dtype(specs[0].dtype)
        self.row_shape = shape[1:]
        self.shape = (len(specs), *shape)
        self.row_bytes = math.prod(self.row_shape) * self.dtype.itemsize
        self.tensor_bytes = self.row_bytes * shape[0]
        # The axis along which a row is only filled up to its length; None where rows are always full.
        axes = specs[0].axes
        capacities = (Axis.CACHE_CAPACITY, Axis.MEMORY_CAPACITY)
        self.live_axis = next((i for i, axis in enumerate(axes) if axis in capacities), None)
        self.role = specs[0].role
        # Zeros: a NaN in memory's padding would leak through a mask.
        zeros = np.zeros(self.shape, self.dtype)
        self.host: Array | None = None
        if device == _CPU:
            self.host = zeros
            self._base = zeros.ctypes.data
        else:
            self._value = ort.OrtValue.ortvalue_from_numpy(zeros, device, device_id)
            self._base = self._value.data_ptr()

    def pointer(self, name: str, row: int) -> int:
        return self._base + self.index[name] * self.tensor_bytes + row * self.row_bytes

    def move(self, move: Move) -> int:
        """Copy one row's live positions; returns the bytes copied."""
        assert self.host is not None
        live: list[slice] = []
        if self.live_axis is not None:
            length = move.cache_length if self.role is Role.CACHE else move.source_length
            live = [slice(None)] * (self.live_axis - 1) + [slice(length)]
        everything: Any = slice(None)
        rows = self.host[(everything, move.from_row, *live)]
        self.host[(everything, move.to_row, *live)] = rows
        return int(rows.nbytes)


class OnnxRunner:
    """The graphs of one bundle, and the rows that they work on.

    Owned by the engine; after construction used on its thread only. The sequence in slot i is row i of every
    buffer.

    Args:
        bundle: A checked bundle.
        config: Provider, device, precision, sizes.

    Raises:
        ValueError: The bundle has no graphs for the provider, or one slot does not fit the budget.
    """

    def __init__(self, bundle: Bundle, config: RunnerConfig) -> None:
        manifest = bundle.manifest
        self.provider, self.precision = _choose(bundle, config)
        self._device_id = config.device_id if self.provider == _CUDA else 0
        self._graphs = manifest.variants[self.precision].graphs
        self.max_source_length = _limit(
            "max_source_length", config.max_source_length, manifest.max_source_length
        )
        self.max_target_length = _limit(
            "max_target_length", config.max_target_length, manifest.max_target_length
        )
        self._sizes: dict[str, int] = {
            Axis.CACHE_CAPACITY: self.max_target_length,
            Axis.MEMORY_CAPACITY: self.max_source_length,
        }
        self.vocab_size = manifest.sizes["vocab_size"]
        self.start_id, self.eos_id = manifest.special_ids.decoder_start_id, manifest.special_ids.eos_id
        groups = self._groups()
        self.slot_bytes = sum(
            len(specs) * math.prod(self._row_shape(specs[0])) * np.dtype(specs[0].dtype).itemsize
            for specs in groups
        )
        self.num_slots = min(config.memory_budget_bytes // self.slot_bytes, config.max_slots)
        if self.num_slots < 1:
            raise ValueError(
                f"a slot takes {self.slot_bytes} bytes and the memory budget is "
                f"{config.memory_budget_bytes}: raise the budget, or lower max_source_length and "
                "max_target_length"
            )
        self._buffers: dict[str, _Buffers] = {}
        for specs in groups:
            shape = (self.num_slots, *self._row_shape(specs[0]))
            buffers = _Buffers(specs, shape, self.provider, self._device_id)
            self._buffers |= dict.fromkeys(buffers.index, buffers)
        self._groups_of_buffers = tuple(dict.fromkeys(self._buffers.values()))
        self._columns = _Columns(self.num_slots, self.vocab_size, self.provider, self._device_id)
        self._capacities = {
            names.CACHE_CAPACITY: np.array(self.max_target_length, np.int32),
            names.MEMORY_CAPACITY: np.array(self.max_source_length, np.int32),
        }
        num_threads = config.num_threads or len(os.sched_getaffinity(0))
        self._sessions = {
            verb: self._session(bundle.path / graph.file.file, num_threads)
            for verb, graph in self._graphs.items()
        }
        self._select = self._session(Path(str(files("server") / "selection" / "greedy.onnx")), 1)
        self._bindings: dict[int, tuple[ort.IOBinding, ort.IOBinding]] = {}
        self._rows: tuple[Sequence, ...] = ()

    def encode(self, first_row: int, requests: list[Request]) -> None:
        """Encode newcomers into the memory of the rows from `first_row` on."""
        lengths = np.array([request.source_length for request in requests], np.int32)
        feeds: dict[str, Array] = {names.SOURCE_LENGTHS: lengths}
        for spec in self._graphs[Verb.ENCODE].inputs:
            if spec.role is Role.SOURCE and spec.name != names.SOURCE_LENGTHS:
                feeds[spec.name] = _pad([request.sources[spec.name] for request in requests], spec.dtype)
        binding = self._bind(Verb.ENCODE, first_row, len(requests), feeds)
        self._sessions[Verb.ENCODE].run_with_iobinding(binding)

    def step(self, rows: tuple[Sequence, ...]) -> list[int]:
        """Feed every row its last token, and select its next one greedily."""
        n = len(rows)
        self._columns.fill(rows, is_same=rows is self._rows)
        self._rows = rows
        if n not in self._bindings:
            self._bindings[n] = self._bind_step(n)
        step, select = self._bindings[n]
        self._sessions[Verb.STEP].run_with_iobinding(step)
        self._select.run_with_iobinding(select)
        return self._columns.read_token_ids(n)

    def move(self, moves: Iterable[Move]) -> int:
        """Carry out moves in order; returns the bytes copied."""
        return sum(buffers.move(move) for move in moves for buffers in self._groups_of_buffers)

    def align(self, row: int, target_ids: list[int], source_length: int) -> Array:
        """The attention `(T, source_length)` of a finished row, whose memory is still in place.

        Args:
            row: Its slot.
            target_ids: What the decoder was fed, start token first.
            source_length: Of its source.
        """
        ids = np.array([target_ids], np.int64)
        feeds: dict[str, Array] = {
            names.TARGET_IDS: ids,
            names.LABEL_IDS: ids,
            names.SOURCE_LENGTHS: np.array([source_length], np.int32),
        }
        binding = self._bind(Verb.DECODE, row, 1, feeds)
        self._sessions[Verb.DECODE].run_with_iobinding(binding)
        index = [spec.name for spec in self._graphs[Verb.DECODE].outputs].index(names.ATTENTION)
        attention: Array = binding.get_outputs()[index].numpy()
        return attention[0, :, :source_length].copy()

    def _groups(self) -> list[list[TensorSpec]]:
        """The memory and cache tensors of all graphs, those of like shape together."""
        specs = {
            spec.name: spec
            for graph in self._graphs.values()
            for spec in (*graph.inputs, *(_without_out(output) for output in graph.outputs))
            if spec.role in (Role.MEMORY, Role.CACHE)
        }
        groups: dict[tuple[Any, ...], list[TensorSpec]] = {}
        for spec in specs.values():
            groups.setdefault((spec.role, spec.axes, spec.dtype), []).append(spec)
        return list(groups.values())

    def _row_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        return TensorSpec(spec.name, spec.dtype, spec.axes[1:], spec.role).shape(self._sizes)

    def _session(self, path: Path, num_threads: int) -> ort.InferenceSession:
        options = ort.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.force_spinning_stop", "1")
        provider: Any = _PROVIDERS[self.provider]
        if self.provider == _CUDA:
            provider = (provider, {"device_id": str(self._device_id)})
        session = ort.InferenceSession(path, options, providers=[provider])
        if session.get_providers()[0] != _PROVIDERS[self.provider]:
            raise ValueError(f"{path} would run on {session.get_providers()[0]} instead of {self.provider}")
        return session

    def _bind(self, verb: Verb, first_row: int, num_rows: int, feeds: Mapping[str, Array]) -> ort.IOBinding:
        """Bind a graph to `num_rows` rows from `first_row` on, and to host arrays."""
        binding = self._sessions[verb].io_binding()
        graph = self._graphs[verb]
        for spec in graph.inputs:
            if spec.name in self._buffers:
                buffers = self._buffers[spec.name]
                binding.bind_input(
                    spec.name,
                    self.provider,
                    self._device_id,
                    buffers.dtype,
                    (num_rows, *buffers.row_shape),
                    buffers.pointer(spec.name, first_row),
                )
            elif spec.name in feeds:
                binding.bind_cpu_input(spec.name, feeds[spec.name])
            elif spec.role is Role.CAPACITY:
                binding.bind_cpu_input(spec.name, self._capacities[spec.name])
            else:
                self._columns.bind_input(binding, spec.name, num_rows)
        for spec in graph.outputs:
            name = _without_out(spec).name
            if name in self._buffers:
                buffers = self._buffers[name]
                binding.bind_output(
                    spec.name,
                    self.provider,
                    self._device_id,
                    buffers.dtype,
                    (num_rows, *buffers.row_shape),
                    buffers.pointer(name, first_row),
                )
            elif spec.role is Role.LOGITS:
                self._columns.bind_logits_output(binding, num_rows)
            else:
                binding.bind_output(spec.name, _CPU)
        return binding

    def _bind_step(self, num_rows: int) -> tuple[ort.IOBinding, ort.IOBinding]:
        select = self._select.io_binding()
        self._columns.bind_selection(select, num_rows)
        return self._bind(Verb.STEP, 0, num_rows, {}), select


class _Columns:
    """What a step is fed and answers: one element, or one row of logits, a row.

    Owned by the runner. The selection writes its ids where the next step reads them.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: str, device_id: int) -> None:
        self._device, self._device_id = device, device_id
        self._vocab_size = vocab_size
        self._host: dict[str, Array] = {
            names.TOKEN_IDS: np.zeros(num_slots, np.int64),
            names.CACHE_LENGTHS: np.zeros(num_slots, np.int32),
            names.SOURCE_LENGTHS: np.ones(num_slots, np.int32),
        }
        self._values = {
            name: ort.OrtValue.ortvalue_from_numpy(array, device, device_id)
            for name, array in self._host.items()
        }
        self._logits = ort.OrtValue.ortvalue_from_shape_and_type(
            [num_slots, vocab_size], np.float32, device, device_id
        )

    def fill(self, rows: tuple[Sequence, ...], *, is_same: bool) -> None:
        """Write what the step of `rows` is fed; the same rows as last time only grew by a position."""
        n = len(rows)
        if is_same:
            self._host[names.CACHE_LENGTHS][:n] += 1
            self._write(names.CACHE_LENGTHS)
            return
        self._host[names.TOKEN_IDS][:n] = [sequence.next_token_id for sequence in rows]
        self._host[names.CACHE_LENGTHS][:n] = [sequence.cache_length for sequence in rows]
        self._host[names.SOURCE_LENGTHS][:n] = [sequence.source_length for sequence in rows]
        for name in self._host:
            self._write(name)

    def read_token_ids(self, num_rows: int) -> list[int]:
        array = self._host[names.TOKEN_IDS]
        if self._device != _CPU:
            array[:] = self._values[names.TOKEN_IDS].numpy()
        ids: list[int] = array[:num_rows].tolist()
        return ids

    def bind_input(self, binding: ort.IOBinding, name: str, num_rows: int) -> None:
        pointer, dtype = self._pointer(name), self._host[name].dtype
        binding.bind_input(name, self._device, self._device_id, dtype, (num_rows,), pointer)

    def bind_logits_output(self, binding: ort.IOBinding, num_rows: int) -> None:
        shape = (num_rows, self._vocab_size)
        binding.bind_output(
            names.LOGITS, self._device, self._device_id, np.float32, shape, self._logits.data_ptr()
        )

    def bind_selection(self, binding: ort.IOBinding, num_rows: int) -> None:
        shape = (num_rows, self._vocab_size)
        binding.bind_input(
            names.LOGITS, self._device, self._device_id, np.float32, shape, self._logits.data_ptr()
        )
        binding.bind_output(
            names.TOKEN_IDS,
            self._device,
            self._device_id,
            np.int64,
            (num_rows, 1),
            self._pointer(names.TOKEN_IDS),
        )

    def _pointer(self, name: str) -> int:
        on_host = self._device == _CPU
        return int(self._host[name].ctypes.data if on_host else self._values[name].data_ptr())

    def _write(self, name: str) -> None:
        if self._device != _CPU:
            self._values[name].update_inplace(self._host[name])


def usable_precisions(bundle: Bundle, provider: str = "auto") -> tuple[str, list[Precision]]:
    """The provider that would run a bundle here, and which of its precisions fit it, the fastest first.

    Raises:
        ValueError: ONNX Runtime does not have the provider, or the bundle has nothing for it.
    """
    available = [name for name, full in _PROVIDERS.items() if full in ort.get_available_providers()]
    held = list(bundle.manifest.variants)
    if provider == "auto":
        has_cuda = _CUDA in available and any(precision in held for precision in _PRECISIONS[_CUDA])
        provider = _CUDA if has_cuda else _CPU
    if provider not in available:
        raise ValueError(f"ONNX Runtime has no {provider} provider here; it has {', '.join(available)}")
    fitting = [precision for precision in _PRECISIONS[provider] if precision in held]
    if not fitting:
        takes = ", ".join(_PRECISIONS[provider])
        raise ValueError(f"the bundle has {', '.join(held)} graphs, and {provider} takes {takes}")
    return provider, fitting


def _choose(bundle: Bundle, config: RunnerConfig) -> tuple[str, Precision]:
    """The provider and precision to run, refusing by name what does not fit."""
    provider, fitting = usable_precisions(bundle, config.provider)
    if config.precision is None:
        return provider, fitting[0]
    if config.precision not in bundle.manifest.variants:
        held = ", ".join(bundle.manifest.variants)
        raise ValueError(f"the bundle has no {config.precision} graphs; it has {held}")
    if config.precision not in fitting:
        takes = ", ".join(_PRECISIONS[provider])
        raise ValueError(f"{config.precision} graphs do not run on {provider}, which takes {takes}")
    return provider, config.precision


def _limit(name: str, asked: int | None, manifest_limit: int) -> int:
    if asked is not None and asked > manifest_limit:
        raise ValueError(f"{name} is {asked}, and the model's limit is {manifest_limit}")
    return asked or manifest_limit


def _without_out(spec: TensorSpec) -> TensorSpec:
    """An output's twin among the inputs, where it has one."""
    return TensorSpec(names.buffer_of(spec.name), spec.dtype, spec.axes, spec.role)


def _pad(arrays: list[Array], dtype: str) -> Array:
    """Stack `(S, …)` arrays of different lengths into `(B, S, …)`, zeros to the right."""
    longest = max(map(len, arrays))
    padded = np.zeros((len(arrays), longest, *arrays[0].shape[1:]), dtype)
    for row, array in zip(padded, arrays, strict=True):
        row[: len(array)] = array
    return padded
