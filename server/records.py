"""The records that the engine's parts hand to each other. They hold no behaviour and no tensors of the model.

Times are `time.monotonic()` seconds, lengths are tokens.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from server.errors import ServerError
from server.stopping import StopSequences

Array = npt.NDArray[Any]

_ENCODED_PER_STEP = 32  # tokens, which take about as long as a step of one row (a base model on a CPU)


class FinishReason(enum.Enum):
    """Why a sequence left the running batch."""

    EOS = "eos"  # the model ended it
    LENGTH = "length"  # max_new_tokens, or the cache's capacity
    STOP = "stop"  # a stop sequence of the request
    CANCELLED = "cancelled"  # the caller went away
    DEADLINE = "deadline"  # the request's deadline passed
    DISPLACED = "displaced"  # from a full queue
    FAILED = "failed"  # a step raised


@dataclass(frozen=True)
class Constraints:
    """What is done to the logits before a token is selected; `server.constraints` says how.

    Attributes:
        min_new_tokens: Number of tokens before which the end of sequence is forbidden.
        repetition_penalty: 1 is none.
        no_repeat_ngram_size: 0 is off.
        suppressed_token_ids: Never selected.
        logit_bias: Added to the logits of these token ids.
    """

    min_new_tokens: int = 0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    suppressed_token_ids: frozenset[int] = frozenset()
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    @property
    def is_fixed_in_part(self) -> bool:
        """Whether some logits change by the same at every position."""
        return bool(self.suppressed_token_ids or self.logit_bias)


NO_CONSTRAINTS = Constraints()


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    Without `top_k` and `top_p` every token is a candidate, in the order of the ids. Otherwise the candidates
    are the `top_k` most probable tokens, best first, up to where their probabilities reach `top_p`.

    Attributes:
        temperature: The logits are divided by it.
        top_k: 0 is the whole vocabulary.
        top_p: Nucleus sampling (Holtzman et al. 2020, arXiv:1904.09751); 1 is off.
        min_p: Drops tokens less probable than this share of the best (Nguyen et al. 2024, arXiv:2407.01082).
        seed: The same seed gives the same tokens, whatever the neighbours.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


@dataclass(frozen=True)
class Beam:
    """Beam search; `server.search` says how.

    Attributes:
        size: Number of hypotheses that are extended at once.
        alpha: Exponent of the length penalty; 0 ranks by log-probability.
        early_stopping: Whether the search ends as soon as `size` hypotheses are complete; otherwise it ends
            when no running one can reach a better score.
    """

    size: int
    alpha: float = 0.6
    early_stopping: bool = True


@dataclass(frozen=True, eq=False)
class Request:
    """One client call, as the engine sees it; compared by identity.

    Attributes:
        request_id: The caller's id, for the log.
        sources: The model's named inputs without the batch axis; token ids are int64 `(S,)`.
        max_new_tokens: At least 1, and not over the model's limit.
        arrival: When the server received it.
        deadline: When the caller stops waiting; None for never.
        attention: Whether the result contains the alignment.
        stream: Whether every new token is reported, or only the end.
        priority: 0 is the default; a lower number is more urgent.
        caller: Name of the caller; the requests of one caller share its part of slots and queue.
        sampling: None selects the most probable token.
        beam: None follows one hypothesis; not together with `sampling`.
        num_hypotheses: Number of hypotheses in the result. With a beam they are its best, with sampling they
            are drawn independently. Otherwise they start with the most probable tokens after the prefix, and
            each is continued greedily.
        prefix_ids: Ids that the target is forced to start with; not counted in `max_new_tokens`.
        stops: Texts that end a target wherever they come after the prefix; None for none.
        is_score: Whether the prefix is a whole target, and only its log-probabilities are asked for.
        log_probabilities: Whether the result contains the log-probability of every generated token.
        num_alternatives: Number of most probable tokens that the result contains for each position.
        is_bounded: Whether `max_new_tokens` is the bound of the model's bundle, for the metrics.
    """

    request_id: str
    sources: Mapping[str, Array]
    max_new_tokens: int
    arrival: float
    deadline: float | None = None
    attention: bool = False
    stream: bool = False
    priority: int = 0
    caller: str = ""
    constraints: Constraints = NO_CONSTRAINTS
    sampling: Sampling | None = None
    beam: Beam | None = None
    num_hypotheses: int = 1
    prefix_ids: tuple[int, ...] = ()
    stops: StopSequences | None = None
    is_score: bool = False
    log_probabilities: bool = False
    num_alternatives: int = 0
    is_bounded: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether a step only has to select its most probable token."""
        return (
            self.sampling is None
            and self.beam is None
            and self.num_hypotheses == 1
            and not self.is_constrained
            and not self.is_detailed
        )

    @functools.cached_property
    def is_constrained(self) -> bool:
        """Whether anything is done to the logits before a token is selected."""
        return self.constraints != NO_CONSTRAINTS

    @property
    def is_detailed(self) -> bool:
        """Whether the result contains more of every token than its id."""
        return self.log_probabilities or self.num_alternatives > 0

    @property
    def num_slots(self) -> int:
        """How many rows it may take at once."""
        return self.num_hypotheses if self.beam is None else self.beam.size

    @functools.cached_property
    def expected_steps(self) -> int:
        """Returns the steps it is expected to take: a target is about as long as its source."""
        if self.is_score:
            return 1
        return 1 + max(self.constraints.min_new_tokens, min(self.max_new_tokens, self.source_length))

    @functools.cached_property
    def work(self) -> int:
        """Returns its expected cost: steps of single slots, and encoding in the same unit of time."""
        num_encoded = self.source_length + len(self.prefix_ids)
        return self.num_slots * self.expected_steps + num_encoded // _ENCODED_PER_STEP

    @functools.cached_property
    def source_length(self) -> int:
        """Positions that the request takes in memory: the longest source's."""
        return max(len(array) for array in self.sources.values())


