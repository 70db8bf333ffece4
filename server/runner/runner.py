"""Runs a bundle's graphs over rows of buffers.

Buffers are allocated once, on the device that runs the graphs, with one row for each slot. A step binds the
first n rows by pointer and the graph writes in place: nothing is copied, and a binding of n rows serves every
later step of n rows. The manifest gives each tensor's role; the runner does not know kinds of models.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby, product
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.adapters import Weights
from seq2seq_serve.bundle.cuda_libraries import load_cuda_libraries
from seq2seq_serve.bundle.manifest import Bundle, Timestamps, VariantFiles
from seq2seq_serve.bundle.names import Axis, Role, Verb
from seq2seq_serve.server.config import RunnerConfig
from seq2seq_serve.server.engine.drafts import MAX_DRAFTED
from seq2seq_serve.server.engine.plan import NOTHING_WANTED, Move, Selected
from seq2seq_serve.server.engine.request import NO_ADAPTER, Array, Beam, Constraints, Request, Sampling
from seq2seq_serve.server.engine.state import Search, Sequence
from seq2seq_serve.server.engine.terms import RequiredTerms, Spelling, Term
from seq2seq_serve.server.errors import NO_NUMBERS, EngineFailed
from seq2seq_serve.server.runner import selection
from seq2seq_serve.server.runner.adapters import Adapters
from seq2seq_serve.server.runner.buffers import Buffers, Columns
from seq2seq_serve.server.runner.device import CPU, OnnxDevice, Session, one_line, read_files, share_threads
from seq2seq_serve.server.runner.selection import Selector
from seq2seq_serve.server.runner.sizing import Sizing, row_shape, size_up, source_specs

_log = logging.getLogger(__name__)

_MEMORY_STEP = 16  # positions by which memory grows
_FIRST_BETWEEN = 16  # from here on there is a bucket between two powers of two
# The shapes of encode calls on a device: rows, tokens, and the most of both together in a warm-up. The first
# call of a shape takes an H100 3 to 14 ms, because kernels are loaded and chosen, and later ones 0.9.
_ENCODE_ROWS, _ENCODE_LENGTHS = (1, 2, 4, 8, 16, 32, 64), (16, 32, 64, 128, 256, 512, 1024)
_MOST_ENCODED = 8192
_NOT_CAPTURED = -1  # the graph id of a run of a captured session that is neither captured nor replayed
_CANDIDATES = (names.CANDIDATE_IDS, names.LOG_PROBABILITIES, names.FOUND)
_NOTHING_FOUND = np.zeros(0, np.float32)  # the steps of older bundles look nothing up
_NOT_NUMBERS = "what the graph {} computes is not a number: its weights are damaged, export the model again"
_STATE = attrgetter("num_branches", "num_forced", "is_plain")  # of a row before a step
_MEMORY_LENGTH = attrgetter("memory_length")


class _Staged(NamedTuple):
    """A captured encode call: it reads the inputs, on the device, and writes the rows after all slots."""

    binding: Any
    inputs: dict[str, Any]
    graph_id: int


class OnnxRunner:
    """The graphs of one bundle, and the rows that they work on: the `Runner` of `server.engine.plan`.

    Owned by the engine; after construction used on its thread only. The sequence in slot i is row i of every
    buffer. A step runs the first rows and may overwrite the rows after them. If it `takes_drafts`, further
    rows of the step may be later positions of these slots.

    Args:
        bundle: A checked bundle.
        config: Provider, precision, sizes.
        sizing: The result of `size_up`; None computes it.
        files: The bundle's files of the sizing's precision; None reads them. Runners of one bundle should
            share them, because the host uses their weights in place.
        is_draft: Whether the rows of a step are any of the rows in use, so that a step must not take memory
            from the others.

    Raises:
        ValueError: The bundle does not have graphs for an allowed provider, one slot is too large,
            or a file has changed since the bundle was checked.
    """

    def __init__(
        self,
        bundle: Bundle,
        config: RunnerConfig,
        sizing: Sizing | None = None,
        files: VariantFiles | None = None,
        *,
        is_draft: bool = False,
    ) -> None:
        manifest, sizing = bundle.manifest, sizing or size_up(bundle, config, is_draft=is_draft)
        # The sizes, and what the manifest says of tokens
        self.provider, self.precision = sizing.provider, sizing.precision
        self.num_threads, self.num_slots = sizing.num_threads, sizing.num_slots
        self.slot_bytes = sizing.slot_bytes
        self.max_source_length = sizing.max_source_length
        self.max_target_length = sizing.sizes[Axis.CACHE_CAPACITY]
        self._max_memory_length = sizing.sizes[Axis.MEMORY_CAPACITY]
        self._capacities = {
            names.CACHE_CAPACITY: np.array(self.max_target_length, np.int32),
            names.MEMORY_CAPACITY: np.array(self._max_memory_length, np.int32),
        }
        self.vocab_size = manifest.target_vocab_size
        # For a start that requests choose, any of its tokens serves to warm up.
        self.start_ids = tuple(
            next(iter(manifest.choices[place].ids.values())) if isinstance(place, str) else place
            for place in manifest.template.start
        )
        self.eos_ids = manifest.special_ids.eos_ids
        self._memory, self._times = manifest.memory, manifest.timestamps
        self._detects = manifest.detects_language
        self._path, self._is_draft = bundle.path, is_draft

        # The device, and which calls it captures
        if config.shares_threads:
            share_threads(self.num_threads)
        if self.provider != CPU:
            load_cuda_libraries(config.cuda_libraries)
        self.device = OnnxDevice(self.provider, self.num_threads)
        self._graphs = manifest.variants[self.precision].graphs
        self._source_specs = source_specs(manifest, self.precision)
        source_axes = {axis for spec in self._source_specs for axis in spec.axes[1:] if isinstance(axis, str)}
        self._has_tokens = Axis.SOURCE_LENGTH in source_axes
        has_state = any(specs[0].role is Role.STATE for specs in sizing.groups)
        self._pads_sources = self._has_tokens and not has_state and not self.device.is_host
        captures = config.cuda_graphs and self.device.can_capture and self.max_target_length > 1
        # Calls of few shapes, into rows after those of the slots
        stages = captures and self.device.moves_positions and not has_state
        stages = stages and source_axes <= {Axis.SOURCE_LENGTH, Axis.SOUND_LENGTH}
        self._captures = {Verb.STEP: captures, Verb.ENCODE: stages}
        self._num_staged_rows = sizing.num_staged_rows

        # What the graphs allow there
        step = self._graphs[Verb.STEP]
        inputs, outputs = [spec.name for spec in step.inputs], [spec.name for spec in step.outputs]
        has_operators = self.device.has_operators
        self.has_decode = Verb.DECODE in self._graphs
        # What a step without numbers did to a state cannot be undone.
        self.repeats_steps = not has_state
        # A move copies a state whole, so an owner could not hand over its memory alone.
        self.shares_memory = names.OWNERS in inputs and has_operators and not has_state
        self.takes_drafts = names.CACHE_ROWS in inputs and self.device.is_host and has_operators
        self.chooses_tokens = names.NUM_CANDIDATES in inputs and self.device.is_host and has_operators
        self._looks_up = names.PLACES in inputs  # otherwise a step with terms returns logits
        self._candidate_outputs = [outputs.index(name) for name in _CANDIDATES if name in outputs]
        self._picks_in_step = names.out(names.TOKEN_IDS) in outputs
        never_ids = manifest.generation.suppressed_token_ids
        if never_ids and not self._picks_in_step and not self.device.is_host:
            raise ValueError(
                f"{bundle.path} suppresses tokens, and its step in {self.precision} does not select tokens, "
                f"which {self.provider} needs for that: export it again"
            )

        self._adapters = Adapters(manifest, sizing, self.device) if manifest.adapted_maps else None

        # The rows, and what a step reads and writes of them
        self._buffers = self._allocated(sizing)
        self._groups_of_buffers = tuple(dict.fromkeys(self._buffers.values()))
        self._state = [buffers for buffers in self._groups_of_buffers if buffers.num_copies > 1]
        self._fitted = [
            buffers
            for buffers in self._groups_of_buffers
            if self.device.is_host and buffers.capacity_axis == Axis.MEMORY_CAPACITY
        ]
        self._columns = Columns(
            [spec.name for spec in step.inputs if spec.role is Role.TOKEN],
            self.num_slots + (MAX_DRAFTED if self.takes_drafts else 0),
            self.vocab_size,
            self.device,
            next((spec for spec in step.outputs if spec.role is Role.ATTENTION), None),
            self._max_memory_length,
            never_ids,
        )
        self._selector = Selector(
            self._columns,
            self.vocab_size,
            self.eos_ids,
            self.device,
            frozenset(never_ids),
            has_times=self._times is not None,
            detects=self._detects,
        )

        # The sessions, and their bindings
        self._buckets = buckets_up_to(self.num_slots)
        # By the number of rows, the state's copy, the number of candidates, whether tokens are looked up, and
        # the room of each row's memory; the least recently used first
        self._bindings: dict[tuple[int, int, int, bool, int], list[Any]] = {}
        # The bindings refer to these arrays.
        self._num_candidates: dict[int, Array] = {}
        self._memory_capacities: dict[int, Array] = {}
        self._staged: dict[tuple[int, int], _Staged] = {}  # captured encode calls, by rows and tokens
        self._padded: set[tuple[int, int]] = set()  # shapes of other encode calls that were run to warm up
        self._have_grown = False  # the rows of the last step: the columns know their next tokens
        self._files: VariantFiles | None = files or read_files(bundle, self.precision, self.provider)
        self._select: Session | None = None
        self._sessions: dict[Verb, Session] = {
            verb: self._load(verb) for verb in self._graphs if verb not in (Verb.ENCODE, Verb.STEP)
        }
        # A bucket's first step runs twice, to allocate memory and to be captured, each at a new position.
        self._or_uncaptured(Verb.ENCODE)
        self._or_uncaptured(Verb.STEP)

    def _allocated(self, sizing: Sizing) -> dict[str, Buffers]:
        """Returns the buffers by the names of their tensors; those of one group have the same."""
        by_name: dict[str, Buffers] = {}
        for specs in sizing.groups:
            num_rows = self.num_slots
            if self._captures[Verb.ENCODE] and specs[0].role is Role.MEMORY:
                num_rows += self._num_staged_rows
            buffers = Buffers(specs, (num_rows, *row_shape(specs[0], sizing.sizes)), self.device)
            by_name |= dict.fromkeys(buffers.index, buffers)
        return by_name

    @property
    def captures_steps(self) -> bool:
        """Whether steps are captured and replayed."""
        return self._captures[Verb.STEP]

    def warm_up(self) -> None:
        """Run every graph, and on a GPU a step of every bucket, so that no request waits for first-time work.

        If steps are captured, the thread that will call `step` must call it: ONNX Runtime keeps captured
        graphs for each thread, and another thread would capture them again.

        Raises:
            ValueError: A graph computes something that is not a number, because weights are not.
        """
        sources = {
            spec.name: np.zeros([self._warm_size(axis) for axis in spec.axes[1:]], spec.dtype)
            for spec in self._source_specs
        }
        memory_length = self._memory.memory_length_of(sources)
        request = Request("warm-up", sources, memory_length, max_new_tokens=1, arrival=0.0)
        self._or_uncaptured(Verb.ENCODE, lambda: self._encode_every_shape(request))
        self.encode(0, [request])
        self._or_uncaptured(Verb.STEP, self._step_every_bucket)
        start_id = self.start_ids[-1]
        rows = [
            Sequence(
                Search(one, (start_id,)),
                start_id,
                is_plain=one is request,
                detects=bool(one.detected_ids),
                progress=None if one.terms is None else one.terms.start,
            )
            for one in (
                [request]  # a draft model selects no token in another way
                if self._is_draft
                else _requests_of_every_selection(request, self._times, detects=self._detects)
            )
        ]
        # Together: a step reads all weights, which takes most of its time.
        for first in range(0, len(rows), self.num_slots):
            together = tuple(rows[first : first + self.num_slots])
            for row, sequence in enumerate(together):
                sequence.row = row
            selected = self.step(together)
            if selected.failures or min(selected.token_ids) < 0:
                raise ValueError(_NOT_NUMBERS.format(Verb.STEP))
        self.move((Move(0, 0, cache_length=1, memory_length=request.memory_length),))
        # With an empty cache and with a filled one, which may use other kernels.
        for first_position, length in ((0, 1), (1, 2)):
            if self.has_decode and first_position + length <= self.max_target_length:
                weights = self.align(0, first_position, (start_id,) * length, request.memory_length)
                if not np.isfinite(weights).all():
                    raise ValueError(_NOT_NUMBERS.format(Verb.DECODE))
        if not self.device.is_host:
            # The weights are on the device, and no further session will be created.
            self._files = None

    def _warm_size(self, axis: int | str) -> int:
        """Returns the size of an axis of the source that warms up: a sound's is that of most requests."""
        if axis == Axis.SOUND_LENGTH:
            assert self._memory.whole_length is not None
            return self._memory.whole_length
        return axis if isinstance(axis, int) else 1

    def encode(self, first_row: int, requests: list[Request]) -> None:
        longest = max(request.memory_length for request in requests)
        if not first_row:
            self._fit_memory(longest, 0)
        elif longest > self._memory_capacity:
            self._fit_memory(self._rounded(longest), first_row)
        row = first_row
        for _, alike in groupby(requests, self._sound_length):
            together = list(alike)
            if self.device.is_host:
                self._encode(row, together, 0)
            else:
                size = self._num_staged_rows if self._captures[Verb.ENCODE] else len(together)
                for start in range(0, len(together), size):
                    self._encode_on_device(row + start, together[start : start + size])
            row += len(together)
        for request in requests:
            request.drop_arrays()

    def _sound_length(self, request: Request) -> int:
        """Returns the frames of a sound: a call encodes sounds of one length, as silence would be heard.

        It is 0 for other sources, and for sounds that all have one length.
        """
        rule = self._memory
        return 0 if rule.axis is None else request.sources[rule.source].shape[rule.axis]

    def _encode(self, first_row: int, requests: list[Request], least_length: int) -> None:
        """Encode requests, padded to at least a number of tokens."""
        binding = self._bind(Verb.ENCODE, first_row, len(requests), self._feeds(requests, least_length))
        session = self._sessions[Verb.ENCODE]
        if self._captures[Verb.ENCODE]:
            self.device.replay(session, binding, graph_id=_NOT_CAPTURED)
        else:
            session.run_with_iobinding(binding)

    def _encode_on_device(self, first_row: int, requests: list[Request]) -> None:
        """Encode requests by a captured run into the rows after all slots, and copy them; or directly.

        A captured run always writes the same rows. The last request fills up its rows.
        """
        num_rows = len(requests)
        shape = self._encode_shape(requests)
        if shape not in self._staged:
            is_padded = shape in self._padded and first_row + shape[0] <= self.num_slots
            filling = requests[-1:] * (shape[0] - num_rows if is_padded else 0)
            self._encode(first_row, requests + filling, shape[1] if is_padded else 0)
            return
        staged = self._staged[shape]
        feeds = self._feeds(requests + requests[-1:] * (shape[0] - num_rows), shape[1])
        for name, value in staged.inputs.items():
            value.update_inplace(feeds[name])
        self.device.replay(self._sessions[Verb.ENCODE], staged.binding, graph_id=staged.graph_id)
        moves = [
            Move(self.num_slots + i, first_row + i, cache_length=0, memory_length=request.memory_length)
            for i, request in enumerate(requests)
        ]
        for buffers in self._groups_of_buffers:
            buffers.move_all(moves)

    def _encode_shape(self, requests: list[Request]) -> tuple[int, int]:
        """Returns the rows and tokens of an encode call on a device, one of few shapes.

        Those of sounds are not padded: only whole windows have a shape that others share.
        """
        num_rows, length = len(requests), self.max_source_length
        if self._memory.axis is not None:
            length = requests[0].memory_length
        elif self._has_tokens:
            longest = max(len(request.sources[self._memory.source]) for request in requests)
            length = min(next((size for size in _ENCODE_LENGTHS if size >= longest), longest), length)
        return next((size for size in _ENCODE_ROWS if size >= num_rows), num_rows), length

    def _feeds(self, requests: list[Request], least_length: int) -> dict[str, Array]:
        feeds: dict[str, Array] = {}
        for spec in self._source_specs:
            arrays = [request.sources[spec.name] for request in requests]
            least = [least_length if axis == Axis.SOURCE_LENGTH else 0 for axis in spec.axes[1:]]
            feeds[spec.name] = _pad(arrays, spec.dtype, least)
            for number, axis in enumerate(spec.axes[1:]):
                if isinstance(axis, str) and axis != Axis.SOUND_LENGTH:
                    lengths = [array.shape[number] for array in arrays]
                    feeds[names.lengths_of(axis)] = np.array(lengths, np.int32)
        return feeds | self._adapter_ids(request.adapter for request in requests)

    def _adapter_ids(self, ids: Iterable[int]) -> dict[str, Array]:
        """Returns the input of the rows' adapters, if the graphs have it."""
        return {} if self._adapters is None else {names.ADAPTER_IDS: np.array([*ids], np.int64)}

    def _encode_every_shape(self, request: Request) -> None:
        """Run, and capture, all shapes of encode calls, the largest first: the others reuse its memory."""
        captures = self._captures[Verb.ENCODE]
        if not (captures or self._pads_sources):
            return
        lengths = [self.max_source_length]
        if self._has_tokens:
            lengths += [length for length in _ENCODE_LENGTHS if length < self.max_source_length]
        most_rows = self._num_staged_rows if captures else self.num_slots
        shapes = product((num_rows for num_rows in _ENCODE_ROWS if num_rows <= most_rows), lengths)
        for number, shape in enumerate(sorted(shapes, key=math.prod, reverse=True), start=1):
            if math.prod(shape) > _MOST_ENCODED:
                continue
            requests = [request] * shape[0]
            if not captures:
                self._encode(0, requests, shape[1])
                self._padded.add(shape)
                continue
            inputs = {
                name: self.device.value(array) for name, array in self._feeds(requests, shape[1]).items()
            }
            binding = self._bind(Verb.ENCODE, self.num_slots, shape[0], inputs)
            self.device.replay(self._sessions[Verb.ENCODE], binding, graph_id=number)
            self._staged[shape] = _Staged(binding, inputs, number)

    def prefill(self, first_row: int, sequences: tuple[Sequence, ...]) -> list[list[float]]:
        """Fill the caches of the rows from `first_row` on from start tokens and prefixes, by one call.

        Shorter rows are padded; their later steps overwrite the positions that the padding wrote. The first
        step feeds a prefix's last token.

        Returns:
            For each scored sequence the log-probabilities of its target, end of sequence included.
        """
        fed = [np.array([*sequence.search.start_ids, *sequence.token_ids]) for sequence in sequences]
        labels = [np.array([*ids[1:], self.eos_ids[0]]) for ids in fed]
        is_scored = any(sequence.request.is_score for sequence in sequences)
        longest = max(len(ids) - (not s.request.is_score) for ids, s in zip(fed, sequences, strict=True))
        feeds: dict[str, Array] = {
            names.TARGET_IDS: _pad(fed, "int64")[:, :longest],
            names.LABEL_IDS: _pad(labels, "int64")[:, : longest if is_scored else 0],
            names.SOURCE_LENGTHS: np.array([sequence.memory_length for sequence in sequences], np.int32),
            **self._adapter_ids(sequence.request.adapter for sequence in sequences),
        }
        scores = self._decode(first_row, len(sequences), 0, feeds, names.LOG_PROBABILITIES)
        return [
            row[len(sequence.search.start_ids) - 1 : len(ids)].tolist() if sequence.request.is_score else []
            for row, ids, sequence in zip(scores, labels, sequences, strict=True)
        ]

    def write_adapter(self, place: int, weights: Weights) -> None:
        assert self._adapters is not None
        self._adapters.write(place, weights)

    def step(self, rows: tuple[Sequence, ...], num_steps: int = 1) -> Selected:
        num_rows = len(rows)
        if rows is not self._columns.rows and not self._is_draft:
            longest = self._rounded(max(map(_MEMORY_LENGTH, rows)))
            if 2 * longest <= self._memory_capacity:
                self._fit_memory(longest, num_rows)
        others = [row for row in rows if not row.num_simple]
        # The columns do not know the next token of a row with several branches or a forced token; a row that
        # only keeps its memory does not grow.
        states = set(map(_STATE, others))
        are_growing = all(num_branches == 1 and not num_forced for num_branches, num_forced, _ in states)
        self._columns.fill(rows, have_grown=are_growing and self._have_grown)
        has_plain = len(others) < num_rows or any(is_plain for *_, is_plain in states)
        are_plain = all(is_plain for *_, is_plain in states)
        num_candidates, wanted = int(self.chooses_tokens), NOTHING_WANTED
        if self.chooses_tokens and not are_plain:
            num_candidates, wanted = selection.choice(rows, self.vocab_size, looks_up=self._looks_up)
        binding = self._run_step(
            num_rows, picks=has_plain, num_candidates=num_candidates, places=wanted.places
        )
        best: list[Array] = []
        if num_candidates > 1:
            values = binding.get_outputs_as_ortvaluevector()
            # The binding's next step overwrites them.
            best = [values[index].numpy() for index in self._candidate_outputs]
        elif has_plain and self.device.is_host and not num_candidates:
            self._columns.pick(num_rows)
        if not has_plain:
            token_ids = [self.eos_ids[0]] * num_rows
        elif best:
            token_ids = best[0][:, 0].tolist()
        else:
            token_ids = self._columns.read_token_ids(num_rows)
        self._have_grown = are_growing and rows[-1].row == num_rows - 1  # one with drafts may grow by more
        if num_steps > 1 and min(token_ids) >= 0:
            return Selected(token_ids, further=tuple(self._repeated(rows, num_steps - 1, num_candidates)))
        attention = self._read_attention(rows)
        failures = {}
        if min(token_ids) < 0:
            failures = {
                row: EngineFailed(NO_NUMBERS)
                for row, (sequence, token_id) in enumerate(zip(rows, token_ids, strict=True))
                if token_id < 0 and sequence.is_plain and sequence.num_branches
            }
        if are_plain:
            return Selected(token_ids, failures=failures, attention=attention)
        if best:
            ids, log_probabilities, found = (*best, _NOTHING_FOUND)[:3]
            candidates = selection.table_of(rows, ids, log_probabilities, wanted, found)
            return Selected(token_ids, candidates=candidates, failures=failures, attention=attention)
        selected = self._selector.select(rows, token_ids)
        return replace(selected, failures={**failures, **selected.failures}, attention=attention)

    def _repeated(
        self, rows: tuple[Sequence, ...], num_steps: int, num_candidates: int
    ) -> Iterator[list[int]]:
        """Yields the tokens of further steps of plain rows, and ends before a step without numbers."""
        for _ in range(num_steps):
            self._columns.fill(rows, have_grown=True)
            self._run_step(len(rows), num_candidates=num_candidates)
            if self.device.is_host and not num_candidates:
                self._columns.pick(len(rows))
            token_ids = self._columns.read_token_ids(len(rows))
            if min(token_ids) < 0:
                self._have_grown = False  # so that the columns forget this step
                return
            yield token_ids

    def move(self, moves: Iterable[Move]) -> int:
        moves = tuple(moves)
        return sum(buffers.move_all(moves) for buffers in self._groups_of_buffers)

    def align(
        self,
        row: int,
        first_position: int,
        target_ids: tuple[int, ...],
        memory_length: int,
        adapter: int = NO_ADAPTER,
    ) -> Array:
        """Returns the attention of some positions of a row whose memory is filled.

        It is `(T, memory_length)`, or `(T, heads, memory_length)` of a model with alignment heads.

        Args:
            row: The row's slot.
            first_position: The first of the positions; the cache must contain all positions before it.
            target_ids: The token ids that the decoder is fed there.
            memory_length: The row's positions of memory.
            adapter: The row's adapter.
        """
        feeds: dict[str, Array] = {
            names.TARGET_IDS: np.array([target_ids], np.int64),
            names.LABEL_IDS: np.empty((1, 0), np.int64),
            names.SOURCE_LENGTHS: np.array([memory_length], np.int32),
            **self._adapter_ids([adapter]),
        }
        return self._decode(row, 1, first_position, feeds, names.ATTENTION)[0, ..., :memory_length].copy()

    def close(self) -> None:
        """Free all memory of the device and end its threads; the runner cannot be used afterwards."""
        self.device.pool.shutdown()
        self._bindings.clear()
        self._staged.clear()
        self._sessions.clear()
        self._buffers.clear()
        self._groups_of_buffers = ()
        self._state = []
        del self._columns, self._selector, self._select, self._adapters

    def _read_attention(self, rows: tuple[Sequence, ...]) -> dict[int, Array]:
        """Returns the step's attention, by row, for the rows whose requests want it."""
        if not self._columns.has_attention:
            return {}
        asking = [row for row, sequence in enumerate(rows) if sequence.request.attention]
        if not asking:
            return {}
        weights = self._columns.read_attention(len(rows), self._memory_capacity)
        return {row: weights[row : row + 1, ..., : rows[row].memory_length].copy() for row in asking}

    def _decode(
        self, first_row: int, num_rows: int, first_position: int, feeds: dict[str, Array], output: str
    ) -> Array:
        """Run several positions of some rows at once; returns the graph's `output`."""
        # Bound arrays must be contiguous and must live until the run has ended.
        feeds = {name: np.ascontiguousarray(array) for name, array in feeds.items()}
        feeds[names.FIRST_POSITION] = np.array(first_position, np.int32)
        binding = self._bind(Verb.DECODE, first_row, num_rows, feeds)
        self._sessions[Verb.DECODE].run_with_iobinding(binding)
        index = [spec.name for spec in self._graphs[Verb.DECODE].outputs].index(output)
        answer: Array = binding.get_outputs()[index].numpy()
        return answer

    @property
    def _memory_capacity(self) -> int:
        return int(self._capacities[names.MEMORY_CAPACITY])

    def _rounded(self, longest: int) -> int:
        """Returns the room beside running rows, in large steps, because each change copies their memory."""
        return min(-(-longest // _MEMORY_STEP) * _MEMORY_STEP, self._max_memory_length)

    def _fit_memory(self, capacity: int, num_rows: int) -> None:
        """On the host, change the room of each row's memory: see `Buffers.fit`."""
        if capacity == self._memory_capacity or not self._fitted or self.captures_steps:
            return
        given = self._memory_capacities.setdefault(capacity, np.array(capacity, np.int32))
        self._capacities[names.MEMORY_CAPACITY] = given
        for buffers in self._fitted:
            buffers.fit(capacity, num_rows)

    def _bind(self, verb: Verb, first_row: int, num_rows: int, feeds: Mapping[str, Any]) -> Any:
        """Bind a graph to `num_rows` rows from `first_row` on, and to arrays of the host or values."""
        binding = self._sessions[verb].io_binding()
        graph = self._graphs[verb]
        num_bound = self.num_slots if verb is Verb.STEP and self.takes_drafts else num_rows
        for spec in graph.inputs:
            if spec.name in self._buffers:
                self._buffers[spec.name].bind_input(binding, spec.name, first_row, num_bound)
            elif spec.name in feeds:
                self.device.bind_feed(binding, spec.name, feeds[spec.name])
            elif spec.role is Role.ADAPTER:
                assert self._adapters is not None
                self._adapters.bind_input(binding, spec.name)
            elif spec.role is Role.CAPACITY:
                binding.bind_cpu_input(spec.name, self._capacities[spec.name])
            else:
                self._columns.bind_input(binding, spec.name, num_rows)
        num_candidates = feeds.get(names.NUM_CANDIDATES, 0)
        for spec in graph.outputs:
            name = names.buffer_of(spec.name)
            if name in self._buffers:
                swaps = verb is Verb.STEP
                self._buffers[name].bind_output(binding, spec.name, first_row, num_bound, swaps=swaps)
            elif spec.role is Role.ATTENTION and verb is Verb.STEP:
                capacity = self._memory_capacity
                self._columns.bind_attention(binding, num_rows, capacity)
            elif spec.role is Role.LOGITS and not num_candidates:
                self._columns.bind_logits(self.device.bind_output, binding, num_rows)
            elif spec.name == names.CANDIDATE_IDS and num_candidates == 1:
                self._columns.bind_selected(binding, num_rows, spec.name)
            elif spec.role is Role.TOKEN:
                self._columns.bind_output(binding, spec, num_rows)
            else:
                binding.bind_output(spec.name, CPU)
        return binding

    def _run_step(
        self,
        num_rows: int,
        *,
        picks: bool = True,
        num_candidates: int = 0,
        places: Array = NOTHING_WANTED.places,
    ) -> Any:
        """Run the step over the first rows; with `picks` also a device's graph that selects the best tokens.

        A captured step runs the smallest bucket that holds the rows; the bucket's other rows are free.

        Args:
            num_rows: The number of rows.
            picks: Whether some row needs its most probable token.
            num_candidates: The number of candidates that the step finds itself, in the place of logits. The
                id of a single one is the next step's input.
            places: The rows and token ids `(p, 2)` whose log-probabilities the step looks up.

        Returns:
            The step's binding.
        """
        is_captured, state_copy = self.captures_steps, self._state_copy
        if is_captured:
            num_rows = self._buckets[bisect_left(self._buckets, num_rows)]
        key = num_rows, state_copy, num_candidates, bool(len(places)), self._memory_capacity
        bindings = self._bindings.pop(key, None) or self._bind_step(num_rows, num_candidates)
        self._bindings[key] = bindings
        if len(self._bindings) > 4 * self._columns.num_rows:
            del self._bindings[next(iter(self._bindings))]
        if len(places):
            bindings[0].bind_cpu_input(names.PLACES, places)
            bindings[0].bind_output(names.FOUND, CPU)  # of a size of its own
        sessions = [self._sessions[Verb.STEP]]
        if picks and self._select is not None:
            sessions.append(self._select)
        graph_id = num_rows + state_copy * (1 + self.num_slots)
        for session, binding in zip(sessions, bindings, strict=False):
            if is_captured:
                self.device.replay(session, binding, graph_id=graph_id)
            else:
                session.run_with_iobinding(binding)
        for buffers in self._state:
            buffers.swap()
        return bindings[0]

    @property
    def _state_copy(self) -> int:
        """The index of the state's current copy, which is the same for all tensors."""
        return self._state[0].copy if self._state else 0

    def _step_every_bucket(self) -> None:
        # The largest bucket comes first, because smaller ones reuse its memory. A CPU prepares only that one.
        for num_rows in reversed(self._buckets[-1:] if self.device.is_host else self._buckets):
            self._columns.fill((), have_grown=False)
            for _ in range(2 if self._state else 1):  # from either copy
                self._run_step(num_rows, num_candidates=int(self.chooses_tokens))

    def _load(self, verb: Verb, *, is_captured: bool = False) -> Session:
        assert self._files is not None
        graph, weights = self._files.graphs[verb], self._files.weights
        return self.device.session(verb, graph, weights, is_captured=is_captured)

    def _drop(self, verb: Verb) -> None:
        self._sessions.pop(verb, None)
        if verb is Verb.ENCODE:
            self._staged.clear()
        else:
            self._bindings.clear()
            self._select = None

    def _or_uncaptured(self, verb: Verb, action: Callable[[], None] = lambda: None) -> None:
        """Load a graph if it is not loaded, and run `action`; if that fails, try again without capturing.

        The first CUDA call after a failed capture may return the capture's error, so there is one more try.
        """
        num_left = 2 if self._captures[verb] else 0
        one, all_of_them = ("a step", "steps") if verb is Verb.STEP else ("an encode call", "encode calls")
        while True:
            try:
                if verb not in self._sessions:
                    is_captured = self._captures[verb]
                    self._sessions[verb] = self._load(verb, is_captured=is_captured)
                    if verb is Verb.STEP and not self._picks_in_step and not self.device.is_host:
                        self._select = self.device.weightless("greedy", is_captured=is_captured)
                action()
                return
            except Exception as error:  # ONNX Runtime's errors do not have a common class
                if not num_left:
                    raise
                num_left -= 1
                if self._captures[verb]:
                    message = f"%s: {all_of_them} are not captured as CUDA graphs, and are slower: %s"
                else:
                    message = f"%s: {one} failed after a capture that failed, and is tried once more: %s"
                _log.warning(message, self._path, one_line(error))
                self._captures[verb] = False
            # After the `except` block: inside it the exception's frames would keep the failed sessions alive.
            self._drop(verb)

    def _bind_step(self, num_rows: int, num_candidates: int) -> list[Any]:
        """Returns the bindings of the step and, if a second graph selects tokens, of that graph."""
        given = self._num_candidates.setdefault(num_candidates, np.array([num_candidates]))
        feeds = {names.NUM_CANDIDATES: given, names.PLACES: NOTHING_WANTED.places}
        bindings = [self._bind(Verb.STEP, 0, num_rows, feeds)]
        if self._select is not None:
            select = self._select.io_binding()
            self._columns.bind_logits(self.device.bind_input, select, num_rows)
            self._columns.bind_selected(select, num_rows, names.TOKEN_IDS)
            bindings.append(select)
        return bindings


def buckets_up_to(num_slots: int) -> tuple[int, ...]:
    """Returns the numbers of rows of warm-up steps and captured steps: 1, 2, 4, 8, 16, 24, 32, … `num_slots`.

    The smallest bucket that holds a step has at most twice its rows; from 16 rows on one and a half times.
    """
    sizes = {num_slots}
    power = 1
    while power < num_slots:
        between = power * 3 // 2 if power >= _FIRST_BETWEEN else power
        sizes |= {size for size in (power, between) if size < num_slots}
        power *= 2
    return tuple(sorted(sizes))


def _requests_of_every_selection(
    request: Request, times: Timestamps | None, *, detects: bool
) -> list[Request]:
    """Returns a plain request and others that together need every graph that selects a model's tokens."""
    constraints = Constraints(min_new_tokens=1, logit_bias={0: -1.0}, times=times)
    samplings = [
        Sampling(1.0, top_k, top_p, min_p=0.0, seed=0) for top_k, top_p in ((0, 1.0), (1, 1.0), (0, 0.5))
    ]
    return [
        request,
        replace(request, constraints=constraints, log_probabilities=True),
        replace(request, constraints=replace(constraints, is_renormalized=False), beam=Beam(1)),
        replace(request, beam=Beam(1), terms=RequiredTerms([Term((Spelling((0,)),))], ())),
        *(replace(request, sampling=sampling) for sampling in samplings),
        replace(request, is_score=True),
        *([replace(request, detected_ids=(0,))] if detects else []),
    ]


def _pad(arrays: list[Array], dtype: str, least: Iterable[int] = ()) -> Array:
    """Stacks arrays of different sizes, padded with zeros to at least some sizes: `(B, …)`."""
    least = tuple(least) or (0,) * arrays[0].ndim
    sizes = [max(sizes) for sizes in zip(least, *(array.shape for array in arrays), strict=True)]
    padded = np.zeros((len(arrays), *sizes), dtype)
    for row, array in zip(padded, arrays, strict=True):
        row[tuple(map(slice, array.shape))] = array
    return padded
