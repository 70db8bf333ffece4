"""ONNX Runtime's fused operators as functions for torch modules that are exported.

Outside an export they compute nothing: each one only stands for a node of the graph. Its docstring's first
line ends with the operator's name. The shapes given to torch are those of the operator's documentation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.onnx.ops import symbolic, symbolic_multi_out

from seq2seq_serve.export.graphs.functions import DOMAIN


def takes(width: int) -> bool:
    """Whether the project's own operators take vectors of this width, but for heads on CUDA."""
    return width % 8 == 0


def takes_on_cuda(d_head: int) -> bool:
    """Whether the project's own attention for CUDA takes heads of this width."""
    return d_head in (8, 16, 32, 64, 128, 256)


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
    scale: float | None = None,
    bias: Tensor | None = None,
    cap: float | None = None,
    window: int | None = None,
    rotation: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal attention over a cache, which it extends in place (GroupQueryAttention).

    Args:
        query: `(B, T, HK)`, or packed query, key and value `(B, T, (H + 2G)K)` with `key` and `value` None.
        key: New keys `(B, T, GK)`.
        value: New values `(B, T, GK)`.
        past_key: `(B, G, C, K)`.
        past_value: `(B, G, C, K)`.
        lengths: `(B,)` int32: positions of each row after this call, minus one.
        capacity: `()` int32 on the host: C for one position, otherwise the positions of a row after this
            call.
        num_heads: H.
        scale: The factor of the scores; None is 1 / √K.
        bias: Added to the scores, `(B or 1, H, T, capacity)`; None adds nothing.
        cap: c; scores s become c tanh(s / c); None leaves them.
        window: How many last positions, its own included, a query sees; None is all of them.
        rotation: Cosines and sines `(positions, K / 2)` that rotate queries and new keys; None does not.

    Returns:
        The attention output `(B, T, HK)`, and the cache's keys and values.
    """
    attributes = _head_attributes(past_key, num_heads, scale, cap)
    if window is not None:
        attributes["local_window_size"] = window
    further: list[Tensor | None] = []
    if rotation is not None:
        attributes["do_rotary"] = 1
        further = [*rotation]
    if bias is not None:
        further = [*(rotation or (None, None)), None, bias]
    output, present_key, present_value = symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        [query, key, value, past_key, past_value, lengths, capacity, *further],
        attributes,
        dtypes=(query.dtype, query.dtype, query.dtype),
        shapes=(
            (query.shape[0], query.shape[1], num_heads * past_key.shape[3]),
            past_key.shape,
            past_value.shape,
        ),
        version=1,
    )
    return output, present_key, present_value


def cache_attention(
    packed: Tensor,
    past_key: Tensor,
    past_value: Tensor,
    last_positions: Tensor,
    owners: Tensor | None,
    capacity: Tensor,
    *,
    num_heads: int,
    scale: float,
    cap: float | None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`group_query_attention` of one position per row of the cache, or, on the CPU, of any positions.

    All positions are written before any is read (CacheAttention; HalfCacheAttention for float32 positions and
    a cache in float16; CudaCacheAttention without owners, CudaBiasedCacheAttention with a bias).

    Args:
        packed: Query, key and value of each position, `(B, (H + 2G)K)`.
        past_key: `(N, G, C, K)`.
        past_value: `(N, G, C, K)`.
        last_positions: `(B,)` int32: the position that each one is written to, and the last that it sees.
        owners: `(B,)` int64: the row of the cache that each one belongs to. The definition takes B = N, and
            each row to own itself. None for CUDA, whose operator does so, too.
        capacity: `()` int32 on the host: C.
        num_heads: H.
        scale: The factor of the scores.
        cap: As for `group_query_attention`.
        bias: Added to the scores by distance from the last position, `(H, D)`; the last column is that of all
            larger ones. None adds nothing.

    Returns:
        The attention output `(B, HK)`, and the cache's keys and values.
    """
    attributes = _head_attributes(past_key, num_heads, scale, cap)
    if bias is not None:
        attributes["max_distance"] = bias.shape[1] - 1
    kind = _half(packed, past_key) if owners is not None else "Cuda" if bias is None else "CudaBiased"
    attended, key, value = symbolic_multi_out(
        f"{DOMAIN}::{kind}CacheAttention",
        [
            *(packed, past_key, past_value, last_positions),
            *(given for given in (owners, bias) if given is not None),
            capacity,
        ],
        attributes,
        dtypes=(packed.dtype, past_key.dtype, past_value.dtype),
        shapes=((packed.shape[0], num_heads * past_key.shape[3]), past_key.shape, past_value.shape),
        version=1,
    )
    return attended, key, value