Alternatives = tuple[tuple[int, float], ...]  # token ids with their log-probabilities, best first


@dataclass(frozen=True, slots=True)
class Choice:
    """A selected token's log-probability, and those of the best ones at its position, best first."""

    log_probability: float
    alternatives: Alternatives = ()


@dataclass(frozen=True, slots=True)
class Branches:
    """The tokens that a step selected for a row, best first, or in the order in which they were drawn.

    Attributes:
        alternatives: The most probable tokens, if the row's request asked for them.
    """

    token_ids: list[int]
    log_probabilities: list[float]
    alternatives: Alternatives = ()


@dataclass(frozen=True, slots=True)
class Selected:
    """What a step selected.

    Attributes:
        token_ids: One per row.
        branches: By row, of those whose requests are not plain.
        failures: The error that the selection raised for a row; other rows are not affected.
    """

    token_ids: list[int]
    branches: Mapping[int, Branches] = field(default_factory=dict)
    failures: Mapping[int, Exception] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A target as it ended.

    Attributes:
        token_ids: The whole target, the prefix included, without the end of sequence.
        finish_reason: Why it ended.
        score: The sum of its log-probabilities, of a beam over the length penalty; 0 for a plain request.
        choices: One per generated or scored token, the end of sequence included; empty where nobody asked.
        attention: `(T, source_length)`, T with prefix and end of sequence, or None.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    score: float = 0.0
    choices: tuple[Choice, ...] = ()
    attention: Array | None = None


@dataclass(eq=False, slots=True)
class Search:
    """The decoding of one request. Owned by the scheduler; changed only on the engine's thread.

    Attributes:
        rows: The hypotheses that go on; of a beam the best first.
        ended: Those that are complete, by their place in the result: of a beam their rank, else their index.
        num_told: By place, the number of tokens that a streaming request has been sent.
        num_slots: Number of slots that it holds.
        finish_reason: None until the request has ended.
        admitted_turn: The number of the turn that admitted it; None where none has.
        alignments: By place, the attention of complete hypotheses, as far as it is computed, in pieces of
            consecutive positions.
    """

    request: Request
    rows: list[Sequence] = field(default_factory=list)
    ended: dict[int, Hypothesis] = field(default_factory=dict)
    num_told: dict[int, int] = field(default_factory=dict)
    num_slots: int = 0
    finish_reason: FinishReason | None = None
    admitted_turn: int | None = None
    alignments: dict[int, list[Array]] = field(default_factory=dict)
    admitted_at: float = 0.0
    encode_seconds: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0


