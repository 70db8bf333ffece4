"""Dropout whose masks cost little on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

_BITS = 16
_VALUES_PER_DRAW = 64 // _BITS


def dropout(x: Tensor, probability: float) -> Tensor:
    """Set values to 0 with a probability, and divide the others by that of the rest.

    Srivastava et al. 2014. On a CPU, where torch draws a number a value from one thread, each draw of 64 bits
    serves four values here, which takes far less time; the probability is the nearest multiple of 1/65536
    below 1.
    """
    if probability == 0 or x.is_cuda or torch.compiler.is_compiling():
        return functional.dropout(x, probability)
    levels = 2**_BITS
    num_dropped = min(round(probability * levels), levels - 1)
    num_draws = -(-x.numel() // _VALUES_PER_DRAW)
    bits = torch.empty(num_draws, dtype=torch.int64).random_(-(2**63), None)  # the whole range
    is_kept = bits.view(torch.int16)[: x.numel()].view(x.shape) >= num_dropped - levels // 2
    scale = levels / (levels - num_dropped)
    dropped: Tensor = x * (is_kept * scale)
    return dropped


class Dropout(nn.Module):
    """`dropout` while training, nothing otherwise."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return dropout(x, self.probability) if self.training else x
