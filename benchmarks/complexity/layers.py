"""The layer types of Vaswani et al. 2017, table 1 (arXiv:1706.03762), as layers from (1, n, d) to (1, n, d).

Shapes: B batch rows, H heads, K d_head, n positions, d width of the model, r positions of a neighbourhood.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from seq2seq_serve.training.models.attention import MultiHeadAttention

D_HEAD = 64
_MAX_LAYERS = 100  # at the lengths that are measured, every kind needs fewer

Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LayerType:
    """A row of the paper's table.

    Attributes:
        operations: Order of the number of operations of a layer, in n, d and the width.
        sequential: Order of the number of operations that must run one after the other.
        path: Order of the number of steps between the two ends of a sentence.
        orders: Exponents of `operations`, by n, d, k and r; empty if `operations` is a sum of two orders.
        width: Positions of a kernel or a neighbourhood while another size grows; None for other layers.
        build: Creates a layer for a given d and width.
    """

    name: str
    operations: str
    sequential: str
    path: str
    orders: dict[str, int]
    width: int | None
    build: Callable[[int, int], Layer]


def restricted_attention(query: Tensor, key: Tensor, value: Tensor, r: int) -> Tensor:
    """Computes attention of each position to the r (odd) positions around it, without those outside.

    Queries are processed in blocks of r; the neighbourhoods of a block span 2r - 1 positions, a window of the
    keys. So 2r - 1 scores are computed for each position, of which at most r are used: O(r n d).

    Args:
        query: (B, H, n, K).
        key: (B, H, n, K).
        value: (B, H, n, K).
        r: Number of positions in a full neighbourhood.

    Returns:
        The context, (B, H, n, K).
    """
    B, H, n, K = query.shape
    side, num_blocks = r // 2, -(-n // r)
    excess = num_blocks * r - n
    blocks = functional.pad(query, (0, 0, 0, excess)).view(B * H, num_blocks, r, K)
    keys, values = (
        functional.pad(x, (0, 0, side, side + excess)).flatten(0, 1).unfold(1, 2 * r - 1, r).mT
        for x in (key, value)
    )  # (B * H, blocks, 2r - 1, K)
    asks, asked = torch.arange(r)[:, None], torch.arange(2 * r - 1)  # places in a block and in its window
    is_near = (asked - side - asks).abs() <= side  # (r, 2r - 1)
    place = torch.arange(num_blocks)[:, None] * r + asked - side
    is_inside = (place >= 0) & (place < n)  # (blocks, 2r - 1)
    mask = (is_near & is_inside[:, None])[None]  # (1, blocks, r, 2r - 1), broadcast by the fused operator
    context = functional.scaled_dot_product_attention(blocks, keys, values, attn_mask=mask)
    return context.view(B, H, num_blocks * r, K)[:, :, :n]


def _heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], -1, min(D_HEAD, x.shape[2])).transpose(1, 2)  # (1, H, n, K)


def _attention(_d: int, _width: int) -> Layer:
    def layer(x: Tensor) -> Tensor:
        heads = _heads(x)
        return functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)

    return layer


def _restricted(_d: int, width: int) -> Layer:
    def layer(x: Tensor) -> Tensor:
        heads = _heads(x)
        return restricted_attention(heads, heads, heads, width).transpose(1, 2).flatten(2)

    return layer


def _multi_head_attention(d: int, _width: int) -> Layer:
    attention = MultiHeadAttention(d, max(d // D_HEAD, 1))
    attention.is_fused = True  # like attention in the other rows
    return lambda x: attention(x, x, None)[0]


def _recurrent(d: int, _width: int) -> Layer:
    module = nn.GRU(d, d, batch_first=True)
    return lambda x: module(x)[0]


def _convolution(d: int, width: int) -> Layer:
    module = nn.Conv1d(d, d, width, padding=width // 2)
    return lambda x: module(x.mT).mT


LAYER_TYPES = (
    LayerType("self-attention", "n²·d", "1", "1", {"n": 2, "d": 1}, None, _attention),
    LayerType("with its projections", "n²·d + n·d²", "1", "1", {}, None, _multi_head_attention),
    LayerType("recurrent (GRU)", "n·d²", "n", "n", {"n": 1, "d": 2}, None, _recurrent),
    LayerType(
        "convolutional", "k·n·d²", "1", "n/k, dilated log_k n", {"n": 1, "d": 2, "k": 1}, 3, _convolution
    ),
    LayerType("restricted self-attention", "r·n·d", "1", "n/r", {"n": 1, "d": 1, "r": 1}, 65, _restricted),
)


def count_multiply_adds(layer: Layer, n: int, d: int) -> int:
    """Returns the multiply-adds of one call, counted in matrix products and convolutions only."""
    with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        layer(torch.randn(1, n, d))
    return int(counter.get_total_flops()) // 2


def layers_to_cross(kind: LayerType, n: int, width: int) -> int:
    """Returns the number of layers after which the last of n positions depends on the first one.

    Raises:
        ValueError: `_MAX_LAYERS` layers are not enough.
    """
    d = 8
    first = torch.randn(1, n, d, dtype=torch.float64, requires_grad=True)
    x = first
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # in which the smallest gradients do not underflow to zero
    try:
        for num_layers in range(1, _MAX_LAYERS + 1):
            x = kind.build(d, width)(x)
            (gradient,) = torch.autograd.grad(x[0, -1].sum(), first, retain_graph=True)
            if gradient[0, 0].any():
                return num_layers
    finally:
        torch.set_default_dtype(default)
    raise ValueError(f"{_MAX_LAYERS} layers are not enough: {kind.name}, {n} positions, width {width}")