@dataclass(eq=False, slots=True)
class Sequence:
    """One row being decoded. Owned by the scheduler; changed only on the engine's thread.

    Attributes:
        search: Of the request that it decodes for.
        row: Its slot while it runs; None while it waits and when it has finished.
        next_token_id: What the next step is fed.
        index: Number of the hypothesis in its request; 0 in a beam.
        num_branches: Number of tokens that its next step selects; 0 for a row that only keeps the memory of a
            complete request until its alignments are computed.
        token_ids: Target tokens so far, the prefix included, without the start token and the end of sequence.
        log_probability: The sum over its generated tokens; 0 for a plain request.
        choices: The details that its request asked for of each token, the end of sequence included.
        tail: The end of the target that may begin one of the request's stop sequences.
        is_plain: Its request's.
    """

    search: Search
    next_token_id: int
    source_length: int
    row: int | None = None
    index: int = 0
    num_branches: int = 1
    token_ids: list[int] = field(default_factory=list)
    log_probability: float = 0.0
    choices: list[Choice] = field(default_factory=list)
    tail: bytes = b""
    is_plain: bool = True

    @property
    def request(self) -> Request:
        """The request that it decodes for."""
        return self.search.request

    @property
    def cache_length(self) -> int:
        """Target positions already in the cache: the start token and all tokens fed since."""
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        """Target tokens after the prefix."""
        return len(self.token_ids) - len(self.search.request.prefix_ids)


@dataclass(frozen=True, slots=True)
class Move:
    """The content of one row is copied into another, live positions only.

    Attributes:
        source_length: 0 leaves the other row's memory as it is: both rows are one request's.
        num_shared: Number of first cache positions that are alike in both rows, and are not copied.
    """

    from_row: int
    to_row: int
    cache_length: int
    source_length: int
    num_shared: int = 0


@dataclass(frozen=True, slots=True)
class Alignment:
    """A piece of a complete hypothesis whose attention a turn computes.

    Attributes:
        row: Keeps the memory of the request.
        place: Of the hypothesis in the result.
        first_position: Number of target positions before it, which earlier pieces covered.
        target_ids: Ids that the decoder was fed from there on.
    """

    row: Sequence
    place: int
    first_position: int
    target_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the next step will run: a value, decided by the scheduler, carried out by the runner.

    Order: the moves, then the alignments, then one encode of `admitted` into the last rows, then one step of
    all `rows`.

    Attributes:
        moves: Rows to copy, in order.
        admitted: Newcomers; they are the last of `rows`.
        rows: All running sequences; the sequence at index i is in slot i.
        alignments: In order.
    """

    moves: tuple[Move, ...]
    admitted: tuple[Sequence, ...]
    rows: tuple[Sequence, ...]
    alignments: tuple[Alignment, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced.

    Attributes:
        selected: For the rows of the plan.
        encode_seconds: Time of the encode call; 0 where nobody was admitted.
        step_seconds: Time of the step and its selection.
        moved_bytes: Bytes copied by the moves.
        attention: `(T, source_length)` of each alignment, or what it raised.
    """

    selected: Selected
    encode_seconds: float
    step_seconds: float
    moved_bytes: int
    attention: tuple[Array | Exception, ...] = ()


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a request's time went, in seconds."""

    queue_seconds: float
    encode_seconds: float
    first_token_seconds: float
    total_seconds: float


@dataclass(frozen=True, slots=True)
class Result:
    """How a request ended.

    Attributes:
        hypotheses: At least one, of a beam the best first; incomplete or none where there is an error.
        num_target_tokens: Generated after the prefix, the ends of sequence included, of all hypotheses.
        error: Set where the request did not succeed.
        num_bounded: Hypotheses that ended at the bound of the model's bundle.
    """

    finish_reason: FinishReason
    hypotheses: tuple[Hypothesis, ...]
    num_target_tokens: int
    num_source_tokens: int
    timings: Timings
    error: ServerError | None = None
    num_bounded: int = 0

    @property
    def best(self) -> Hypothesis:
        """The first hypothesis."""
        return self.hypotheses[0]


@dataclass(frozen=True, slots=True)
class Update:
    """News of one request: new tokens of a streaming one, by the place of their hypothesis, or its end."""

    request: Request
    token_ids: Mapping[int, list[int]]
    result: Result | None


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one turn of the engine did, for the metrics; filled by the engine, read by `server.metrics`.

    Attributes:
        num_rows: Rows of the step; 0 for a turn without one.
        queue_seconds: Of those who were admitted.
        inter_token_seconds: Per request that had a token before: the time since.
        results: Of the requests that ended in this turn.
    """

    num_rows: int
    step_seconds: float
    encode_seconds: float
    queue_seconds: tuple[float, ...]
    first_token_seconds: tuple[float, ...]
    inter_token_seconds: tuple[float, ...]
    results: tuple[Result, ...]
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class Turn:
    """Everything that leaves the engine's thread after one turn of its loop."""

    updates: tuple[Update, ...]
    stats: StepStats
