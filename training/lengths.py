"""How long targets may become: the bound that a corpus teaches, and each source's limit by it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bundle.manifest import LengthBound
from training.config import TransformerConfig

_RATIO_HEADROOM = 2.0  # times the mean ratio of the corpus
_CONSTANT_HEADROOM = 10  # tokens
_CUT_SHARE = 1e-4  # of the training pairs, before the headroom: outliers


def learn_length_bound(source_lengths: NDArray[np.int32], target_lengths: NDArray[np.int32]) -> LengthBound:
    """Learn a bound that every target of a corpus keeps, except for a vanishing share of outliers.

    The ratio is twice that of all target tokens to all source tokens. The constant is the most by which a
    target exceeds that, as targets of short sources do, and 10 tokens more.

    Args:
        source_lengths: Of each training pair, with eos.
        target_lengths: Of the same pairs, with eos.
    """
    ratio = round(_RATIO_HEADROOM * float(target_lengths.sum() / source_lengths.sum()), 2)
    beyond = np.quantile(target_lengths - ratio * source_lengths, 1 - _CUT_SHARE, method="higher")
    return LengthBound(ratio, max(int(np.ceil(beyond)), 0) + _CONSTANT_HEADROOM)


def target_limits(
    sources: Sequence[Sequence[int]], config: TransformerConfig, bound: LengthBound | None
) -> list[int]:
    """The most target tokens for each source, as the server limits them: the bound, or the model's limit."""
    limit = config.max_target_length
    return [min(bound.max_new_tokens(len(ids)), limit) if bound else limit for ids in sources]
