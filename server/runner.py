"""Runs a bundle's graphs over rows of buffers.

Buffers are allocated once, on the device that runs the graphs, with a row a slot. A step binds the first n
rows by pointer and the graph writes in place: nothing is copied, and a binding made for n rows serves every
later step of n rows. What a tensor is for is read from its role in the manifest; the runner knows no model
kind.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np

from bundle import names
from bundle.manifest import Bundle, VariantFiles
from bundle.names import Axis, Role, Verb
from server.buckets import bucket_of, buckets_up_to
from server.buffers import Buffers, Columns
from server.device import CPU, OnnxDevice, Session, one_line, share_threads
from server.records import (
    Array,
    Constraints,
    Move,
    Request,
    Sampling,
    Search,
    Selected,
    Sequence,
)
from server.selection import Selector
from server.sizing import RunnerConfig, Sizing, size_up

_log = logging.getLogger(__name__)

_MEMORY_STEP = 16  # positions by which memory grows

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _on_device(method: _Method) -> _Method:
    """No run of another thread is captured while the method uses the device."""

    @functools.wraps(method)
    def run(self: OnnxRunner, *args: Any) -> Any:
        with self._device.in_use():
            return method(self, *args)

    return cast(_Method, run)


class OnnxRunner:
    """The graphs of one bundle, and the rows that they work on.

    Owned by the engine; after construction used on its thread only. The sequence in slot i is row i of every
    buffer, and a step is of the first rows: what stands in the rows after them is not kept.

    Args:
        bundle: A checked bundle.
        config: Provider, precision, sizes.
        sizing: What `size_up` makes of both, where that is known already.
        files: The bundle's files of the sizing's precision, where they have been read. Runners of one
            bundle should share it, as on the host its weights are used where they are.

    Raises:
        ValueError: The bundle has no graphs for what may run them, one slot does not fit the budget, or a
            file was changed since the bundle was checked.
    """

    def __init__(
        self,
        bundle: Bundle,
        config: RunnerConfig,
        sizing: Sizing | None = None,
        files: VariantFiles | None = None,
    ) -> None:
        manifest, sizing = bundle.manifest, sizing or size_up(bundle, config)
        self.provider, self.precision = sizing.provider, sizing.precision
        self.num_threads, self.num_slots = sizing.num_threads, sizing.num_slots
        self.slot_bytes = sizing.slot_bytes
        self.max_source_length = sizing.sizes[Axis.MEMORY_CAPACITY]
        self.max_target_length = sizing.sizes[Axis.CACHE_CAPACITY]
        self.vocab_size = manifest.sizes["vocab_size"]
        self.start_id, self.eos_id = manifest.special_ids.decoder_start_id, manifest.special_ids.eos_id
        if config.shares_threads:
            share_threads(sizing.num_pool_threads)
        self._device = OnnxDevice(self.provider, self.num_threads)
        self._graphs = manifest.variants[self.precision].graphs
        self._buffers: dict[str, Buffers] = {}
        for specs in sizing.groups:
            shape = (self.num_slots, *sizing.row_shape(specs[0]))
            buffers = Buffers(specs, shape, self._device)
            self._buffers |= dict.fromkeys(buffers.index, buffers)
        self._groups_of_buffers = tuple(dict.fromkeys(self._buffers.values()))
        step = self._graphs[Verb.STEP]
        inputs = [spec.name for spec in step.inputs if spec.role is Role.TOKEN]
        self._columns = Columns(inputs, self.num_slots, self.vocab_size, self._device)
        self._picks_in_step = names.out(names.TOKEN_IDS) in [spec.name for spec in step.outputs]
        self._capacities = {
            names.CACHE_CAPACITY: np.array(self.max_target_length, np.int32),
            names.MEMORY_CAPACITY: np.array(self.max_source_length, np.int32),
        }
        self._files: VariantFiles | None = files or bundle.read_variant(self.precision)
        self._sessions = {verb: self._load(verb) for verb in (Verb.ENCODE, Verb.DECODE)}
        self._selector = Selector(self._columns, self.vocab_size, self.eos_id, self._device)
        self._buckets = buckets_up_to(self.num_slots)
        self._bindings: dict[int, list[Any]] = {}
        self._select: Session | None = None
        self._rows: tuple[Sequence, ...] = ()
        # The first step of a bucket runs twice, to take memory and to be captured, and positions go on.
        self.captures_steps = config.cuda_graphs and self._device.can_capture and self.max_target_length > 1
        self._or_uncaptured()

    def warm_up(self) -> None:
        """Run every graph, and a step of every bucket, so that no request pays for first-time work.

        Where steps are captured it must be called on the thread that will call `step`: ONNX Runtime keeps
        captured graphs for each thread, and another would capture anew.
        """
        sources = {
            spec.name: np.zeros(spec.shape({Axis.BATCH: 1, Axis.SOURCE_LENGTH: 1})[1:], spec.dtype)
            for spec in self._graphs[Verb.ENCODE].inputs
            if spec.role is Role.SOURCE and spec.name != names.SOURCE_LENGTHS
        }
        request = Request("warm-up", sources, max_new_tokens=1, arrival=0.0)
        self.encode(0, [request])
        self._or_uncaptured(self._step_every_bucket)
        self.step((Sequence(Search(request), self.start_id, request.source_length),))
        for detailed in _requests_of_every_selection(request):
            row = Sequence(Search(detailed), self.start_id, request.source_length, is_plain=False)
            self.step((row,))
        self.move((Move(0, 0, cache_length=1, source_length=request.source_length),))
        # From an empty cache and after a filled one, which may take other kernels.
        for first_position, length in ((0, 1), (1, 2)):
            if first_position + length <= self.max_target_length:
                self.align(0, first_position, (self.start_id,) * length, request.source_length)
        if not self._device.is_host:
            # The weights are on the device, and no other session will be made.
            self._files = None

    @_on_device
    def encode(self, first_row: int, requests: list[Request]) -> None:
        """Encode newcomers into the memory of the rows from `first_row` on."""
        lengths = np.array([request.source_length for request in requests], np.int32)
        self._fit_memory(int(lengths.max()), first_row)
        feeds: dict[str, Array] = {names.SOURCE_LENGTHS: lengths}
        for spec in self._graphs[Verb.ENCODE].inputs:
            if spec.role is Role.SOURCE and spec.name != names.SOURCE_LENGTHS:
                feeds[spec.name] = _pad([request.sources[spec.name] for request in requests], spec.dtype)
        binding = self._bind(Verb.ENCODE, first_row, len(requests), feeds)
        self._sessions[Verb.ENCODE].run_with_iobinding(binding)

    @_on_device
    def prefill(self, first_row: int, sequences: tuple[Sequence, ...]) -> list[list[float]]:
        """Fill the caches of the rows from `first_row` on from their prefixes, by one call.

        Rows of different lengths are padded: what that writes past a row's own length, its later steps
        overwrite. A prefix's last token is fed by the first step.

        Returns:
            For each sequence that is scored the log-probabilities of its target, end of sequence included.
        """
        fed = [np.array([self.start_id, *sequence.token_ids]) for sequence in sequences]
        labels = [np.array([*sequence.token_ids, self.eos_id]) for sequence in sequences]
        is_scored = any(sequence.request.is_score for sequence in sequences)
        longest = max(len(ids) - (not s.request.is_score) for ids, s in zip(fed, sequences, strict=True))
        feeds: dict[str, Array] = {
            names.TARGET_IDS: _pad(fed, "int64")[:, :longest],
            names.LABEL_IDS: _pad(labels, "int64")[:, : longest if is_scored else 0],
            names.SOURCE_LENGTHS: np.array([sequence.source_length for sequence in sequences], np.int32),
        }
        scores = self._decode(first_row, len(sequences), 0, feeds, names.LOG_PROBABILITIES)
        return [
            row[: len(ids)].tolist() if sequence.request.is_score else []
            for row, ids, sequence in zip(scores, labels, sequences, strict=True)
        ]

    @_on_device
    def step(self, rows: tuple[Sequence, ...]) -> Selected:
        """Feed every row its last token, and select its next one."""
        num_rows = len(rows)
        # Where a row has several ways to go on, the columns do not know which it takes; one that only keeps
        # its place does not grow.
        are_growing = all(sequence.num_branches == 1 for sequence in rows)
        self._columns.fill(rows, is_same=are_growing and rows is self._rows)
        has_plain = any(sequence.is_plain for sequence in rows)
        self._run_step(num_rows, picks=has_plain)
        token_ids = self._columns.read_token_ids(num_rows) if has_plain else [self.eos_id] * num_rows
        self._rows = rows if are_growing else ()
        if all(sequence.is_plain for sequence in rows):
            return Selected(token_ids)
        return self._selector.select(rows, token_ids)

    @_on_device
    def move(self, moves: Iterable[Move]) -> int:
        """Carry out moves in order; returns the bytes copied."""
        moves = tuple(moves)
        return sum(buffers.move_all(moves) for buffers in self._groups_of_buffers)

    @_on_device
    def align(self, row: int, first_position: int, target_ids: tuple[int, ...], source_length: int) -> Array:
        """The attention `(T, source_length)` of some positions of a row whose memory is in place.

        Args:
            row: Its slot.
            first_position: Where they begin, after as many that are in the row's cache.
            target_ids: The token ids that the decoder was fed there.
            source_length: Of its source.
        """
        feeds: dict[str, Array] = {
            names.TARGET_IDS: np.array([target_ids], np.int64),
            names.LABEL_IDS: np.empty((1, 0), np.int64),
            names.SOURCE_LENGTHS: np.array([source_length], np.int32),
        }
        return self._decode(row, 1, first_position, feeds, names.ATTENTION)[0, :, :source_length].copy()

    @_on_device
    def close(self) -> None:
        """Give all memory back to the device; nothing can be run any more."""
        self._bindings.clear()
        self._sessions.clear()
        self._buffers.clear()
        self._groups_of_buffers = ()
        del self._columns, self._selector, self._select

    def _decode(
        self, first_row: int, num_rows: int, first_position: int, feeds: dict[str, Array], output: str
    ) -> Array:
        """Run several positions of some rows at once."""
        # Bound arrays must lie in one piece, and live until the run has ended.
        feeds = {name: np.ascontiguousarray(array) for name, array in feeds.items()}
        feeds[names.FIRST_POSITION] = np.array(first_position, np.int32)
        binding = self._bind(Verb.DECODE, first_row, num_rows, feeds)
        self._sessions[Verb.DECODE].run_with_iobinding(binding)
        index = [spec.name for spec in self._graphs[Verb.DECODE].outputs].index(output)
        answer: Array = binding.get_outputs()[index].numpy()
        return answer

    def _fit_memory(self, longest: int, num_rows: int) -> None:
        """On the host, give memory as much room as the longest source in it needs: see `Buffers.fit`."""
        capacity = self._capacities[names.MEMORY_CAPACITY]
        if not self._device.is_host or self.captures_steps:
            return
        if num_rows:  # beside others, seldom: it copies what they have
            longest = min(-(-longest // _MEMORY_STEP) * _MEMORY_STEP, self.max_source_length)
        if longest > capacity if num_rows else longest != capacity:
            self._capacities[names.MEMORY_CAPACITY] = np.array(longest, np.int32)
            self._bindings.clear()
            for buffers in self._groups_of_buffers:
                if buffers.capacity_axis == Axis.MEMORY_CAPACITY:
                    buffers.fit(longest, num_rows)

    def _bind(self, verb: Verb, first_row: int, num_rows: int, feeds: Mapping[str, Array]) -> Any:
        """Bind a graph to `num_rows` rows from `first_row` on, and to host arrays."""
        binding = self._sessions[verb].io_binding()
        graph = self._graphs[verb]
        for spec in graph.inputs:
            if spec.name in self._buffers:
                self._buffers[spec.name].bind_input(binding, spec.name, first_row, num_rows)
            elif spec.name in feeds:
                binding.bind_cpu_input(spec.name, feeds[spec.name])
            elif spec.role is Role.CAPACITY:
                binding.bind_cpu_input(spec.name, self._capacities[spec.name])
            else:
                self._columns.bind_input(binding, spec.name, num_rows)
        for spec in graph.outputs:
            name = names.buffer_of(spec.name)
            if name in self._buffers:
                self._buffers[name].bind_output(binding, spec.name, first_row, num_rows)
            elif spec.role is Role.LOGITS:
                self._columns.bind_logits(self._device.bind_output, binding, num_rows)
            elif spec.role is Role.TOKEN:
                self._columns.bind_output(binding, spec, num_rows)
            else:
                binding.bind_output(spec.name, CPU)
        return binding

    def _run_step(self, num_rows: int, *, picks: bool = True) -> None:
        """Run the step over the first rows, and if it `picks`, the selection of the most probable tokens too.

        Where steps are captured there are whole buckets of rows: those after the running ones are free.
        """
        if self.captures_steps:
            num_rows = bucket_of(num_rows, self._buckets)
        if num_rows not in self._bindings:
            self._bindings[num_rows] = self._bind_step(num_rows)
        sessions = [self._sessions[Verb.STEP]]
        if picks and self._select is not None:
            sessions.append(self._select)
        for session, binding in zip(sessions, self._bindings[num_rows], strict=False):
            if self.captures_steps:
                self._device.replay(session, binding, graph_id=num_rows)
            else:
                session.run_with_iobinding(binding)

    def _step_every_bucket(self) -> None:
        # The largest first: the memory that it takes serves the others.
        for num_rows in reversed(self._buckets):
            with self._device.in_use():
                self._columns.fill((), is_same=False)
            with self._device.alone():
                self._run_step(num_rows)

    def _load(self, verb: Verb, *, is_captured: bool = False) -> Session:
        assert self._files is not None
        graph, weights = self._files.graphs[verb], self._files.weights
        return self._device.session(verb, graph, weights, is_captured=is_captured)

    def _load_step(self) -> None:
        is_captured = self.captures_steps
        self._sessions[Verb.STEP] = self._load(Verb.STEP, is_captured=is_captured)
        if not self._picks_in_step:
            self._select = self._device.weightless("greedy", is_captured=is_captured)

    def _drop_step(self) -> None:
        with self._device.in_use():  # which frees memory of the device
            self._bindings.clear()
            self._sessions.pop(Verb.STEP, None)
            self._select = None

    def _or_uncaptured(self, action: Callable[[], None] = lambda: None) -> None:
        """Load the step, if it is not, and do something with it; where that fails, with steps not captured.

        The first CUDA call after a failed capture may return the capture's error, so there is another try.
        """
        num_left = 2 if self.captures_steps else 0
        while True:
            try:
                if Verb.STEP not in self._sessions:
                    self._load_step()
                action()
                return
            except Exception as error:  # ONNX Runtime's errors have no class of their own in common
                if not num_left:
                    raise
                num_left -= 1
                if self.captures_steps:
                    _log.warning("steps are not captured as CUDA graphs, and are slower: %s", one_line(error))
                    self.captures_steps = False
            # Not in the handler: until it ends, the error's frames keep the sessions that failed.
            self._drop_step()

    def _bind_step(self, num_rows: int) -> list[Any]:
        """Bindings of the step and, where the step does not select tokens itself, of the selection."""
        bindings = [self._bind(Verb.STEP, 0, num_rows, {})]
        if self._select is not None:
            select = self._select.io_binding()
            self._columns.bind_logits(self._device.bind_input, select, num_rows)
            self._columns.bind_selected(select, num_rows)
            bindings.append(select)
        return bindings


def _requests_of_every_selection(request: Request) -> list[Request]:
    """Requests that between them need every graph that selects tokens."""
    constraints = Constraints(min_new_tokens=1, suppressed_token_ids=frozenset({0}))
    samplings = [
        Sampling(1.0, top_k, top_p, min_p=0.0, seed=0) for top_k, top_p in ((0, 1.0), (1, 1.0), (0, 0.5))
    ]
    return [
        replace(request, constraints=constraints, log_probabilities=True),
        *(replace(request, sampling=sampling) for sampling in samplings),
    ]


def _pad(arrays: list[Array], dtype: str) -> Array:
    """Stack `(S, …)` arrays of different lengths into `(B, S, …)`, zeros to the right."""
    longest = max(map(len, arrays))
    padded = np.zeros((len(arrays), longest, *arrays[0].shape[1:]), dtype)
    for row, array in zip(padded, arrays, strict=True):
        row[: len(array)] = array
    return padded
