"""Greedy and beam search by definition, without a cache: the oracle that the server is compared with.

Every step decodes the whole prefix again. Shapes: B batch rows, S source length, T target length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from training.batches import pad_rows
from training.config import PAD_ID
from training.transformer import Transformer

_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class Hypothesis:
    """A candidate target.

    Attributes:
        token_ids: Without bos and eos.
        score: What hypotheses are ranked by: the log-probability over the length penalty.
        log_probability: The sum over its tokens, eos included where it has one.
        is_finished: Whether it ended with eos, not at the limit.
    """

    token_ids: list[int]
    score: float
    log_probability: float
    is_finished: bool


def length_penalty(num_tokens: int, alpha: float) -> float:
    """(5 + |Y|)^alpha / (5 + 1)^alpha: Wu et al. 2016, equation 14, arXiv:1609.08144.

    |Y| counts the tokens that the model chose, eos included. The coverage penalty is not used.
    """
    return float((5 + num_tokens) ** alpha / 6**alpha)


@torch.inference_mode()
def greedy_search(
    model: Transformer,
    source_ids: Sequence[Sequence[int]],
    *,
    bos_id: int,
    eos_id: int,
    max_new_tokens: int,
) -> list[list[int]]:
    """The most probable token at each step, for many sources; of equal ones the lowest id.

    Args:
        model: In eval mode.
        source_ids: Each with its eos.
        bos_id: What every target starts with.
        eos_id: What ends a target.
        max_new_tokens: Steps at most, the one that chooses eos included.

    Returns:
        Token ids without bos and eos, in the order of the sources.

    Raises:
        ValueError: A source is empty or too long, or the limit is beyond the model's.
    """
    _check_limits(model, source_ids, max_new_tokens)
    targets: list[list[int]] = [[] for _ in source_ids]
    by_length = sorted(range(len(source_ids)), key=lambda row: len(source_ids[row]))
    for start in range(0, len(by_length), _ROWS_AT_ONCE):
        running = by_length[start : start + _ROWS_AT_ONCE]
        memory, source_mask = _encode(model, [source_ids[row] for row in running])
        for _ in range(max_new_tokens):
            prefixes = [[bos_id, *targets[row]] for row in running]
            next_ids = _next_logits(model, prefixes, memory, source_mask).argmax(dim=-1)  # (B,)
            is_running = next_ids != eos_id
            for row, token_id in zip(running, next_ids.tolist(), strict=True):
                if token_id != eos_id:
                    targets[row].append(token_id)
            running = [row for row, runs in zip(running, is_running.tolist(), strict=True) if runs]
            if not running:
                break
            memory, source_mask = memory[is_running], source_mask[is_running]
    return targets


@torch.inference_mode()
def beam_search(
    model: Transformer,
    source_ids: Sequence[int],
    *,
    bos_id: int,
    eos_id: int,
    beam_size: int,
    alpha: float,
    max_new_tokens: int,
    early_stopping: bool = True,
) -> list[Hypothesis]:
    """The best hypotheses of one source, best first, at most `beam_size`.

    At each step every running hypothesis is extended by every token, and the 2 * beam_size extensions with
    the highest log-probabilities are looked at, best first (equal ones: the better parent, then the lower
    id). One that ends with eos is finished if it is among the first beam_size, and dropped otherwise; the
    others go on until beam_size run. What still runs at the limit counts as a result too.

    Args:
        model: In eval mode.
        source_ids: With its eos.
        bos_id: What every target starts with.
        eos_id: What ends a target.
        beam_size: How many hypotheses run at once, and how many are kept. 1 is greedy search.
        alpha: Of the length penalty; 0 ranks by log-probability.
        max_new_tokens: Steps at most, the one that chooses eos included.
        early_stopping: Stop as soon as beam_size hypotheses are finished. Otherwise stop when no running
            one can come to a better score than the worst of the best beam_size finished ones.

    Raises:
        ValueError: The source is empty or too long, or a limit is wrong.
    """
    if beam_size < 1:
        raise ValueError(f"beam_size is {beam_size}, and must be at least 1")
    _check_limits(model, [source_ids], max_new_tokens)
    memory, source_mask = _encode(model, [source_ids])
    running = [Hypothesis([], 0.0, 0.0, is_finished=False)]
    finished: list[Hypothesis] = []
    for num_tokens in range(1, max_new_tokens + 1):
        extensions = _best_extensions(model, running, memory, source_mask, bos_id, 2 * beam_size)
        parents, running = running, []
        penalty = length_penalty(num_tokens, alpha)
        for rank, (log_probability, parent, token_id) in enumerate(extensions):
            ids, score = parents[parent].token_ids, log_probability / penalty
            if token_id != eos_id and len(running) < beam_size:
                running.append(Hypothesis([*ids, token_id], score, log_probability, is_finished=False))
            elif token_id == eos_id and rank < beam_size:
                finished.append(Hypothesis(ids, score, log_probability, is_finished=True))
        finished = _best(finished, beam_size)
        if not running:
            break
        if len(finished) == beam_size and (
            early_stopping or not _can_improve(running, finished, num_tokens, max_new_tokens, alpha)
        ):
            return finished
    return _best(finished + running, beam_size)


def _check_limits(model: Transformer, sources: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    config = model.config
    if not 1 <= max_new_tokens <= config.max_target_length:
        raise ValueError(
            f"max_new_tokens is {max_new_tokens}, and the model's limit is {config.max_target_length}"
        )
    for ids in sources:
        if not 1 <= len(ids) <= config.max_source_length:
            raise ValueError(
                f"a source has {len(ids)} tokens, and the model takes 1 to {config.max_source_length}"
            )


def _encode(model: Transformer, sources: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    source_ids = pad_rows(sources).to(model.embedding.weight.device)  # (B, S)
    source_mask = source_ids != PAD_ID
    return model.encode(source_ids, source_mask), source_mask


def _next_logits(
    model: Transformer, prefixes: list[list[int]], memory: Tensor, source_mask: Tensor
) -> Tensor:
    """Logits (B, V) of what follows prefixes that all have the same length."""
    target_ids = torch.tensor(prefixes, device=memory.device)  # (B, T)
    states = model.decode_states(target_ids, memory, source_mask)  # (B, T, D)
    return model.project(states[:, -1]).float()


def _best_extensions(
    model: Transformer,
    running: list[Hypothesis],
    memory: Tensor,
    source_mask: Tensor,
    bos_id: int,
    num_extensions: int,
) -> list[tuple[float, int, int]]:
    """(log-probability, parent, token id) of the best extensions, best first."""
    B = len(running)
    prefixes = [[bos_id, *hypothesis.token_ids] for hypothesis in running]
    logits = _next_logits(model, prefixes, memory.expand(B, -1, -1), source_mask.expand(B, -1))
    sums = torch.tensor([hypothesis.log_probability for hypothesis in running], dtype=torch.float64)
    totals = sums[:, None] + logits.double().log_softmax(dim=-1).cpu()  # (B, V)
    # A stable sort keeps equal ones in the order of parent, then token id.
    order = totals.flatten().sort(descending=True, stable=True).indices[:num_extensions]
    return [
        (float(totals.flatten()[place]), place // totals.shape[1], place % totals.shape[1])
        for place in order.tolist()
    ]


def _best(hypotheses: list[Hypothesis], beam_size: int) -> list[Hypothesis]:
    return sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)[:beam_size]


def _can_improve(
    running: list[Hypothesis],
    finished: list[Hypothesis],
    num_tokens: int,
    max_new_tokens: int,
    alpha: float,
) -> bool:
    """Whether a running hypothesis could still come to a better score than the worst finished one.

    Further tokens have log-probabilities of at most 0, so only the penalty can raise its score: most at the
    limit where alpha is positive, else with the next token.
    """
    penalty = length_penalty(max_new_tokens if alpha > 0 else num_tokens + 1, alpha)
    return max(hypothesis.log_probability for hypothesis in running) / penalty > finished[-1].score
