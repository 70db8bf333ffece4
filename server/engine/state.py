"""The decoding of a request, which the scheduler owns: its search, with a sequence for each slot."""

from __future__ import annotations

from dataclasses import dataclass, field

from seq2seq_serve.server.engine.ngrams import Lookup
from seq2seq_serve.server.engine.request import Array, Request
from seq2seq_serve.server.engine.result import FinishReason, Hypothesis, TokenScore
from seq2seq_serve.server.engine.terms import Progress


@dataclass(eq=False, slots=True)
class Search:
    """The decoding of one request. Owned by the scheduler; changed only on the engine's thread.

    Attributes:
        start_ids: The tokens that the decoder reads before the target: those before the first one that has to
            be detected, then also those that the steps have added.
        rows: The running hypotheses; in a beam the best first.
        memory_owner: The row whose memory a step reads for all of them, if the runner shares memory: at first
            the first one that is created.
        ended: The complete hypotheses by their place in the result: in a beam the rank, otherwise the index.
        num_sent: By place, the number of tokens that were streamed.
        num_slots: Number of slots that it holds.
        num_draft_tokens: Tokens that were drafted for it.
        num_accepted_tokens: Those of them that it selected, too.
        num_further_tokens: Tokens that it got in the same turn as an earlier one.
        finish_reason: None until the request has ended.
    """

    request: Request
    start_ids: tuple[int, ...]
    rows: list[Sequence] = field(default_factory=list)
    memory_owner: Sequence | None = None
    ended: dict[int, Hypothesis] = field(default_factory=dict)
    num_sent: dict[int, int] = field(default_factory=dict)
    num_slots: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_further_tokens: int = 0
    finish_reason: FinishReason | None = None
    admitted_at: float = 0.0
    encode_seconds: float = 0.0
    first_token_at: float = 0.0


@dataclass(eq=False, slots=True)
class Sequence:
    """One row being decoded. Owned by the scheduler; changed only on the engine's thread.

    A drafted position of a row is a sequence, too: the row as it will be if it selects the drafted tokens.

    Attributes:
        search: The search of its request.
        row: Its slot while it runs; None while it waits and when it has finished.
        next_token_id: The token that the next step is fed.
        index: Number of the hypothesis in its request; 0 in a beam.
        num_branches: Number of tokens that its next step selects; 0 for a row that only keeps the memory of a
            complete request until its alignments are computed.
        token_ids: Target tokens so far, the prefix included, without start tokens and the end of sequence.
        log_probability: The sum over its generated tokens; 0 for a plain request.
        token_scores: The requested details of each token, the end of sequence included.
        tail: The state of its request's stop rule.
        progress: What its target has of the required terms; None without any, and before its first generated
            token.
        is_plain: Whether its next step only has to select the most probable token.
        num_simple: Number of its next tokens that are only appended, unless one is an end of sequence; 0 if
            the next one needs more.
        num_forced: Number of start and prefix tokens that its steps still have to read.
        detects: Whether its next step detects a start token.
        attended: The attention of each of its steps, as in `Selected`, if the step computes it and the
            request wants it.
        lookup: Predicts its next tokens; None before the first draft.
        chance: Of a drafted position, that the row selects the tokens up to it.
        request: The request that it decodes for.
        memory_length: Positions in memory.
    """

    search: Search
    next_token_id: int
    row: int | None = None
    index: int = 0
    num_branches: int = 1
    token_ids: list[int] = field(default_factory=list)
    log_probability: float = 0.0
    token_scores: list[TokenScore] = field(default_factory=list)
    tail: bytes = b""
    progress: Progress | None = None
    is_plain: bool = True
    num_simple: int = 0
    num_forced: int = 0
    detects: bool = False
    attended: list[Array] = field(default_factory=list)
    lookup: Lookup | None = None
    chance: float = 1.0

    request: Request = field(init=False)
    memory_length: int = field(init=False)

    def __post_init__(self) -> None:
        self.request = self.search.request
        self.memory_length = self.request.memory_length
        self.search.memory_owner = self.search.memory_owner or self

    @property
    def cache_length(self) -> int:
        """Target positions already in the cache: the start tokens and all tokens fed since."""
        return len(self.search.start_ids) - 1 + len(self.token_ids)

    @property
    def forced_id(self) -> int | None:
        """The next start token or token of the prefix that a step reads; None after the last."""
        if not self.num_forced:
            return None
        return (*self.request.start_ids, *self.request.prefix_ids)[-self.num_forced]

    @property
    def num_generated(self) -> int:
        """Target tokens after the prefix."""
        return len(self.token_ids) - len(self.request.prefix_ids)

    @property
    def may_repeat_steps(self) -> bool:
        """Whether nothing but steps is needed for its next tokens."""
        return self.is_plain and self.selects_one and not self.request.attention

    @property
    def selects_one(self) -> bool:
        """Whether its next step selects one token, of a target that is not given."""
        request = self.request
        is_generated = self.num_branches == 1 and not (self.num_forced or self.detects or request.is_score)
        return is_generated and request.beam is None

    @property
    def num_draftable(self) -> int:
        """The most next tokens that can be drafted: the last token of a target is never fed."""
        return self.request.max_new_tokens - self.num_generated - 1
