"""The request of a caller to the engine: a source, the options of its target, and its expected cost.

Times are `time.monotonic()` seconds, lengths are tokens.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from seq2seq_serve.bundle.manifest import EarlyStopping, LengthPenalty, Timestamps
from seq2seq_serve.server.engine.stops import StopSequences
from seq2seq_serve.server.engine.terms import RequiredTerms

Array = npt.NDArray[Any]


# Estimates: a story's words are only looked up and added, and each frame of a clip, one position of memory,
# is read in places of the colours of 4 x 4 pixels. Of other sources the positions of memory count.
_WORDS_PER_TOKEN, _COLOURS_PER_TOKEN = 8, 48
_ENCODED_PER_STEP = 32  # tokens, which take about as long as a step of one row (a base model on a CPU)


@dataclass(frozen=True)
class Constraints:
    """Changes to the logits before a token is selected; `server.engine.constraints` computes them.

    Attributes:
        min_new_tokens: Number of tokens before which the end of sequence is forbidden.
        repetition_penalty: 1 is off.
        no_repeat_ngram_size: 0 is off.
        suppressed_token_ids: Tokens that are never selected, beside those that the model never selects.
        logit_bias: By token id, the number that is added to its logit.
        forbidden_after: By the last tokens, one or more of them, the tokens that must not follow these: they
            would complete an n-gram of the source, or a forbidden sequence.
        repeats_start: Whether the start tokens count as a part of the target for `repetition_penalty`,
            `no_repeat_ngram_size` and `forbidden_after`.
        is_renormalized: Whether the log-probabilities of a beam search are those among the allowed tokens.
            Otherwise they are changed instead of the logits, and do not add up to 1.
        penalizes_log_probabilities: Whether `repetition_penalty` changes the log-probabilities of a beam
            search, before these are those among the allowed tokens. Otherwise it changes the logits.
        times: The target has times, in pairs around what was said between them; None adds no rule.
    """

    min_new_tokens: int = 0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    suppressed_token_ids: frozenset[int] = frozenset()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    forbidden_after: Mapping[tuple[int, ...], frozenset[int]] = field(default_factory=dict)
    repeats_start: bool = False
    is_renormalized: bool = True
    times: Timestamps | None = None
    penalizes_log_probabilities: bool = False

    @functools.cached_property
    def change_logits(self) -> bool:
        """Whether any logit changes."""
        return any(
            (
                self.min_new_tokens,
                self.repetition_penalty != 1,
                self.no_repeat_ngram_size,
                self.suppressed_token_ids,
                self.logit_bias,
                self.forbidden_after,
                self.times,
            )
        )

    @functools.cached_property
    def change_log_probabilities(self) -> bool:
        """Whether the changes in a beam search are those of log-probabilities."""
        is_penalized = self.penalizes_log_probabilities and self.repetition_penalty != 1
        return is_penalized or not self.is_renormalized

    @functools.cached_property
    def penalized(self) -> tuple[frozenset[int], frozenset[tuple[int, float]]]:
        """The suppressed tokens and the biases: what a runner makes of them is shared by equal ones."""
        return self.suppressed_token_ids, frozenset(self.logit_bias.items())

    @functools.cached_property
    def forbidden_sizes(self) -> frozenset[int]:
        """The numbers of last tokens in `forbidden_after`."""
        return frozenset(map(len, self.forbidden_after))


NO_CONSTRAINTS = Constraints()
NO_ADAPTER = -1


@dataclass(frozen=True)
class Sampling:
    """Options for drawing a token.

    Without `top_k` and `top_p` every token is a candidate, in the order of the ids. Otherwise the candidates
    are the `top_k` most probable tokens, best first, until their probabilities add up to `top_p`.

    Attributes:
        temperature: Divides the logits.
        top_k: 0 is the whole vocabulary.
        top_p: Nucleus sampling (Holtzman et al. 2020, arXiv:1904.09751); 1 is off.
        min_p: Drops tokens less probable than this share of the best (Nguyen et al. 2024, arXiv:2407.01082).
        seed: The same seed gives the same tokens in any batch.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


@dataclass(frozen=True)
class Beam:
    """Options of beam search, which `server.engine.search` implements.

    Attributes:
        size: Number of hypotheses that are extended at once.
        alpha: Exponent of the length penalty; 0 ranks by log-probability.
        formula: The formula of the length penalty (`server.engine.search.length_penalty`).
        early_stopping: When the search ends, once `size` hypotheses are complete: at once (True), when the
            best running one would have a worse score at its present length (False), or when none can reach a
            better score ("never").
    """

    size: int
    alpha: float = 0.6
    formula: LengthPenalty = "wu"
    early_stopping: EarlyStopping = True


