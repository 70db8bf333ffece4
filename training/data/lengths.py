"""The limit of target lengths: a bound learned from the corpus, and the limit that it gives each source."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from seq2seq_serve.bundle.manifest import LengthBound
from seq2seq_serve.training.config import ModelConfig

_RATIO_HEADROOM = 2.0  # times the mean ratio of the corpus
_CONSTANT_HEADROOM = 10  # tokens
_CUT_SHARE = 1e-4  # share of the training pairs that are outliers, cut before the headroom is added


def learn_length_bound(source_lengths: NDArray[np.int32], target_lengths: NDArray[np.int32]) -> LengthBound:
    """Learn a bound that all targets of a corpus keep, except for a very small share of outliers.

    The ratio is twice that of all target tokens to all source tokens. The constant is 10 tokens more than the
    most by which a target exceeds the ratio, as targets of short sources do. Lengths are those of each
    training pair, with eos.
    """
    ratio = round(_RATIO_HEADROOM * float(target_lengths.sum() / source_lengths.sum()), 2)
    excesses = target_lengths - ratio * source_lengths
    largest = float(np.quantile(excesses, 1 - _CUT_SHARE, method="higher"))
    return LengthBound(ratio, max(math.ceil(largest), 0) + _CONSTANT_HEADROOM)


def target_limits(source_lengths: Iterable[int], config: ModelConfig, bound: LengthBound | None) -> list[int]:
    """The limit of each source's target, as in the server: the bound, and at most the model's limit."""
    limit = config.max_target_tokens
    return [min(bound.max_new_tokens(length), limit) if bound else limit for length in source_lengths]
