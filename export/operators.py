"""ONNX Runtime's fused operators, callable from a torch module that is being exported.

Outside an export they compute nothing: they only stand for the node that the graph shall hold. The domain is
`com.microsoft` where none is said; the shapes given to torch are those the operator's documentation states.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.onnx.ops import symbolic, symbolic_multi_out


def group_query_attention(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    past_key: Tensor,
    past_value: Tensor,
    lengths: Tensor,
    capacity: Tensor,
    *,
    num_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal attention over a cache that it extends in place (GroupQueryAttention).

    Args:
        query: `(B, T, D)`, or packed query, key and value `(B, T, 3D)` with `key` and `value` None.
        key: New keys `(B, T, D)`.
        value: New values `(B, T, D)`.
        past_key: `(B, H, C, K)`.
        past_value: `(B, H, C, K)`.
        lengths: `(B,)` int32: positions of each row after this call, less one.
        capacity: `()` int32 on the host: C for one position, else the positions of a row after this call.
        num_heads: H.

    Returns:
        The attended values `(B, T, D)`, and the cache's keys and values.
    """
    d_model = past_key.shape[1] * past_key.shape[3]
    output, present_key, present_value = symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        [query, key, value, past_key, past_value, lengths, capacity],
        {"num_heads": num_heads, "kv_num_heads": num_heads, "scale": 1 / math.sqrt(past_key.shape[3])},
        dtypes=(query.dtype, query.dtype, query.dtype),
        shapes=((query.shape[0], query.shape[1], d_model), past_key.shape, past_value.shape),
        version=1,
    )
    return output, present_key, present_value


def multi_head_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, *, num_heads: int
) -> Tensor:
    """Attention of `(B, S, D)` over `(B, S, D)` in which row b sees its first `lengths[b]` positions."""
    return symbolic(
        "com.microsoft::MultiHeadAttention",
        [query, key, value, None, lengths],
        {"num_heads": num_heads, "scale": 1 / math.sqrt(query.shape[2] // num_heads)},
        dtype=query.dtype,
        shape=query.shape,
        version=1,
    )


def layer_normalization(x: Tensor, weight: Tensor, bias: Tensor, *, epsilon: float) -> Tensor:
    """Layer norm over the last axis (LayerNormalization of the standard)."""
    return symbolic(
        "LayerNormalization",
        [x, weight, bias],
        {"axis": -1, "epsilon": epsilon},
        dtype=x.dtype,
        shape=x.shape,
    )


def skip_layer_normalization(
    x: Tensor, skip: Tensor, weight: Tensor, bias: Tensor, x_bias: Tensor | None, *, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Layer norm of `x + x_bias + skip`, and that sum (SkipLayerNormalization)."""
    normalized, _, _, total = symbolic_multi_out(
        "com.microsoft::SkipLayerNormalization",
        [x, skip, weight, bias, x_bias],
        {"epsilon": epsilon},
        dtypes=(x.dtype, torch.float32, torch.float32, x.dtype),
        shapes=(x.shape, (x.shape[0], 1), (x.shape[0], 1), x.shape),
        version=1,
    )
    return normalized, total


def gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool = False, alpha: float = 1.0
) -> Tensor:
    """`alpha * x @ weight + bias` for `(B, I)`; `weight` is `(I, O)`, or `(O, I)` where transposed (Gemm)."""
    width = weight.shape[0 if transposed else 1]
    return symbolic(
        "Gemm",
        [x, weight, bias],
        {"transB": int(transposed), "alpha": alpha},
        dtype=x.dtype,
        shape=(x.shape[0], width),
    )


def quantize(x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """`clamp(round(x / scale) + zero_point, 0, 255)` with one constant scale (QuantizeLinear)."""
    return symbolic("QuantizeLinear", [x, scale, zero_point], dtype=torch.uint8, shape=x.shape)


def integer_matmul(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    weight_scale: Tensor,
    zero_point: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """uint8 `(..., I)` by int8 `(I, O)` to float32, scaled per output column (MatMulIntegerToFloat)."""
    weight_zero_point = torch.zeros_like(weight_scale, dtype=torch.int8)
    return symbolic(
        "com.microsoft::MatMulIntegerToFloat",
        [x, weight, scale, weight_scale, zero_point, weight_zero_point, bias],
        dtype=torch.float32,
        shape=(*x.shape[:-1], weight.shape[1]),
        version=1,
    )


def first(x: Tensor, length: int) -> Tensor:
    """The first `length` positions of `(B, T, D)`: a slice that torch does not look into (Slice)."""
    start, end, axis = (torch.full((1,), number, dtype=torch.int64) for number in (0, length, 1))
    return symbolic("Slice", [x, start, end, axis], dtype=x.dtype, shape=(x.shape[0], length, x.shape[2]))


def most_probable(logits: Tensor) -> Tensor:
    """The token id `(B, 1)` of the largest logit of each row, the lowest id among equals (TopK)."""
    shape = (logits.shape[0], 1)
    _, token_ids = symbolic_multi_out(
        "TopK",
        [logits, torch.ones(1, dtype=torch.int64)],
        {"axis": 1},
        dtypes=(logits.dtype, torch.int64),
        shapes=(shape, shape),
    )
    return token_ids


def write_prefix(buffer: Tensor, update: Tensor) -> Tensor:
    """Write `(B, H, S, K)` over the first S positions of `(B, H, C, K)`, in place where both are bound so.

    TensorScatter, opset 24.
    """
    return symbolic(
        "TensorScatter", [buffer, update], {"axis": 2}, dtype=buffer.dtype, shape=buffer.shape, version=24
    )