@dataclass(eq=False)
class Request:
    """One source of a client's call, as the engine decodes it; compared by identity. It does not change.

    Attributes:
        request_id: The caller's id, for the log.
        sources: The model's named inputs without the batch axis; once encoded, those of one axis.
        memory_length: Positions that it takes in memory, by which its size is counted: tokens of a text,
            sentences of a story, places of a picture, frames of a clip.
        max_new_tokens: At least 1, and at most the model's limit.
        arrival: When the server received it.
        deadline: When the caller stops waiting; None is never.
        attention: Whether the result contains the alignment.
        stream: Whether every new token is reported, or only the end.
        priority: 0 is the default; a lower number is more urgent. Live speech has half a step less than its
            caller asks for: it goes before what else has that priority.
        caller: Name of the caller; the requests of one caller share its part of slots and queue.
        sampling: None selects the most probable token.
        beam: None decodes one hypothesis; not together with `sampling`.
        num_hypotheses: Number of hypotheses in the result. With a beam they are its best, with sampling they
            are drawn independently. Otherwise they start with the most probable tokens after the prefix, and
            each is continued greedily.
        prefix_ids: Ids that the target is forced to start with; not counted in `max_new_tokens`.
        draft_ids: What probably follows the prefix, as in an earlier target of nearly the same source. Steps
            check it, so that it does not change the target.
        start_ids: The tokens that the decoder reads before a target; empty for the model's. In the place of
            None, the step selects the most probable of `detected_ids`. The first one is not None.
        detected_ids: The tokens of languages, one of which is detected.
        num_counted: Number of prefix ids that count as generated in the length penalty.
        begin_suppressed_ids: Tokens that are not selected directly after the prefix.
        ends_forced: Whether the last token of a target at its limit is the end of sequence, at no cost.
        stops: Ends a target early, after the prefix; None ends none.
        terms: The phrases that the target must have, only with a beam; None for none.
        is_score: Whether the prefix is a whole target, of which only the log-probabilities are computed.
        log_probabilities: Whether the result contains the log-probability of every generated token.
        num_alternatives: Number of most probable tokens that the result contains for each position.
        adapter: The place of its adapter among those of the runner; -1 for none.
        is_bounded: Whether `max_new_tokens` is the length bound of the model's bundle, for the metrics.
        number: Names it in the messages between the server and the processes of its cores.
        mode: How it is decoded: greedy, beam, sampling or score.
        num_slots: The number of rows that it may take at once.
        is_detailed: Whether the result contains more than the id of every token.
        is_plain: Whether a step only has to select its most probable token.
        free_beam: Whether it is a beam that is ranked by the step's own logits: the most probable ones alone,
            or also those of the tokens that its terms need.
        encode_tokens: The cost of encoding it, as the number of a text's tokens that take about as long. Long
            sentences of a story cost more than short ones, and a clip more than its number of frames.
        queue_tokens: Its size in the queue: its positions of memory, or the KiB of its arrays and terms if
            these are more.
    """

    request_id: str
    sources: dict[str, Array]
    memory_length: int
    max_new_tokens: int
    arrival: float
    deadline: float | None = None
    attention: bool = False
    stream: bool = False
    priority: float = 0
    caller: str = ""
    constraints: Constraints = NO_CONSTRAINTS
    sampling: Sampling | None = None
    beam: Beam | None = None
    num_hypotheses: int = 1
    prefix_ids: tuple[int, ...] = ()
    draft_ids: tuple[int, ...] = ()
    start_ids: tuple[int | None, ...] = ()
    detected_ids: tuple[int, ...] = ()
    num_counted: int = 0
    begin_suppressed_ids: frozenset[int] = frozenset()
    ends_forced: bool = False
    stops: StopSequences | None = None
    terms: RequiredTerms | None = None
    is_score: bool = False
    log_probabilities: bool = False
    num_alternatives: int = 0
    adapter: int = NO_ADAPTER
    is_bounded: bool = False
    number: int = field(init=False, default_factory=itertools.count().__next__)

    def __post_init__(self) -> None:
        """Derive what every turn asks for."""
        if self.is_score:
            self.mode = "score"
        else:
            is_drawn = self.sampling is not None
            self.mode = "beam" if self.beam is not None else "sampling" if is_drawn else "greedy"
        self.num_slots = self.num_hypotheses if self.beam is None else self.beam.size
        self.is_detailed = self.log_probabilities or self.num_alternatives > 0
        is_alone = self.mode in ("greedy", "score") and self.num_hypotheses == 1
        self.is_plain = is_alone and not self.constraints.change_logits and not self.is_detailed
        assert self.terms is None or self.beam is not None
        is_free = self.mode == "beam" and not self.begin_suppressed_ids and self.constraints == NO_CONSTRAINTS
        self.free_beam: Literal["", "alone", "with terms"] = ""
        if is_free:
            self.free_beam = "alone" if self.terms is None else "with terms"
        num_looked_up, num_bytes = 0, 0 if self.terms is None else self.terms.num_bytes
        for array in self.sources.values():
            num_bytes += array.nbytes
            if array.dtype.kind == "i":
                num_looked_up += array.size // _WORDS_PER_TOKEN
            elif array.dtype == np.uint8 and array.ndim == 4:
                num_looked_up += array.size // _COLOURS_PER_TOKEN
        self.encode_tokens = max(self.memory_length, num_looked_up)
        self.queue_tokens = max(self.memory_length, num_bytes // 1024)

    def drop_arrays(self) -> None:
        """Forget what only the encoder reads: a sound takes a megabyte, and it decodes for seconds."""
        for name in [name for name, array in self.sources.items() if array.ndim > 1]:
            del self.sources[name]

    def cost(self, *, feeds_prefix: bool, share: float = 1.0) -> Cost:
        """Returns what it probably costs to decode it: a step for each position of memory.

        That is about right for translations. A caption of a picture takes fewer.

        Args:
            feeds_prefix: Whether steps read the prefix, one token each; otherwise one call reads all of it.
            share: The steps that requests have taken, of those that were expected; its work has this share.
        """
        num_steps = 1 + len(self.prefix_ids) if feeds_prefix else 1
        if not self.is_score:
            least, most = self.constraints.min_new_tokens, self.max_new_tokens
            num_steps += max(least, min(most, self.memory_length))
        num_encoded = self.encode_tokens + (0 if feeds_prefix else len(self.prefix_ids))
        return Cost(num_steps, round(self.num_slots * num_steps * share) + num_encoded // _ENCODED_PER_STEP)


class Cost(NamedTuple):
    """The expected cost of a request.

    Attributes:
        num_steps: The number of steps that it takes.
        work: The steps of all its slots, with its encoding converted into steps.
    """

    num_steps: int
    work: int
