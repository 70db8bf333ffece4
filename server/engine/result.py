"""The records that a core returns: new tokens, the ends of requests, and the numbers of a turn.

Times are `time.monotonic()` seconds, lengths are tokens.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple, Self

import numpy as np

from seq2seq_serve.server.engine.request import Array, Request
from seq2seq_serve.server.errors import ServerError


class FinishReason(enum.Enum):
    """Why a sequence left the running batch."""

    EOS = "eos"  # the model ended it
    LENGTH = "length"  # it reached max_new_tokens, or the cache's capacity
    STOP = "stop"  # a stop sequence of the request
    CANCELLED = "cancelled"  # the caller went away
    DEADLINE = "deadline"  # the request's deadline passed
    FAILED = "failed"  # a step raised


Alternatives = tuple[tuple[int, float], ...]  # token ids with their log-probabilities, best first


class TokenScore(NamedTuple):
    """The log-probability of a selected token, and the best tokens at its position, best first."""

    log_probability: float
    alternatives: Alternatives = ()


class Hypothesis(NamedTuple):
    """A target that has ended.

    Attributes:
        token_ids: The whole target, the prefix included, without the end of sequence.
        attended: The attention in pieces of consecutive positions; empty if not requested.
        score: The sum of its log-probabilities, in a beam divided by the length penalty; 0 if plain.
        token_scores: One per generated or scored token, the end of sequence included; empty if not requested.
        missing: How often each of the required terms is missing; empty if none is.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    attended: list[Array]
    score: float = 0.0
    token_scores: tuple[TokenScore, ...] = ()
    missing: tuple[int, ...] = ()

    @property
    def attention(self) -> Array | None:
        """`(T, memory_length)` or `(T, hops or heads, memory_length)`; None if not requested.

        T counts the prefix and the end of sequence, too.
        """
        return np.concatenate(self.attended) if self.attended else None


class Load(NamedTuple):
    """The load of a core, or of all cores of a model.

    Attributes:
        num_waiting: Requests without a slot.
        num_running: Requests being decoded.
        num_slots_in_use: Slots that they hold, including those that a beam has reserved and not filled.
        num_cached: Cache positions in use.
    """

    num_waiting: int
    num_running: int
    num_slots_in_use: int
    num_cached: int


class Timings(NamedTuple):
    """The durations of a request's phases; all but `encode_seconds` begin at its arrival.

    Attributes:
        draft_tokens: The number of tokens that were drafted, which makes a request fast if they are accepted.
        accepted_tokens: The number of drafted tokens that it selected, too.
    """

    queue_seconds: float
    encode_seconds: float
    first_token_seconds: float
    total_seconds: float
    draft_tokens: int = 0
    accepted_tokens: int = 0


class Result(NamedTuple):
    """The end of a request.

    Attributes:
        hypotheses: At least one, of a beam the best first; incomplete or none if there is an error.
        num_target_tokens: Tokens that all hypotheses generated after the prefix, ends of sequence included.
        start_ids: The tokens that the decoder read before the target.
        error: None if the request succeeded.
        num_bounded: Number of hypotheses that ended at the length bound of the model's bundle.
    """

    finish_reason: FinishReason
    hypotheses: tuple[Hypothesis, ...]
    num_target_tokens: int
    num_source_tokens: int
    timings: Timings
    start_ids: tuple[int, ...] = ()
    error: ServerError | None = None
    num_bounded: int = 0

    @classmethod
    def without_targets(
        cls, request: Request, reason: FinishReason, error: ServerError, total_seconds: float
    ) -> Self:
        """Returns the end of a request that no core has decoded, or whose core is gone."""
        timings = Timings(0.0, 0.0, 0.0, total_seconds)
        return cls(reason, (), 0, request.memory_length, timings, error=error)

    @property
    def best(self) -> Hypothesis:
        """The first hypothesis."""
        return self.hypotheses[0]


class Update(NamedTuple):
    """New tokens of a streaming request, by the place of their hypothesis, or the end of any request."""

    request: Request
    token_ids: Mapping[int, list[int]]
    result: Result | None


class Turn(NamedTuple):
    """Everything that leaves a core's thread after one turn of its loop.

    Attributes:
        num_rows: Rows of its steps; 0 without one.
        num_steps: The number of steps.
        step_seconds: Their mean time.
        queue_seconds: The waiting time of each admitted request.
        inter_token_seconds: The times since the previous token, with the number of tokens for each. Tokens
            that a request gets in one turn share the time since the one before.
        load: After the turn; None if another one is delivered with it later.
        is_failing: Whether the last turns have raised.
        num_core_restarts: 1 in the place of a turn where a core that has ended by itself is started again.
        num_refused: In the place of a turn, the number of requests of a call that the engine does not accept.
    """

    updates: tuple[Update, ...] = ()
    num_rows: int = 0
    num_steps: int = 1
    step_seconds: float = 0.0
    encode_seconds: float = 0.0
    queue_seconds: tuple[float, ...] = ()
    first_token_seconds: tuple[float, ...] = ()
    inter_token_seconds: Mapping[float, int] = {}
    moved_bytes: int = 0
    load: Load | None = None
    is_failing: bool = False
    num_core_restarts: int = 0
    num_refused: int = 0
