"""The plan of a turn, which the scheduler makes, and what the runner does for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from seq2seq_serve.bundle.adapters import Weights
from seq2seq_serve.server.engine.request import NO_ADAPTER, Array, Request
from seq2seq_serve.server.engine.result import Alternatives
from seq2seq_serve.server.engine.state import Sequence


@dataclass(frozen=True, slots=True)
class Branches:
    """The tokens that a step selected for a row, best first, or in the order in which they were drawn.

    Attributes:
        alternatives: The most probable tokens, if the row's request wants them.
    """

    token_ids: list[int]
    log_probabilities: list[float]
    alternatives: Alternatives = ()


class Wanted(NamedTuple):
    """The tokens that terms want, whose log-probabilities a step or a graph looks up.

    Attributes:
        places: `(p, 2)`: rows and token ids, one row after the other.
        num_left: `(p,)`: the fewest tokens that complete all terms of the row after each token.
    """

    places: Array
    num_left: Array

    @classmethod
    def by(cls, sequences: Iterable[Sequence]) -> Wanted:
        """Returns the tokens that the terms of some rows want."""
        rows, token_ids, num_left = list[int](), list[int](), list[int]()
        for row, sequence in enumerate(sequences):
            terms, progress = sequence.request.terms, sequence.progress
            if terms is not None and progress is not None:
                wanted = terms.wanted(progress)
                rows += [row] * len(wanted)
                token_ids += wanted
                num_left += wanted.values()
        return cls(np.array([rows, token_ids], np.int64).T.copy(), np.array(num_left, np.int64))


NOTHING_WANTED = Wanted.by([])


@dataclass(frozen=True, slots=True)
class Candidates:
    """The most probable next tokens of the rows of beams, best first: K for each of m rows.

    Attributes:
        places: By row, its index in the arrays.
        token_ids: `(m, K)`.
        log_probabilities: `(m, K)`; minus infinity for a forbidden token.
        wanted: The tokens that terms want; their rows are indices in the arrays.
        found: `(p,)`: the log-probabilities of the wanted tokens.
    """

    places: Mapping[int, int]
    token_ids: Array
    log_probabilities: Array
    wanted: Wanted
    found: Array


@dataclass(frozen=True, slots=True)
class Selected:
    """The tokens that a step selected.

    Attributes:
        token_ids: One per row, then one per drafted position; without a meaning for the rows of beams.
        branches: By row, for the rows whose requests are neither plain nor beams.
        candidates: Those of the rows of beams. All rows of a request are in one of them.
        failures: By row, the error that the selection raised; other rows are not affected.
        further: The tokens of each further step of the same rows, one per row.
        attention: By row, the step's attention `(1, memory_length)`, or `(1, hops, memory_length)`, for the
            rows whose requests want it, if the step computes it.
    """

    token_ids: list[int]
    branches: Mapping[int, Branches] = field(default_factory=dict)
    candidates: tuple[Candidates, ...] = ()
    failures: Mapping[int, Exception] = field(default_factory=dict)
    attention: Mapping[int, Array] = field(default_factory=dict)
    further: tuple[list[int], ...] = ()


class Move(NamedTuple):
    """A copy of one row's live positions into another row.

    Attributes:
        memory_length: 0 copies no memory: both rows belong to one request, or the row has none to read.
        num_shared: Number of first cache positions that are equal in both rows and are not copied.
    """

    from_row: int
    to_row: int
    cache_length: int
    memory_length: int
    num_shared: int = 0


@dataclass(frozen=True, slots=True)
class Alignment:
    """A piece of a complete hypothesis whose attention a turn computes.

    Attributes:
        row: The row that keeps the memory of the request.
        place: The hypothesis' place in the result.
        first_position: Number of cache positions before the piece: start tokens, and those of earlier pieces.
        target_ids: The ids that the decoder was fed from that position on.
    """

    row: Sequence
    place: int
    first_position: int
    target_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of the next turn, which the scheduler decides and the engine runs.

    The order is: the moves, the alignments, one encode of `admitted` into the last rows, one step of all
    `rows` and `drafts`, or several steps of the rows.

    Attributes:
        moves: Rows to copy, in order.
        admitted: The newcomers, which are the last of `rows`.
        rows: All running sequences; the sequence at index i is in slot i.
        alignments: In order.
        drafts: Further positions of some of the rows, each row's in order.
        num_steps: More than 1 only without drafts, for rows whose next tokens need nothing but the steps.
    """

    moves: tuple[Move, ...]
    admitted: tuple[Sequence, ...]
    rows: tuple[Sequence, ...]
    alignments: tuple[Alignment, ...] = ()
    drafts: tuple[Sequence, ...] = ()
    num_steps: int = 1


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a plan.

    Attributes:
        selected: The tokens of the plan's rows.
        num_rows: The number of rows that needed the step.
        encode_seconds: Time of the encode call; 0 without one.
        step_seconds: Mean time of a step and its selection.
        moved_bytes: Bytes copied by the moves.
        attention: `(T, memory_length)` of each alignment, or the exception that it raised.
    """

    selected: Selected
    num_rows: int
    encode_seconds: float
    step_seconds: float
    moved_bytes: int
    attention: tuple[Array | Exception, ...] = ()


class Runner(Protocol):
    """Runs the graphs for an engine; `server.runner.runner.OnnxRunner` implements it.

    Attributes:
        num_slots: Rows of the buffers.
        vocab_size: V.
        start_ids: The tokens that a sequence is fed first.
        eos_ids: The tokens that end a sequence; the first one ends a target that is scored.
        has_decode: Whether it can `prefill` and `align`; otherwise steps read prefixes and compute attention.
        shares_memory: Whether a step reads the memory of a request in its owner's row only.
        repeats_steps: Whether it can do several steps in one call.
    """

    num_slots: int
    vocab_size: int
    start_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    has_decode: bool
    shares_memory: bool
    repeats_steps: bool

    def warm_up(self) -> None:
        """Does first-time work, on the thread that makes all later calls."""

    def encode(self, first_row: int, requests: list[Request]) -> None:
        """Encodes new requests into the memory of the rows from `first_row` on."""

    def prefill(self, first_row: int, sequences: tuple[Sequence, ...]) -> list[list[float]]:
        """Fills the caches of new rows from their prefixes; returns the log-probabilities of scored rows."""

    def step(self, rows: tuple[Sequence, ...], num_steps: int = 1) -> Selected:
        """Feeds every row its last token, and selects its next one.

        With a `Drafter`, further positions of the rows follow the rows. Of several steps each feeds the token
        that the one before has selected; there may be fewer than `num_steps`.
        """

    def move(self, moves: Iterable[Move]) -> int:
        """Copies rows in order; returns the number of bytes copied."""

    def align(
        self,
        row: int,
        first_position: int,
        target_ids: tuple[int, ...],
        memory_length: int,
        adapter: int = NO_ADAPTER,
    ) -> Array:
        """Returns the attention `(T, memory_length)` of the positions after those in the row's cache."""

    def write_adapter(self, place: int, weights: Weights) -> None:
        """Replaces an adapter, which no request has at present, by the weights of another one."""

    def close(self) -> None:
        """Frees all memory; called last, on the same thread."""
