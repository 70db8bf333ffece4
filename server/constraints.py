"""Which logits a request's constraints change, and how: pure Python over the target so far.

`training.search` defines the same by itself, and tests compare the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from server.records import Constraints


def penalties(constraints: Constraints, eos_id: int) -> dict[int, float]:
    """Returns the numbers to subtract from logits at every position, by token id; infinity forbids a token.

    An end of sequence that is suppressed is not among them, because it may be allowed after all.
    """
    fixed = {token_id: -bias for token_id, bias in constraints.logit_bias.items()}
    fixed.update((token_id, math.inf) for token_id in constraints.suppressed_token_ids if token_id != eos_id)
    return fixed


def adjustments(
    constraints: Constraints, target_ids: Sequence[int], *, num_generated: int, eos_id: int, vocab_size: int
) -> dict[int, tuple[float, float]]:
    """A factor and a bias for every token id whose logit x changes because of the target so far.

    A positive x is divided by the factor, another one multiplied (Keskar et al. 2019, arXiv:1909.05858,
    section 4.1, for logits of both signs); then the bias is added, which is minus infinity where the token is
    forbidden, and the penalty subtracted. Where all tokens would be forbidden, the end of sequence is allowed
    after all.

    Args:
        constraints: Of the request.
        target_ids: The target so far, its prefix included, without the start token.
        num_generated: How many of them came after the prefix.
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
    """The tokens that would complete an n-gram of `size` tokens that the target has already."""
    if size < 1 or len(target_ids) < size:
        return []
    last = target_ids[len(target_ids) - size + 1 :]
    return [
        target_ids[end]
        for end in range(size - 1, len(target_ids))
        if size == 1 or (target_ids[end - 1] == last[-1] and target_ids[end - size + 1 : end] == last)
    ]
