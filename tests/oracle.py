"""The choices of a server, computed one token at a time: constraints on logits, samples, scores of targets.

Tests compare the server with them. The searches without constraints are in `training.evaluation.search`. The
models at the end have logits that a test prescribes.
Shapes: V vocabulary.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

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