def memory_attention(
    query: Tensor,
    memory: Sequence[Tensor],
    last_positions: Tensor,
    owners: Tensor,
    capacity: Tensor,
    *,
    num_heads: int,
    scale: float,
    cap: float | None,
) -> Tensor:
    """Attention of one position per row over a memory that it only reads (MemoryAttention, or Half…).

    Args:
        query: `(B, HK)`.
        memory: Its keys and values, `(N, G, C, K)` each.
        last_positions: `(B,)` int32: positions of each row, minus one.
        owners: `(B,)` int64: the row of the memory that each row reads. The definition reads a row's own.
        capacity: `()` int32 on the host: C.
        num_heads: H.
        scale: The factor of the scores.
        cap: As for `group_query_attention`.

    Returns:
        `(B, HK)`.
    """
    return symbolic(
        f"{DOMAIN}::{_half(query, memory[0])}MemoryAttention",
        [query, *memory, last_positions, owners, capacity],
        _head_attributes(memory[0], num_heads, scale, cap),
        dtype=query.dtype,
        shape=query.shape,
        version=1,
    )


def cuda_memory_attention(
    query: Tensor,
    memory: Sequence[Tensor],
    last_positions: Tensor,
    capacity: Tensor,
    *,
    num_heads: int,
    scale: float,
    cap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of one position per row over its own memory, for CUDA (CudaMemoryAttention).

    Args:
        query: `(B, HK)`.
        memory: Its keys and values, `(B, G, C, K)` each; and those of the last position of each row, `(B, 1,
            GK)` each, which the definition writes again.
        last_positions: `(B,)` int32: positions of each row, minus one.
        capacity: `()` int32 on the host: C.
        num_heads: H.
        scale: The factor of the scores.
        cap: As for `group_query_attention`.

    Returns:
        `(B, HK)`, and the memory's keys and values.
    """
    key, value, last_key, last_value = memory
    attended, key, value = symbolic_multi_out(
        f"{DOMAIN}::CudaMemoryAttention",
        [query, last_key, last_value, key, value, last_positions, capacity],
        _head_attributes(key, num_heads, scale, cap),
        dtypes=(query.dtype,) * 3,
        shapes=(query.shape, key.shape, value.shape),
        version=1,
    )
    return attended, key, value


def source_attention(
    packed: Tensor,
    lengths: Tensor,
    row_numbers: Tensor,
    indices: Tensor,
    *,
    num_heads: int,
    scale: float,
) -> Tensor:
    """Attention of every token to all tokens of its source, in the project's own operator (SourceAttention).

    Args:
        packed: Queries, keys and values `(N, 3HK)` of all sources' tokens, one after the other.
        lengths: The number of tokens of each source, `(B,)` int64.
        row_numbers: The row of each place `(B, S)` of the padded sources.
        indices: The place of each row, `(N, 2)`.
        num_heads: H.
        scale: The factor of the scores.

    Returns:
        `(N, HK)`.
    """
    return symbolic(
        f"{DOMAIN}::SourceAttention",
        [packed, lengths, row_numbers, indices],
        {"num_heads": num_heads, "scale": scale, "softcap": 0.0},
        dtype=packed.dtype,
        shape=(packed.shape[0], packed.shape[1] // 3),
        version=1,
    )


def _half(query: Tensor, key: Tensor) -> str:
    """The beginning of the name of an attention whose keys have half the precision of the queries."""
    return "Half" if key.dtype is torch.float16 and query.dtype is torch.float32 else ""


def _head_attributes(key: Tensor, num_heads: int, scale: float | None, cap: float | None) -> dict[str, Any]:
    return {
        "num_heads": num_heads,
        "kv_num_heads": key.shape[1],
        "scale": 1 / math.sqrt(key.shape[3]) if scale is None else scale,
        "softcap": cap or 0.0,
    }


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor | None,
    *,
    num_heads: int,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention of `(B, S, HK)` over `(B, S, HK)`, in row b over its first `lengths[b]` positions, or all.

    The factor of the scores is 1 / √K by default; a bias `(1, H, S, S)` is added to them.
    """
    scale = 1 / math.sqrt(query.shape[2] // num_heads) if scale is None else scale
    further = [None, lengths, bias] if bias is not None else [None, lengths] if lengths is not None else []
    return symbolic(
        "com.microsoft::MultiHeadAttention",
        [query, key, value, *further],
        {"num_heads": num_heads, "scale": scale},
        dtype=query.dtype,
        shape=query.shape,
        version=1,
    )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    *,
    num_heads: int,
    scale: float,
    bias: Tensor | None = None,
) -> Tensor:
    """`multi_head_attention` in the standard's operator, which is faster on the CPU (Attention, opset 24).

    The lengths are `(B,)` int64.
    """
    return symbolic(
        "Attention",
        [query, key, value, bias, None, None, lengths],
        {"q_num_heads": num_heads, "kv_num_heads": num_heads, "scale": scale},
        dtype=query.dtype,
        shape=query.shape,
        version=24,
    )


def rotate(x: Tensor, positions: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate `(B, H, T, K)` by tables `(positions, K / 2)` (RotaryEmbedding of com.microsoft).

    The positions are those of each vector, `(B, T)` int64, or `(1,)`: that of the first one.
    """
    return symbolic(
        "com.microsoft::RotaryEmbedding",
        [x, positions, cosines, sines],
        dtype=x.dtype,
        shape=x.shape,
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


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, *, epsilon: float
) -> tuple[Tensor, Tensor]:
    """`x + residual`, and its layer norm, in the project's own operator (AddNorm)."""
    total, normalized = symbolic_multi_out(
        f"{DOMAIN}::AddNorm",
        [x, residual, weight, bias],
        {"epsilon": epsilon},
        dtypes=(x.dtype,) * 2,
        shapes=(x.shape,) * 2,
        version=1,
    )
    return total, normalized


def rms_normalization(x: Tensor, weight: Tensor, *, epsilon: float) -> Tensor:
    """RMS norm over the last axis (RMSNormalization of the standard, opset 23)."""
    attributes: dict[str, Any] = {"axis": -1, "epsilon": epsilon}
    return symbolic("RMSNormalization", [x, weight], attributes, dtype=x.dtype, shape=x.shape, version=23)


def skip_rms_normalization(
    x: Tensor, skip: Tensor, weight: Tensor, x_bias: Tensor | None, *, epsilon: float
) -> tuple[Tensor, Tensor]:
    """RMS norm of `x + x_bias + skip`, and that sum (SkipSimplifiedLayerNormalization)."""
    normalized, _, _, total = symbolic_multi_out(
        "com.microsoft::SkipSimplifiedLayerNormalization",
        [x, skip, weight, *([] if x_bias is None else [x_bias])],
        {"epsilon": epsilon},
        dtypes=(x.dtype, torch.float32, torch.float32, x.dtype),
        shapes=(x.shape, (x.shape[0], 1), (x.shape[0], 1), x.shape),
        version=1,
    )
    return normalized, total


def gelu(x: Tensor) -> Tensor:
    """The input times the normal distribution's cumulative function (Gelu of com.microsoft)."""
    return symbolic("com.microsoft::Gelu", [x], dtype=x.dtype, shape=x.shape, version=1)


def fast_gelu(x: Tensor) -> Tensor:
    """`gelu` approximated by a hyperbolic tangent (FastGelu)."""
    return symbolic("com.microsoft::FastGelu", [x], dtype=x.dtype, shape=x.shape, version=1)


def silu(x: Tensor) -> Tensor:
    """The input times its logistic function (QuickGelu)."""
    return symbolic("com.microsoft::QuickGelu", [x], {"alpha": 1.0}, dtype=x.dtype, shape=x.shape, version=1)


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
    """`alpha * x @ weight + bias` for `(B, I)`; `weight` is `(I, O)`, or `(O, I)` if transposed (Gemm)."""
    width = weight.shape[0 if transposed else 1]
    return symbolic(
        "Gemm",
        [x, weight, bias],
        {"transB": int(transposed), "alpha": alpha},
        dtype=x.dtype,
        shape=(x.shape[0], width),
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor, *, factor: float = 1.0, has_relu: bool = False) -> Tensor:
    """`factor * x @ weight.T + bias` for `(rows, I)`, in the project's own operator (Linear).

    Args:
        x: `(rows, I)`.
        weight: `(O, I)`.
        bias: `(O,)`.
        factor: Multiplies the products.
        has_relu: Whether negative outputs become 0.
    """
    name = f"{DOMAIN}::{'LinearRelu' if has_relu else 'Linear'}"
    shape = (x.shape[0], weight.shape[0])
    return symbolic(name, [x, weight, bias], {"factor": factor}, dtype=x.dtype, shape=shape, version=1)


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """The rows `(…, D)` of a table `(V, D)`, in the project's own operator (Embedding).

    A server keeps a table that is also the weights of a Linear once, as that reads it.
    """
    shape = (*ids.shape, table.shape[1])
    return symbolic(f"{DOMAIN}::Embedding", [ids, table], dtype=table.dtype, shape=shape, version=1)


def cuda_embedding(ids: Tensor, previous: Tensor, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of embeddings of tokens and positions, and these positions, for CUDA (CudaEmbedding, our own).

    Args:
        ids: `(B,)`.
        previous: `(B,)` int32: the position before that of each token.
        table: `(V, D)`.
        positions: `(C, D)`.
    """
    embedded, lengths = symbolic_multi_out(
        f"{DOMAIN}::CudaEmbedding",
        [ids, previous, table, positions],
        {},
        dtypes=(table.dtype, previous.dtype),
        shapes=((ids.shape[0], table.shape[1]), previous.shape),
        version=1,
    )
    return embedded, lengths


def cuda_gated(x: Tensor, activation: str) -> Tensor:
    """The activation of the first half of each row times the other, for CUDA (CudaGatedRelu and so on)."""
    shape = (x.shape[0], x.shape[1] // 2)
    name = _GATED[activation]
    return symbolic(f"{DOMAIN}::{name}", [x], dtype=x.dtype, shape=shape, version=1)


_GATED = {
    "relu": "CudaGatedRelu",
    "gelu": "CudaGatedGelu",
    "gelu_tanh": "CudaGatedFastGelu",
    "silu": "CudaGatedSilu",
}


def quantized_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_sum: Tensor,
    bias: Tensor,
    *,
    clamps_negative: bool,
) -> Tensor:
    """A map of levels by int8 weights, in the project's own operator (QuantizedLinear).

    A row's levels are `q = min(round(x / scale) + z, 255)` with `scale = (max(x, 0) - min(x, 0)) / 255` and
    `z = -round(min(x, 0) / scale)`; its outputs are `(q - z) @ (weight - 128) * scale * weight_scale + bias`.

    Args:
        x: `(rows, I)`.
        weight: `(I, O)` uint8.
        weight_scale: `(O,)`.
        weight_sum: `(O,)` int32: the sums of `weight - 128`.
        bias: `(O,)`.
        clamps_negative: Whether negative inputs count as 0.
    """
    return symbolic(
        f"{DOMAIN}::QuantizedLinear",
        [x, weight, weight_scale, weight_sum, bias],
        {"least_input": 0.0 if clamps_negative else -math.inf},
        dtype=torch.float32,
        shape=(*x.shape[:-1], weight.shape[1]),
        version=1,
    )


def quantized_choice(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_sum: Tensor,
    bias: Tensor,
    added: Tensor,
    num_candidates: Tensor,
    places: Tensor,
) -> tuple[Tensor, ...]:
    """`quantized_linear` as logits, or the most probable tokens without them (QuantizedChoice, our own).

    Args:
        x: `(B, D)`.
        weight: `(D, V)` uint8.
        weight_scale: `(V,)`.
        weight_sum: `(V,)` int32: the sums of `weight - 128`.
        bias: `(V,)`.
        added: `(V,)`, added to the logits before a choice.
        num_candidates: `(1,)` int64.
        places: `(P, 2)` int64, rows and token ids whose log-probabilities are looked up.

    Returns:
        The logits `(B, V)`, which may lack all rows if there are candidates; the ids of the candidates `(B,
        num_candidates)`; their log-probabilities, which may lack all columns if there is only one; and those
        at the places `(P,)`, which are missing if there are no candidates.
    """
    inputs = [x, weight, weight_scale, weight_sum, bias, added, num_candidates, places]
    return _choice("QuantizedChoice", inputs, {"least_input": -math.inf}, num_outputs=weight.shape[1])


def quantized_embedding(ids: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """The rows `(…, D)` of int8 weights of a map, in the project's own operator (QuantizedEmbedding).

    Args:
        ids: `(…)`.
        weight: `(D, V)` uint8, 128 above its levels.
        weight_scale: `(V,)`.
    """
    shape = (*ids.shape, weight.shape[0])
    name = f"{DOMAIN}::QuantizedEmbedding"
    return symbolic(name, [ids, weight, weight_scale], {}, dtype=torch.float32, shape=shape, version=1)


def int4_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    *,
    factor: float,
    clamps_negative: bool,
) -> Tensor:
    """A map of levels by int4 weights in blocks of 32 inputs, in the project's own operator (Int4Linear).

    A row's levels are `q = round(x / scale)` with `scale = max(|x|) / 127`. Its outputs are `factor * scale`
    times the sum over blocks b of `q_b @ (weight_b - 8) * weight_scale_b`, plus the bias.

    Args:
        x: `(rows, I)`.
        weight: `(panels, blocks, 8, 16, 4)` uint8: a byte has the weights of output `32 panel + i` in its low
            bits, and of `32 panel + 16 + i` in its high bits, for input `32 block + 4 group + j`.
        weight_scale: `(panels, blocks, 32)` float16.
        bias: `(O,)`.
        factor: Multiplies the products.
        clamps_negative: Whether negative inputs count as 0.
    """
    return symbolic(
        f"{DOMAIN}::Int4Linear",
        [x, weight, weight_scale, bias],
        {"least_input": 0.0 if clamps_negative else -math.inf, "factor": factor},
        dtype=torch.float32,
        shape=(*x.shape[:-1], bias.shape[0]),
        version=1,
    )


def int4_choice(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    added: Tensor,
    num_candidates: Tensor,
    places: Tensor,
    *,
    factor: float,
) -> tuple[Tensor, ...]:
    """`int4_linear` as logits, or the most probable tokens, as `quantized_choice` (Int4Choice, our own)."""
    inputs = [x, weight, weight_scale, bias, added, num_candidates, places]
    attributes = {"least_input": -math.inf, "factor": factor}
    return _choice("Int4Choice", inputs, attributes, num_outputs=bias.shape[0])


def _choice(
    name: str, inputs: list[Tensor], attributes: dict[str, Any], *, num_outputs: int
) -> tuple[Tensor, ...]:
    """The outputs of an operator that chooses tokens; the first input has its rows, the last its places."""
    x, places = inputs[0], inputs[-1]
    return tuple(
        symbolic_multi_out(
            f"{DOMAIN}::{name}",
            inputs,
            attributes,
            dtypes=(torch.float32, torch.int64, torch.float32, torch.float32),
            shapes=((x.shape[0], num_outputs), x.shape, x.shape, places.shape[:1]),
            version=1,
        )
    )


def int4_embedding(ids: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """The rows `(…, 32 blocks)` of weights as those of `int4_linear` (Int4Embedding, our own)."""
    shape = (*ids.shape, 32 * weight.shape[1])
    name = f"{DOMAIN}::Int4Embedding"
    return symbolic(name, [ids, weight, weight_scale], {}, dtype=torch.float32, shape=shape, version=1)


def low_rank(
    x: Tensor,
    y: Tensor,
    adapters: Tensor,
    ranks: Tensor,
    adapter_ids: Tensor,
    parts: Tensor,
    *,
    first_unit: int,
    first_part: int,
    num_units: int,
) -> Tensor:
    """The outputs of a map, with the low-rank term of each row's adapter (LowRank, our own; CudaLowRank).

    An output o of a row is `y[o]` plus the sum over r of `(A[parts[o], r] @ x) * B[r, o]`. A row without an
    adapter has the bits of `y`. The definition needs an adapter, and finite weights. It does not read
    `ranks`: weights beyond the rank of a part are zeros.

    Args:
        x: `(N, I)`, the inputs of the map.
        y: `(N, O)`, its outputs.
        adapters: `(K, R num_units)` float16: the weights of all maps, for ranks up to R. Those of this one
            begin at `R first_unit`: A `(P, R, I)`, then B `(R, O)`.
        ranks: `(K, parts of all maps)` int32; 0 for a part that an adapter does not change.
        adapter_ids: `(N,)` int64; -1 for none.
        parts: `(O,)` int64, a constant: the part of each output, in ascending order from 0 to P - 1.
        first_unit: Where the weights begin.
        first_part: Where the ranks of this map begin.
        num_units: The units of all maps; this one has P I + O.
    """
    return symbolic(
        f"{DOMAIN}::{'' if x.dtype == torch.float32 else 'Cuda'}LowRank",
        [x, y, adapters, ranks, adapter_ids, parts],
        {"first_unit": first_unit, "first_part": first_part, "num_units": num_units},
        dtype=y.dtype,
        shape=y.shape,
        version=1,
    )


def first(x: Tensor, length: int | Tensor, *, axis: int = 1) -> Tensor:
    """The first `length` positions along an axis, as a slice that is opaque to torch (Slice).

    The length may be a tensor `()`; torch then takes the axis to be as long as before.
    """
    start, axes = (torch.full((1,), number, dtype=torch.int64) for number in (0, axis))
    shape = list(x.shape)
    if isinstance(length, Tensor):
        end = length.to(torch.int64).reshape(1)
    else:
        end = torch.full((1,), length, dtype=torch.int64)
        shape[axis] = length
    return symbolic("Slice", [x, start, end, axes], dtype=x.dtype, shape=shape)


def gather(x: Tensor, indices: Tensor) -> Tensor:
    """The elements or vectors of `x` at indices `(N, axes)` of its first axes (GatherND)."""
    shape = (indices.shape[0], *x.shape[indices.shape[1] :])
    return symbolic("GatherND", [x, indices], dtype=x.dtype, shape=shape)


def scatter(buffer: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Write vectors `(…, K)` over those of a buffer at indices `(…, axes)` of its first axes (ScatterND).

    The write is in place if input and output are bound to one buffer.
    """
    return symbolic("ScatterND", [buffer, indices, updates], dtype=buffer.dtype, shape=buffer.shape)


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


def choice(scores: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """The scores `(B, V)` as float32 logits, and `most_probable` of the logits plus `added` (MostProbable).

    `added` is `(V,)`: minus infinity for tokens that are never chosen.
    """
    logits, token_ids = symbolic_multi_out(
        f"{DOMAIN}::MostProbable",
        [scores, added],
        {},
        dtypes=(torch.float32, torch.int64),
        shapes=(scores.shape, (scores.shape[0], 1)),
        version=1,
    )
    return logits, token_ids


def write_prefix(buffer: Tensor, update: Tensor, *, axis: int = 2, first: Tensor | None = None) -> Tensor:
    """Write `(…, S, …)` over the first S positions, along the axis, of `(…, C, …)` (TensorScatter, opset 24).

    In each row the positions begin at its own `first`, `(B,)` int64, if that is given. The write is in place
    if input and output are bound to one buffer.
    """
    inputs = [buffer, update, *([] if first is None else [first])]
    return symbolic(
        "TensorScatter", inputs, {"axis": axis}, dtype=buffer.dtype, shape=buffer.shape, version=24
    )


def recurrent_layer(
    cell: str, x: Tensor, weights: tuple[Tensor, Tensor, Tensor], lengths: Tensor, *, d_hidden: int
) -> Tensor:
    """All states of a layer of a recurrent encoder `(S, R, B, E)`, zeros after a row's end (GRU, LSTM).

    Args:
        cell: "GRU" or "LSTM".
        x: `(S, B, I)`.
        weights: The matrices of the inputs `(R, G, I)` and of the states `(R, G, E)`, and both biases
            `(R, 2 G)`; R is the number of directions.
        lengths: `(B,)` int32.
        d_hidden: E.
    """
    num_directions = weights[0].shape[0]
    direction = "bidirectional" if num_directions == 2 else "forward"
    attributes: dict[str, Any] = {"hidden_size": d_hidden, "direction": direction}
    if cell == "GRU":
        attributes["linear_before_reset"] = 1
    shape = (x.shape[0], num_directions, x.shape[1], d_hidden)
    return symbolic(cell, [x, *weights, lengths], attributes, dtype=x.dtype, shape=shape)
