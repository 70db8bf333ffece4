"""The choices of a server, computed one token at a time: constraints on logits, samples, scores of targets.

Tests compare the server with them. The searches without constraints are in `training.evaluation.search`. The
models at the end have logits that a test prescribes.
Shapes: V vocabulary.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from seq2seq_serve.server.engine.terms import Spelling, Term
from seq2seq_serve.training.config import TransformerConfig
from seq2seq_serve.training.evaluation import search
from seq2seq_serve.training.evaluation.search import (
    Hypothesis,
    check_limits,
    encode,
    next_logits,
)
from seq2seq_serve.training.models.base import EncoderDecoder
from seq2seq_serve.training.models.transformer import Transformer

_FORBIDDEN = -math.inf


@dataclass(frozen=True)
class Constraints:
    """Conditions on a target; the defaults constrain nothing.

    The target so far is the prefix and the generated tokens, without bos. The logits of the next token are
    adjusted to it in this order:

    1. The logit x of every token of the target becomes x / repetition_penalty if x is positive, otherwise
       x * repetition_penalty; once, however often the target has the token. Keskar et al. 2019, section 4.1,
       arXiv:1909.05858, always divide, which would favour repetition where x is negative.
    2. The biases are added.
    3. Forbidden tokens get minus infinity. If that forbids all tokens, eos is allowed after all: its
       log-probability is 0, and the hypothesis ends.

    Log-probabilities are the log-softmax of the adjusted logits.

    Attributes:
        min_new_tokens: Eos is forbidden before this many tokens have been generated after the prefix.
        repetition_penalty: A value above 1 makes repetition less probable.
        no_repeat_ngram_size: A token is forbidden if it would repeat a sequence of this many tokens that the
            target already has; 0 forbids none.
        suppressed_token_ids: Tokens that are always forbidden.
        logit_bias: The value added to a token's logit, by token id.
        prefix_ids: The tokens with which every target starts, after bos. The prefix is forced: nothing is
            forbidden in it, and it counts neither as new tokens nor in a log-probability.
    """

    min_new_tokens: int = 0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    suppressed_token_ids: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    prefix_ids: tuple[int, ...] = ()

    def adjust(self, logits: Tensor, target_ids: Sequence[int], eos_id: int) -> Tensor:
        """The adjusted logits (V,), in float64, of the token after the target so far."""
        adjusted = logits.to(torch.float64, copy=True)  # (V,)
        for token_id in set(target_ids):
            x = float(adjusted[token_id])
            adjusted[token_id] = x / self.repetition_penalty if x > 0 else x * self.repetition_penalty
        for token_id, bias in self.logit_bias.items():
            adjusted[token_id] += bias
        for token_id in self._forbidden(target_ids, eos_id):
            adjusted[token_id] = _FORBIDDEN
        if bool((adjusted == _FORBIDDEN).all()):
            adjusted[eos_id] = 0.0
        return adjusted

    def _forbidden(self, target_ids: Sequence[int], eos_id: int) -> set[int]:
        forbidden = {*self.suppressed_token_ids}
        if len(target_ids) - len(self.prefix_ids) < self.min_new_tokens:
            forbidden.add(eos_id)
        if self.no_repeat_ngram_size > 0:
            num_before = self.no_repeat_ngram_size - 1
            tail = target_ids[len(target_ids) - num_before :]
            for end in range(num_before, len(target_ids)):
                if target_ids[end - num_before : end] == tail:
                    forbidden.add(target_ids[end])
        return forbidden


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from adjusted logits; the defaults draw from the model's own distribution.

    With top_k or top_p, the candidates are the top_k best tokens, best first (equal ones: the lower id).
    Otherwise they are all tokens in the order of their ids, which needs no sorting. Their probabilities p are
    the softmax of logit / temperature over the candidates. A candidate is kept if the candidates before it
    have less than top_p of the probability, and if its p is at least min_p times the largest p. The drawn
    token is the first kept one at which the running sum of kept probabilities exceeds the uniform number
    times their total.

    Attributes:
        temperature: A value below 1 sharpens the distribution, above 1 flattens it.
        top_k: The number of candidates; 0 takes all tokens.
        top_p: Nucleus sampling: Holtzman et al. 2020, section 3.1, arXiv:1904.09751. 1 keeps all.
        min_p: Nguyen et al. 2024, arXiv:2407.01082. 0 keeps all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def draw(self, logits: Tensor, uniform: float) -> int:
        """The token id that a uniform number in [0, 1) draws from adjusted logits (V,)."""
        is_sorted = self.top_k > 0 or self.top_p < 1
        if is_sorted:
            token_ids = logits.sort(descending=True, stable=True).indices  # (V,)
            token_ids = token_ids[: self.top_k or None]  # (candidates,)
        else:
            token_ids = torch.arange(len(logits), device=logits.device)
        candidates = logits[token_ids]
        # The largest logit is subtracted, so that dividing by a low temperature does not overflow.
        p = ((candidates - candidates.max()) / self.temperature).softmax(dim=0)
        is_kept = p >= self.min_p * p.max()
        if is_sorted:
            sums_before = nn.functional.pad(p.cumsum(dim=0)[:-1], (1, 0))
            is_kept &= sums_before < self.top_p
        running_sums = torch.where(is_kept, p, 0.0).cumsum(dim=0)
        is_beyond = running_sums > uniform * running_sums[-1]
        return int(token_ids[is_beyond.nonzero()[0, 0]])


NO_CONSTRAINTS = Constraints()


def beam_search(
    model: EncoderDecoder,
    source_ids: Sequence[int],
    *,
    eos_id: int,
    constraints: Constraints = NO_CONSTRAINTS,
    **options: Any,
) -> list[Hypothesis]:
    """`search.beam_search` with constraints."""
    return search.beam_search(
        model,
        source_ids,
        eos_id=eos_id,
        prefix_ids=constraints.prefix_ids,
        adjust=lambda logits, target_ids: constraints.adjust(logits, target_ids, eos_id),
        **options,
    )


def greedy_hypothesis(
    model: EncoderDecoder,
    source_ids: Sequence[int],
    *,
    bos_id: int,
    eos_id: int,
    max_new_tokens: int,
    constraints: Constraints = NO_CONSTRAINTS,
) -> Hypothesis:
    """Greedy search of one source, with log-probabilities; its score is their sum."""

    def most_probable(logits: Tensor, _: int) -> int:
        return int(logits.argmax())

    return _search_one(model, source_ids, bos_id, eos_id, max_new_tokens, constraints, most_probable)


def sample_search(
    model: EncoderDecoder,
    source_ids: Sequence[int],
    *,
    bos_id: int,
    eos_id: int,
    max_new_tokens: int,
    sampling: Sampling,
    uniforms: Callable[[int], float],
    constraints: Constraints = NO_CONSTRAINTS,
) -> Hypothesis:
    """Draw the target of one source token by token; its score is the sum of its log-probabilities.

    Log-probabilities are those of the adjusted logits at temperature 1, whatever the sampling. `uniforms`
    maps the position of a generated token, from 0, to the number in [0, 1) that draws it.
    """

    def drawn(logits: Tensor, position: int) -> int:
        return sampling.draw(logits, uniforms(position))

    return _search_one(model, source_ids, bos_id, eos_id, max_new_tokens, constraints, drawn)


@torch.inference_mode()
def score_target(
    model: EncoderDecoder, source_ids: Sequence[int], target_ids: Sequence[int], *, bos_id: int, eos_id: int
) -> list[float]:
    """The log-probability of each token of a target, given without bos and eos, and of eos after it."""
    memory, source_mask = encode(model, [source_ids])
    given = torch.tensor([[bos_id, *target_ids]], device=source_mask.device)  # (1, T)
    log_probabilities = model.decode(given, memory, source_mask)[0].double().log_softmax(dim=-1)  # (T, V)
    return [float(log_probabilities[place, token_id]) for place, token_id in enumerate([*target_ids, eos_id])]


@torch.inference_mode()
def _search_one(
    model: EncoderDecoder,
    source_ids: Sequence[int],
    bos_id: int,
    eos_id: int,
    max_new_tokens: int,
    constraints: Constraints,
    choose: Callable[[Tensor, int], int],
) -> Hypothesis:
    """Search with one hypothesis; `choose` takes each token from the adjusted logits (V,) of its position."""
    check_limits(model, [source_ids], max_new_tokens, constraints.prefix_ids)
    memory, source_mask = encode(model, [source_ids])
    target = list(constraints.prefix_ids)
    log_probabilities: list[float] = []
    is_finished = False
    while len(log_probabilities) < max_new_tokens and not is_finished:
        logits = next_logits(model, [[bos_id, *target]], memory, source_mask)[0]  # (V,)
        adjusted = constraints.adjust(logits, target, eos_id)
        token_id = choose(adjusted, len(log_probabilities))
        log_probabilities.append(float(adjusted.log_softmax(dim=-1)[token_id]))
        is_finished = token_id == eos_id
        if not is_finished:
            target.append(token_id)
    return Hypothesis(target, log_probabilities, sum(log_probabilities), is_finished)


@dataclass(frozen=True)
class Terms:
    """Phrases that a target must have, found by reading the whole target again.

    It is read from left to right. At each place the longest spelling of a term that is still missing counts,
    and the reading goes on behind it; where there is none, it goes on with the next token. If the rest of a
    target that goes on is a spelling, or the beginning of one, nothing is decided there yet.

    Attributes:
        terms: The terms.
        begins_inside: The tokens that continue a word.
        closing: The tokens after which no word may stand.
        marks: The tokens that begin with a mark.
        gluing: The tokens after which no exact term may stand that needs a break.
        brackets: The tokens that end with an opening bracket.
    """

    terms: tuple[Term, ...]
    begins_inside: frozenset[int] = frozenset()
    closing: frozenset[int] = frozenset()
    marks: frozenset[int] = frozenset()
    gluing: frozenset[int] = frozenset()
    brackets: frozenset[int] = frozenset()

    def read(self, target: Sequence[int], *, has_ended: bool) -> tuple[list[int], list[int]]:
        """How often each term is missing, and the undecided rest of the target."""
        missing, place = [term.number for term in self.terms], 0
        while place < len(target):
            rest, found = list(target[place:]), (0, 0)
            for number, ids, stands_before_break in self._open(missing, target[:place]):
                if not has_ended and rest == ids[: len(rest)]:
                    return missing, rest
                behind = rest[len(ids) : len(ids) + 1]
                is_whole = rest[: len(ids)] == ids and (has_ended or behind)
                if is_whole and not (stands_before_break and self.begins_inside.intersection(behind)):
                    found = max(found, (len(ids), -number))
            if found[0]:
                missing[-found[1]] -= 1
            place += max(found[0], 1)
        return missing, []

    def _open(self, missing: list[int], before: Sequence[int]) -> Iterator[tuple[int, list[int], bool]]:
        """The spellings of missing terms that may stand after a target."""
        for number, term in enumerate(self.terms):
            for ids, begins_after_break, ends_before_break, _ in term.spellings:
                is_allowed = not (begins_after_break and self.closing.intersection(before[-1:]))
                if missing[number] and is_allowed:
                    yield number, list(ids), ends_before_break

    def num_left(self, target: Sequence[int]) -> int:
        """The fewest tokens that are needed after a target that goes on."""
        missing, rest = self.read(target, has_ended=False)
        costs = []
        for term in self.terms:
            anywhere = [len(each[0]) for each in term.spellings if not each.begins_after_break]
            costs.append(min(anywhere or [len(each[0]) for each in term.spellings]))
        gains = [0]
        for number, ids, _ in self._open(missing, target[: len(target) - len(rest)]):
            if rest and ids[: len(rest)] == rest:
                gains.append(costs[number] + len(rest) - len(ids))
        at_end, _ = self.read(target, has_ended=True)
        going_on, ending = (
            sum(cost * number for cost, number in zip(costs, each, strict=True)) for each in (missing, at_end)
        )
        return min(going_on - max(gains), ending)

    def wanted(self, target: Sequence[int]) -> set[int]:
        """The tokens after which a target ends with a spelling of a missing term, or the beginning of one."""
        spellings = [spelling for term in self.terms for spelling in term.spellings]
        ids = {token_id for spelling in spellings for token_id in spelling.token_ids}
        return {token_id for token_id in ids if self.read([*target, token_id], has_ended=False)[1]}

    def spoils(self, target: list[int]) -> bool:
        """Whether the end of a target has an exact term too often, or without its breaks."""
        return self._repeats(target) or self._glues(target)

    def _glues(self, target: list[int]) -> bool:
        """Whether the end of a target continues a word with an exact term, or an exact term with a word."""
        before, last = target[:-1], target[-1]
        missing, rest = self.read(before, has_ended=False)
        _, rest_after = self.read(target, has_ended=False)
        begun = [
            (term.is_exact, self._may_follow(spelling, before))
            for term, number in zip(self.terms, missing, strict=True)
            for spelling in term.spellings
            if number and spelling.token_ids[0] == last
        ]
        goes_on = rest_after[:-1] == rest and rest
        may_begin = any(may_follow for _, may_follow in begun)
        if last in self.marks and not (goes_on or may_begin) and any(is_exact for is_exact, _ in begun):
            return True
        whole = [
            (number, ends_before_break)
            for number, ids, ends_before_break in self._open(missing, before[: len(before) - len(rest)])
            if rest and ids == rest
        ]
        must_break = all(ends_before_break for _, ends_before_break in whole)
        goes_on = rest_after == [*rest, last]
        if whole and must_break and last in self.begins_inside and not goes_on:
            return self.terms[whole[0][0]].is_exact or self._is_whole_and_glued(target, rest_after)
        return self._is_whole_and_glued(target, rest_after)

    def _is_whole_and_glued(self, target: list[int], rest: list[int]) -> bool:
        """Whether the end of a target is an exact term that may not stand after what is before it."""
        return any(
            target[-len(ids) :] == list(ids)
            and len(ids) >= len(rest)
            and not self._may_follow(spelling, target[: -len(ids)])
            for term in self.terms
            for spelling in term.spellings
            for ids in [spelling.token_ids]
            if term.is_exact
        )

    def _may_follow(self, spelling: Spelling, before: list[int]) -> bool:
        """Whether an exact term may be spelled so after a target."""
        is_glued = spelling.begins_after_break and self.gluing.intersection(before[-1:])
        return not is_glued and (spelling.follows_bracket or not self.brackets.intersection(before[-1:]))

    def _repeats(self, target: list[int]) -> bool:
        """Whether the end of a target is a spelling of a term that it must not have again.

        It may be in the undecided rest, which begins or is a spelling of a missing term. A token after which
        such a rest is neither that spelling nor goes on is as bad as the end of what is in it.
        """
        missing, rest = self.read(target, has_ended=False)
        missing_before, rest_before = self.read(target[:-1], has_ended=False)
        is_whole = any(
            ids == rest_before and not (ends_before_break and self.begins_inside.intersection(target[-1:]))
            for _, ids, ends_before_break in self._open(
                missing_before, target[: len(target) - 1 - len(rest_before)]
            )
        )
        left = [] if is_whole else rest_before
        num_decided = len(rest_before) + 1 - len(rest)
        for term, number in zip(self.terms, missing_before, strict=True):
            for ids, *_ in term.spellings if term.is_exact and not number else ():
                places = range(min(num_decided, len(left) - len(ids) + 1))
                if any(left[place : place + len(ids)] == list(ids) for place in places):
                    return True
        return any(
            target[-len(ids) :] == list(ids) and len(ids) > len(rest)
            for term, number in zip(self.terms, missing, strict=True)
            for ids, *_ in term.spellings
            if term.is_exact and not number
        )


@torch.inference_mode()
def term_search(
    model: EncoderDecoder,
    source_ids: Sequence[int],
    terms: Terms,
    *,
    bos_id: int,
    eos_id: int,
    beam_size: int,
    alpha: float,
    max_new_tokens: int,
    constraints: Constraints = NO_CONSTRAINTS,
    early_stopping: Any = True,
    formula: Any = "wu",
    num_hypotheses: int,
) -> list[tuple[Hypothesis, list[int]]]:
    """`beam_search` for targets that must have terms; with each, how often each term is missing.

    Every hypothesis is extended by its 2 * beam_size best tokens, and by those that the terms want. Those
    that need the same number of further tokens are in one bank. The banks take turns to choose their best,
    beginning with that which needs the fewest, until beam_size are chosen among all extensions: of these,
    the ends are finished. In the same way beam_size extensions that go on are chosen. An extension that ends
    without all terms, before the limit, or one that spoils an exact term, is chosen only if there is
    no other; one that needs more tokens than there is room for, only if all do.

    The search stops when num_hypotheses are finished and none that runs has a better score, as in
    `beam_search`; with `early_stopping`, also when beam_size are finished.
    """
    memory, source_mask = encode(model, [source_ids])
    running: list[tuple[list[int], list[float]]] = [(list(constraints.prefix_ids), [])]
    finished: list[tuple[int, float, Hypothesis, list[int]]] = []
    for num_tokens in range(1, max_new_tokens + 1):
        room = max_new_tokens - num_tokens
        divisor = search.length_penalty(num_tokens, alpha, formula)
        extensions = []
        for parent, (ids, scores) in enumerate(running):
            logits = next_logits(model, [[bos_id, *ids]], memory, source_mask)[0]
            each = constraints.adjust(logits, ids, eos_id).log_softmax(dim=-1)
            best = each.sort(descending=True, stable=True).indices[: 2 * beam_size].tolist()
            for token_id in {*best, *terms.wanted(ids)}:
                score = float(each[token_id])
                if score > -math.inf:
                    extensions.append((-sum([*scores, score]), parent, token_id, score))
        grades: dict[int, list[tuple[int, bool, list[int], list[float]]]] = {0: [], 1: [], 2: []}
        for _, parent, token_id, score in sorted(extensions):
            ids, scores = running[parent]
            ends = token_id == eos_id
            target = ids if ends else [*ids, token_id]
            left = terms.num_left(target)
            grade = 2 if not ends and terms.spoils(target) else int(ends and left > 0 and room > 0)
            grades[grade].append((left, ends, target, [*scores, score]))
        chosen = grades[0]
        if not chosen and not finished:
            chosen = grades[1] or grades[2]
        chosen = [each for each in chosen if each[0] <= room] or chosen
        for left, ends, target, scores in _by_turns(chosen, beam_size):
            del left
            if ends:
                finished.append(_finished(terms, target, scores, divisor, is_finished=True))
        going = _by_turns([each for each in chosen if not each[1]], beam_size)
        running = [(target, scores) for _, _, target, scores in going]
        finished = sorted(finished, key=lambda each: each[:2])[:beam_size]
        if running and len(finished) >= num_hypotheses:
            at = search.length_penalty(max_new_tokens, alpha, formula)
            bound = sum(running[0][1]) / (at if early_stopping == "never" and alpha > 0 else divisor)
            is_full = len(finished) == beam_size
            if (early_stopping is True and is_full) or bound <= -finished[num_hypotheses - 1][1]:
                running = []
        if not running:
            break
    finished += [_finished(terms, target, scores, divisor, is_finished=False) for target, scores in running]
    return [each[2:] for each in sorted(finished, key=lambda each: each[:2])[:num_hypotheses]]


def _by_turns(extensions: list[Any], number: int) -> list[Any]:
    """The first ones, by turns from the banks that need the fewest tokens; in the order of all."""
    turns, seen = [], dict[int, int]()
    for place, each in enumerate(extensions):
        seen[each[0]] = seen.get(each[0], 0) + 1
        turns.append((seen[each[0]], each[0], place))
    return [extensions[place] for place in sorted(place for *_, place in sorted(turns)[:number])]


def _finished(
    terms: Terms, target: list[int], scores: list[float], divisor: float, *, is_finished: bool
) -> tuple[int, float, Hypothesis, list[int]]:
    score, (missing, _) = sum(scores) / divisor, terms.read(target, has_ended=True)
    return sum(missing), -score, Hypothesis(target, scores, score, is_finished), missing


class PrescribedModel(Transformer):
    """Its logits are a function of the target so far, whatever the source."""

    def __init__(self, logits: Callable[[tuple[int, ...]], list[float]], vocab_size: int = 6) -> None:
        super().__init__(
            TransformerConfig(
                vocab_size=vocab_size,
                d_model=8,
                d_ff=8,
                num_heads=1,
                num_encoder_layers=1,
                num_decoder_layers=1,
                max_source_length=8,
                max_target_length=16,
            )
        )
        self.logits = logits

    def decode_states(self, target_ids: Tensor, memory: Tensor, source_mask: Tensor) -> Tensor:
        del memory, source_mask
        rows = target_ids.tolist()
        return torch.tensor(
            [[self.logits(tuple(row[1 : place + 1])) for place in range(len(row))] for row in rows]
        )

    def project(self, states: Tensor) -> Tensor:
        return states


def random_model(seed: int, parts: int = 8) -> PrescribedModel:
    """Logits of few eighths, so that equal ones are common and halving and doubling are exact."""

    def logits(target: tuple[int, ...]) -> list[float]:
        generator = random.Random(f"{seed} {target}")
        return [generator.randint(-2 * parts, 2 * parts) / parts for _ in range(6)]

    return PrescribedModel(logits)
