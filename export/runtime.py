"""A simple runner of a bundle's graphs, with which the export proves the files that will be served."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import onnxruntime as ort

from seq2seq_serve import kernels
from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.adapters import Places, Weights
from seq2seq_serve.bundle.manifest import AdaptedMap, GraphSpec, TensorSpec
from seq2seq_serve.bundle.names import Axis, Role, Verb
from seq2seq_serve.export.graphs.base import Graph
from seq2seq_serve.training.data.sources import TOKENS, Array, Inputs, SourceKind, pad_arrays

_HOST = "cpu"
_DEVICES = {"CPUExecutionProvider": _HOST, "CUDAExecutionProvider": "cuda"}


@dataclass(frozen=True)
class Sources:
    """The padded sources of a batch of requests.

    Attributes:
        feeds: The arrays (B, …) of `encode`, by the names of its inputs.
        lengths: The positions of memory of each row, (B,) int32.
    """

    feeds: dict[str, Array]
    lengths: Array

    @classmethod
    def of(cls, rows: Sequence[Inputs], kind: SourceKind, specs: Sequence[TensorSpec]) -> Self:
        """Pad the sources of requests for the inputs of an `encode` graph, as the server does."""
        feeds: dict[str, Array] = {}
        for spec in specs:
            if spec.name not in kind.forms:
                continue
            arrays = [row[spec.name] for row in rows]
            feeds[spec.name] = pad_arrays(arrays)
            for number, axis in enumerate(spec.axes[1:]):
                sizes = [array.shape[number] for array in arrays]
                feeds[names.lengths_of(str(axis))] = np.array(sizes, np.int32)
        inputs = {spec.name for spec in specs}
        lengths = np.array([kind.memory_length(row) for row in rows], np.int32)
        return cls({name: array for name, array in feeds.items() if name in inputs}, lengths)


class Graphs:
    """ONNX Runtime sessions of a model's graphs, on the execution provider of their precision.

    Owned by the exporter. Unlike in the server's runner, each call allocates its own buffers. `graphs` are
    the modules of the graph files; they name the inputs and outputs. `kind` is that of the model's sources,
    and `maps` are those that adapters may change. Raises ValueError if the provider does not work on this
    machine.

    Attributes:
        has_decode: Whether there is a `decode` graph.
    """

    def __init__(
        self,
        paths: Mapping[Verb, Path],
        graphs: Mapping[Verb, Graph] | Mapping[Verb, GraphSpec],
        provider: str,
        kind: SourceKind = TOKENS,
        maps: Sequence[AdaptedMap] = (),
    ) -> None:
        self.kind = kind
        self._device = _DEVICES[provider]
        provider_options = {} if self._device == _HOST else names.CUDA_PROVIDER_OPTIONS
        for name, value in names.CUDA_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        options = ort.SessionOptions()
        options.log_severity_level = 3
        # The sessions take turns: threads that spin after the run of one would take the CPU from the next.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        if self._device == _HOST:
            kernels.register(options)

        def session(path: Path) -> ort.InferenceSession:
            providers = [(provider, provider_options)]
            try:
                return ort.InferenceSession(path, options, providers=providers)
            except RuntimeError:
                # In a process that also serves, all sessions must share one thread pool.
                options.use_per_session_threads = not options.use_per_session_threads
                return ort.InferenceSession(path, options, providers=providers)

        self._sessions = {verb: session(path) for verb, path in paths.items()}
        for made in self._sessions.values():
            if made.get_providers()[0] != provider:
                raise ValueError(
                    f"this onnxruntime has the {provider}, but cannot use it here: install the libraries of "
                    "CUDA and cuDNN (pip install 'onnxruntime-gpu[cuda,cudnn]'), or export for the CPU only "
                    "(--precision fp32,int8)"
                )
        self._graphs = graphs
        self.has_decode = Verb.DECODE in graphs
        self._maps = maps
        self._adapters: dict[str, Array] = {}
        self._adapter_ids: Sequence[int] = ()
        if maps:
            self.use_adapters([{}], ())

    def use_adapters(
        self,
        adapters: Sequence[Weights],
        ids: Sequence[int],
        scales: Mapping[str, float] | None = None,
    ) -> None:
        """Give the rows of later calls adapters.

        Args:
            adapters: The weights of each one.
            ids: The adapter of each row, in turn; -1 for none. Without any, no row has one.
            scales: The graphs' `adapter_scales`.
        """
        places = Places(self._maps)
        ranks = [len(a) for weights in adapters for a, _ in weights.values()]
        max_rank = max(ranks, default=1)
        stack = np.zeros((len(adapters), max_rank * places.num_units), np.float16)
        self._adapters = {
            names.ADAPTERS: stack,
            names.ADAPTER_RANKS: np.zeros((len(adapters), places.num_parts), np.int32),
        }
        for weights, row, its_ranks in zip(adapters, *self._adapters.values(), strict=True):
            places.write(weights, scales or {}, row, its_ranks, max_rank)
        self._adapter_ids = ids

    def _adapter_feeds(self, num_rows: int) -> dict[str, Array]:
        if not self._adapters:
            return {}
        ids = np.resize(np.array(self._adapter_ids or (-1,), np.int64), num_rows)
        return {**self._adapters, names.ADAPTER_IDS: ids}

    def sources(self, rows: Sequence[Inputs]) -> Sources:
        """The padded batch of some requests' sources."""
        return Sources.of(rows, self.kind, self._graphs[Verb.ENCODE].inputs)

    def encode(self, sources: Sources, *, memory_capacity: int) -> dict[str, Array]:
        """The memory `(B, …)` and the first state of a batch, by tensor name."""
        sizes: dict[str, int] = {Axis.BATCH: len(sources.lengths), Axis.MEMORY_CAPACITY: memory_capacity}
        feeds = sources.feeds | self._adapter_feeds(len(sources.lengths))
        return self._run(Verb.ENCODE, feeds, sizes)

    def step(
        self,
        token_ids: Array,
        cache_lengths: Array,
        source_lengths: Array,
        buffers: dict[str, Array],
        owners: Array | None = None,
    ) -> Array:
        """Logits `(B, V)` of the next position.

        The step changes `buffers`: the cache grows by one position, in place; the next state replaces the
        state; and the attention `(B, memory capacity)` is stored, if the graph computes it. Each row may read
        the equal memory of its owner, a row `(B,)`; without owners it reads its own.
        """
        columns = {
            names.TOKEN_IDS: token_ids,
            names.OWNERS: np.arange(len(token_ids)) if owners is None else owners,
            names.CACHE_ROWS: np.arange(len(token_ids)),
            names.CACHE_LENGTHS: cache_lengths,
            names.PREVIOUS_LENGTHS: cache_lengths - 1,
            names.LAST_SOURCE_POSITIONS: source_lengths - 1,
        }
        specs = self._graphs[Verb.STEP].inputs
        feeds = {spec.name: columns[spec.name] for spec in specs if spec.name in columns}
        rows = {spec.name: buffers[spec.name] for spec in specs if spec.name in buffers}
        sizes = {
            str(axis): size
            for spec in specs
            if spec.name in rows
            for axis, size in zip(spec.axes, rows[spec.name].shape, strict=True)
        }
        feeds |= {
            spec.name: np.array(sizes[spec.name], np.int32) for spec in specs if spec.role is Role.CAPACITY
        }
        no_choice: dict[str, int] = {Axis.PLACES: 0}
        feeds |= {
            spec.name: np.zeros(spec.shape(no_choice), np.int64)
            for spec in specs
            if spec.role is Role.CANDIDATES
        }
        feeds |= self._adapter_feeds(len(token_ids))
        answers = self._run(Verb.STEP, feeds | rows, sizes)
        buffers |= {name: answers[name] for name in answers if name in rows or name == names.ATTENTION}
        return answers[names.LOGITS]

    def decode(
        self,
        target_ids: Array,
        label_ids: Array,
        source_lengths: Array,
        buffers: dict[str, Array],
        *,
        first_position: int = 0,
    ) -> tuple[Array, Array]:
        """Log-probabilities `(B, P)` of labels `(B, P)`, and the alignment `(B, T, …, memory capacity)`."""
        feeds = {
            names.TARGET_IDS: target_ids,
            names.LABEL_IDS: label_ids,
            names.FIRST_POSITION: np.array(first_position, np.int32),
            names.SOURCE_LENGTHS: source_lengths,
        }
        specs = self._graphs[Verb.DECODE].inputs
        read = {spec.name: buffers[spec.name] for spec in specs if spec.name in buffers}
        outputs = self._run(Verb.DECODE, feeds | read | self._adapter_feeds(len(target_ids)), {})
        return outputs[names.LOG_PROBABILITIES], outputs[names.ATTENTION]

    def empty_cache(self, num_rows: int, capacity: int) -> dict[str, Array]:
        """Zeroed cache buffers `(B, H, C, K)`, by tensor name."""
        sizes: dict[str, int] = {Axis.BATCH: num_rows, Axis.CACHE_CAPACITY: capacity}
        return {
            spec.name: np.zeros(spec.shape(sizes), spec.storage)
            for spec in self._graphs[Verb.STEP].inputs
            if spec.role == names.Role.CACHE
        }

    def greedy(
        self, sources: Sequence[Sequence[int]], *, start_id: int, eos_id: int, max_new_tokens: Sequence[int]
    ) -> list[list[int]]:
        """Greedy search: token ids without eos, and at most each source's own `max_new_tokens`."""
        batch = self.sources([self.kind.inputs(source) for source in sources])
        source_lengths, num_rows = batch.lengths, len(sources)
        buffers = self.encode(batch, memory_capacity=int(source_lengths.max()))
        buffers |= self.empty_cache(num_rows, max(max_new_tokens))
        token_ids = np.full(num_rows, start_id, np.int64)
        targets: list[list[int]] = [[] for _ in sources]
        is_running = np.ones(num_rows, bool)
        for position in range(max(max_new_tokens)):
            lengths = np.full(num_rows, position, np.int32)
            token_ids = self.step(token_ids, lengths, source_lengths, buffers).argmax(axis=1)
            is_running &= token_ids != eos_id
            if not is_running.any():
                break
            for row in np.flatnonzero(is_running):
                targets[row].append(int(token_ids[row]))
            is_running &= np.array(max_new_tokens) > position + 1
        return targets

    def _run(self, verb: Verb, feeds: dict[str, Array], sizes: Mapping[str, int]) -> dict[str, Array]:
        """Run a graph with its rows on the device and in place, so that it uses the kernels of serving."""
        binding = self._sessions[verb].io_binding()
        graph = self._graphs[verb]
        rows: dict[str, ort.OrtValue] = {}
        for spec in (*graph.inputs, *graph.outputs):
            name = names.buffer_of(spec.name)
            if spec.role in (Role.MEMORY, Role.CACHE) and name not in rows:
                if name not in feeds:  # encode writes it
                    feeds[name] = np.zeros(spec.shape(sizes), spec.storage)
                rows[name] = ort.OrtValue.ortvalue_from_numpy(feeds[name], self._device, 0)
        for spec in graph.inputs:
            if spec.name in rows:
                shape, pointer = feeds[spec.name].shape, rows[spec.name].data_ptr()
                binding.bind_input(spec.name, self._device, 0, spec.element_type, shape, pointer)
            else:
                binding.bind_cpu_input(spec.name, feeds[spec.name])
        for spec in graph.outputs:
            name = names.buffer_of(spec.name)
            if name in rows:
                shape, pointer = feeds[name].shape, rows[name].data_ptr()
                binding.bind_output(spec.name, self._device, 0, spec.element_type, shape, pointer)
            else:
                binding.bind_output(spec.name)
        self._sessions[verb].run_with_iobinding(binding)
        answers: dict[str, Array] = {}
        for spec, value in zip(graph.outputs, binding.get_outputs(), strict=True):
            name = names.buffer_of(spec.name)
            if name not in rows:
                answers[name] = np.array(value.numpy())  # a view would not keep the value's memory alive
                continue
            if self._device != _HOST:
                np.copyto(feeds[name], rows[name].numpy())
            answers[name] = feeds[name]
        return answers
