"""Dropout with masks that are cheap on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

_BITS = 16
_VALUES_PER_DRAW = 64 // _BITS


def dropout(x: Tensor, probability: float) -> Tensor:
    """Set values to 0 with a probability p, and divide the others by 1 - p: Srivastava et al. 2014.

    On a CPU, torch draws one number per value in one thread. Here a draw of 64 bits serves four values, which
    is much faster; p is then the nearest multiple of 1/65536 below 1.
    """
    if probability == 0:
        return x
    if x.is_cuda or torch.compiler.is_compiling():
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
    """`dropout` in training mode, the identity otherwise."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.probability) if self.training else x
