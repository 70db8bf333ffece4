"""Computes the changes of logits that a request's constraints cause, in pure Python.

`training.evaluation.search` implements the same independently, and tests compare the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from seq2seq_serve.server.engine.records import Constraints


def penalties(constraints: Constraints, eos_id: int) -> dict[int, float]:
    """Returns the numbers to subtract from logits at every position, by token id; infinity forbids a token.

    A suppressed end of sequence is left out: `adjustments` decides at each position whether it is allowed.
    """
    fixed = {token_id: -bias for token_id, bias in constraints.logit_bias.items()}
    fixed.update((token_id, math.inf) for token_id in constraints.suppressed_token_ids if token_id != eos_id)
    return fixed


def adjustments(
    constraints: Constraints, target_ids: Sequence[int], *, num_generated: int, eos_id: int, vocab_size: int
) -> dict[int, tuple[float, float]]:
    """Returns a factor and a bias for every token id whose logit x changes because of the target so far.

    A positive x is divided by the factor, any other x multiplied (Keskar et al. 2019, arXiv:1909.05858,
    section 4.1, for logits of both signs). Then the bias is added, which is minus infinity for a forbidden
    token, and the penalty subtracted. If all tokens would be forbidden, the end of sequence is allowed.

    Args:
        constraints: The request's constraints.
        target_ids: The target so far, its prefix included, without the start token.
        num_generated: The number of target tokens after the prefix.
        eos_id: The end of sequence.
        vocab_size: V.
    """
    suppressed, changed = constraints.suppressed_token_ids, dict[int, tuple[float, float]]()
    if constraints.repetition_penalty != 1:
        changed = dict.fromkeys(target_ids, (constraints.repetition_penalty, 0.0))
    forbidden = set(_repeating(target_ids, constraints.no_repeat_ngram_size))
    if num_generated < constraints.min_new_tokens or eos_id in suppressed:
        forbidden.add(eos_id)
    if len(forbidden) + len(suppressed) >= vocab_size and len(forbidden | suppressed) == vocab_size:
        forbidden.remove(eos_id)
    changed.update(dict.fromkeys(forbidden, (1.0, -math.inf)))
    return changed


def _repeating(target_ids: Sequence[int], size: int) -> list[int]:
    """Returns the tokens that would complete an n-gram of `size` tokens that the target already contains."""
    if size < 1 or len(target_ids) < size:
        return []
    last = target_ids[len(target_ids) - size + 1 :]
    return [
        target_ids[end]
        for end in range(size - 1, len(target_ids))
        if size == 1 or (target_ids[end - 1] == last[-1] and target_ids[end - size + 1 : end] == last)
    ]
