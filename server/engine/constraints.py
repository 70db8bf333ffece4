"""Computes the changes of logits that a request's constraints cause, in pure Python.

`tests/oracle.py` implements the same independently, and tests compare the two.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from contextlib import suppress
from typing import NamedTuple

from seq2seq_serve.bundle.manifest import Timestamps
from seq2seq_serve.server.engine.request import Constraints
from seq2seq_serve.server.engine.state import Sequence


def penalties(constraints: Constraints, eos_ids: Collection[int]) -> dict[int, float]:
    """Returns the numbers to subtract from logits at every position, by token id; infinity forbids a token.

    A suppressed end of sequence is left out: `adjustments` decides at each position whether it is allowed.
    """
    fixed = {token_id: -bias for token_id, bias in constraints.logit_bias.items()}
    fixed.update(
        (token_id, math.inf) for token_id in constraints.suppressed_token_ids if token_id not in eos_ids
    )
    return fixed


def adjustments(
    row: Sequence, eos_ids: Collection[int], vocab_size: int, never_ids: frozenset[int] = frozenset()
) -> dict[int, tuple[float, float]]:
    """Returns a factor and a bias for every token id whose logit x changes because of the target so far.

    A positive x is divided by the factor, any other x multiplied (Keskar et al. 2019, arXiv:1909.05858,
    section 4.1, for logits of both signs). Then the bias is added, which is minus infinity for a forbidden
    token, and the penalty subtracted. If all tokens would be forbidden, the ends of sequence are allowed.

    Args:
        row: The row, with its request and its target so far.
        eos_ids: The ends of sequence.
        vocab_size: V.
        never_ids: The tokens that the model never selects, which are not among the result.
    """
    request, constraints = row.request, row.request.constraints
    target_ids = [*row.search.start_ids, *row.token_ids] if constraints.repeats_start else row.token_ids
    changed = dict[int, tuple[float, float]]()
    if constraints.repetition_penalty != 1:
        changed = dict.fromkeys(target_ids, (constraints.repetition_penalty, 0.0))
    forbidden = set(_repeating(target_ids, constraints.no_repeat_ngram_size))
    for size in constraints.forbidden_sizes:
        forbidden |= constraints.forbidden_after.get(tuple(target_ids[len(target_ids) - size :]), frozenset())
    if row.num_generated + request.num_counted < constraints.min_new_tokens:
        forbidden |= set(eos_ids)
    if not row.num_generated:
        forbidden |= request.begin_suppressed_ids
    forbidden |= constraints.suppressed_token_ids.intersection(eos_ids)
    suppressed = constraints.suppressed_token_ids  # thousands, which are not copied at every position
    could_be_all = len(forbidden) + len(suppressed) + len(never_ids) >= vocab_size
    if could_be_all and len(forbidden | suppressed | never_ids) == vocab_size:
        forbidden -= set(eos_ids)
    changed.update(dict.fromkeys(forbidden, (1.0, -math.inf)))
    return changed


class TimeBounds(NamedTuple):
    """The tokens that may follow in a target with times: other ones, and times, each between two ids."""

    least_text: int
    most_text: int
    least_time: int
    most_time: int


def time_bounds(row: Sequence, times: Timestamps, eos_ids: Collection[int], vocab_size: int) -> TimeBounds:
    """Returns the bounds of a row's next token.

    A target begins with a time. Every further time stands twice, at the end of what was said and at the
    beginning of what follows, or once before the end of sequence. Times never decrease, and what was said
    takes time (Radford et al. 2022, arXiv:2212.04356, section 2.3).
    """
    token_ids, first_id, last_id = row.token_ids, times.first_id, times.last_id
    if not token_ids:
        most = last_id if times.max_first is None else min(first_id + times.max_first, last_id)
        return TimeBounds(vocab_size, vocab_size, first_id, most)
    is_time = [times.has(token_id) for token_id in token_ids[-2:]]
    if is_time[-1] and is_time[0]:  # also where there is only one token
        return TimeBounds(0, vocab_size, vocab_size, last_id)
    if is_time[-1]:
        return TimeBounds(min(eos_ids), first_id - 1, token_ids[-1], last_id)
    last_time = next((token_id for token_id in reversed(token_ids) if times.has(token_id)), first_id - 1)
    return TimeBounds(0, vocab_size, last_time + 1, last_id)


def _repeating(target_ids: list[int], size: int) -> list[int]:
    """Returns the tokens that would complete an n-gram of `size` tokens that the target already contains."""
    if size <= 1:
        return target_ids if size else []
    if len(target_ids) < size:
        return []
    last, repeating, end = target_ids[len(target_ids) - size + 1 :], list[int](), size - 2
    with suppress(ValueError):  # where it does not occur again
        while True:
            end = target_ids.index(last[-1], end, -1) + 1  # a loop in C: targets have hundreds of tokens
            if target_ids[end - size + 1 : end] == last:
                repeating.append(target_ids[end])
    return repeating
