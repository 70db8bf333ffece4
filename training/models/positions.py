"""How published Transformers tell positions apart: other tables of sinusoids, and a bias for each distance.

The paper's sinusoids are in `training.models.transformer`, rotary positions in `training.models.options`.
Tables are created on the CPU, also in a model without values.

Shapes: T query positions, S key positions, D d_model, H heads, M the largest distance.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from seq2seq_serve.training.models.options import Buckets, PositionKind

_CPU = torch.device("cpu")


def position_table(kind: PositionKind, num_positions: int, d_model: int, first: int) -> Tensor:
    """The sinusoids (positions, D) of published models from the position `first` on, float32.

    "halves" has the numbers of the paper, all sines before all cosines. In "tensor2tensor", which also has
    this order, the last frequency is 1 / 10000, and float32 rounds the angles of far positions as it did when
    the models were trained.
    """
    if kind == "tensor2tensor":
        half = d_model // 2
        frequencies = torch.exp(torch.arange(half, device=_CPU).float() * -(math.log(10000) / (half - 1)))
        angles = torch.arange(first, first + num_positions, device=_CPU).float()[:, None] * frequencies
    else:
        assert kind == "halves"
        places = torch.arange(first, first + num_positions, dtype=torch.float64, device=_CPU)[:, None]
        angles = places / 10000 ** (torch.arange(0, d_model, 2, dtype=torch.float64, device=_CPU) / d_model)
    return torch.cat([angles.sin(), angles.cos()], dim=1).float()


class RelativeBias(nn.Module):
    """The bias of attention scores by the distance from a key to its query: Raffel et al. 2020, section 2.1.

    Attributes:
        weight: (buckets, H).
    """

    def __init__(self, buckets: Buckets, num_heads: int) -> None:
        super().__init__()
        self.buckets = buckets
        self.weight = nn.Parameter(torch.zeros(buckets.count, num_heads))

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The bias (H, T, S) of the scores between positions (T,) and (S,)."""
        return relative_bias(self.table(), queries, keys).movedim(-1, 0)

    def table(self) -> Tensor:
        """The bias (2 M + 1, H) of each distance, see `relative_bias`."""
        count, most = self.buckets.count, self.buckets.max_distance
        distances = torch.arange(-most, most + 1, device=self.weight.device)  # of a key before its query
        if not self.buckets.is_two_sided:
            return self.weight[bucket_of(distances.clamp(min=0), count, most)]
        half = count // 2
        return self.weight[bucket_of(distances.abs(), half, most) + half * (distances < 0)]


def bucket_of(distances: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """The buckets of distances from 0 on: half of them are exact, half logarithmic.

    In float32, because rounding decides the bucket of some distances.
    """
    num_exact = num_buckets // 2
    logarithms = torch.log(distances.float() / num_exact) / math.log(max_distance / num_exact)
    far = num_exact + (logarithms * (num_buckets - num_exact)).to(torch.int64)
    return torch.where(distances < num_exact, distances, far.clamp(max=num_buckets - 1))


def relative_bias(table: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """The bias (…, T, S, H) of the scores between positions (…, T) and (S,).

    Row M + d of the table (2 M + 1, H) is for a key d positions before its query; distances beyond M have the
    bias of M.
    """
    most = len(table) // 2
    distances = queries[..., None] - keys  # (…, T, S)
    return nn.functional.embedding(torch.clamp(distances + most, 0, 2 * most), table)
