"""The layers of a Transformer's graphs: small torch modules with fused operators over trained layers.

Every token is one row of a matrix; only attention separates batch and position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from seq2seq_serve.export.graphs import operators
from seq2seq_serve.export.graphs.adapted import AdaptedLinear
from seq2seq_serve.export.graphs.layout import Layout
from seq2seq_serve.export.graphs.linear import FloatLinear, Linear, LinearFactory
from seq2seq_serve.training.models.options import Activation, LayerKind, StackConfig

# B batch rows   S source length   T target length   D d_model   H heads   G heads of keys and values
# K d_head   C cache capacity

# τ of `AddNorm`. A small τ makes the folded part of the weights large, a large τ the output of the norm;
# either costs precision.
_TAU = 0.25
# Folding divides by γ. If |γ| is smaller than this, the map keeps its bias, at the cost of one more kernel.
_LEAST_SCALE = 1e-3


class AddNorm(nn.Module):
    """The residual connection around a sublayer, with the norm that follows it.

    In post-norm (Vaswani et al. 2017, section 3.1) the norm's output is also the next residual; in pre-norm
    (Xiong et al. 2020, arXiv:2002.04745) the sum is the next residual, and the norm is that of the next
    sublayer.

    The fused form takes over the biases of the neighbouring maps. The bias of the map before is added to the
    sum. The bias of the map after is folded into its weights: a layer norm is γn + β, and n sums to 0, so γ(n
    + τ) divided by γ sums to Dτ for every input (`FloatLinear.fold_bias`). The norm's own bias is then τγ,
    which shifts its output by τγ - β. Creating an `AddNorm` therefore changes `last` and `first`. An RMS norm
    does not make the sum of its output constant, so nothing is folded after it. Nor is anything folded into a
    map with adapters, whose terms read the norm itself.

    Args:
        norm: The trained norm, a `LayerNorm` or an `RMSNorm`.
        last: The map whose output is added to the residual; None for the first norm of a pre-norm stack.
        first: The only map that reads the norm's output (in post-norm the residual reads it, too); None for
            the last norm.
        residual_shift: `(D,)`, the shift of the residual; None if it is not shifted.
        pre_norm: Whether the stack is pre-norm.
        linear: The factory of the graph's maps.
        residual_scale: The factor of the residual; an RMS norm removes it.

    Attributes:
        shift: `(D,)`, the shift of the norm's output; None if it is not shifted.
    """

    def __init__(
        self,
        norm: nn.Module,
        last: Linear | None,
        first: Linear | None,
        residual_shift: Tensor | None,
        *,
        pre_norm: bool,
        linear: LinearFactory,
        residual_scale: float = 1.0,
    ) -> None:
        super().__init__()
        assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
        assert norm.eps is not None
        self.weight = nn.Parameter(norm.weight.detach(), requires_grad=False)
        self.bias = None
        if isinstance(norm, nn.LayerNorm):
            self.bias = nn.Parameter(norm.bias.detach(), requires_grad=False)
        self.sublayer_bias: nn.Parameter | None = None
        self.shift: Tensor | None = None
        self.epsilon = norm.eps * residual_scale**2
        self.pre_norm = pre_norm
        self.is_fused = linear.is_fused
        if isinstance(last, AdaptedLinear):  # terms are added to its output, with or without the bias
            last = last.linear
        if self.is_fused and isinstance(last, FloatLinear):
            bias = last.take_bias()
            if residual_shift is not None:
                bias = -residual_shift if bias is None else bias - residual_shift
            self.sublayer_bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        # Rounded as in the graph, because the folded weights must match the computed norm.
        scale = self.weight.detach().to(linear.dtype).to(self.weight.dtype)
        is_foldable = scale.abs().min() > _LEAST_SCALE
        if self.is_fused and isinstance(first, FloatLinear) and self.bias is not None and is_foldable:
            self.shift = _TAU * scale - self.bias.detach()
            self.bias = nn.Parameter(_TAU * scale, requires_grad=False)
            first.fold_bias(self.shift, scale, _TAU * len(scale))

    def enter(self, x: Tensor) -> Tensor:
        """The norm alone, for the first sublayer of a pre-norm stack."""
        if self.bias is None:
            return operators.rms_normalization(x, self.weight, epsilon=self.epsilon)
        return operators.layer_normalization(x, self.weight, self.bias, epsilon=self.epsilon)

    def forward(self, output: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The input of the next sublayer, and the next residual."""
        if not self.is_fused and self.bias is not None and operators.takes(len(self.weight)):
            total, normalized = operators.add_norm(
                output, residual, self.weight, self.bias, epsilon=self.epsilon
            )
        elif not self.is_fused:  # ONNX Runtime 1.31 runs two nodes faster than its fused one on the CPU
            total = output + residual
            normalized = self.enter(total)
        elif self.bias is None:
            normalized, total = operators.skip_rms_normalization(
                output, residual, self.weight, self.sublayer_bias, epsilon=self.epsilon
            )
        else:
            normalized, total = operators.skip_layer_normalization(
                output, residual, self.weight, self.bias, self.sublayer_bias, epsilon=self.epsilon
            )
        return normalized, total if self.pre_norm else normalized


class NormedLinear(Linear):
    """A map and the RMS norm of its output.

    Args:
        linear: A map whose outputs are scaled by the residual scale.
        norm: The trained norm.
        residual_scale: The factor of the norm's outputs.
    """

    def __init__(self, linear: Linear, norm: nn.RMSNorm, residual_scale: float) -> None:
        super().__init__()
        assert norm.eps is not None
        self.linear = linear
        self.clamps_negative = linear.clamps_negative
        self.weight = nn.Parameter(norm.weight.detach() * residual_scale, requires_grad=False)
        self.epsilon = norm.eps * residual_scale**2

    def forward(self, x: Tensor) -> Tensor:
        return operators.rms_normalization(self.linear(x), self.weight, epsilon=self.epsilon)


def with_norm(linear: Linear, layer: Any, sublayer: str, residual_scale: float) -> Linear:
    """The last map of a sublayer, with the norm of its output if the layer has one."""
    norm = getattr(layer, f"{sublayer}_output_norm", None)
    return NormedLinear(linear, norm, residual_scale) if isinstance(norm, nn.RMSNorm) else linear


class FeedForward(nn.Module):
    """a(xW₁ + b₁)W₂ + b₂ (Vaswani et al. 2017, equation 2), or gated: (a(xG) ⊙ xW₁)W₂.

    One map computes both factors of a gated network. A residual scale is applied before the product, so that
    neither it nor the output leaves the range of float16.
    """

    def __init__(self, layer: Any, stack: StackConfig, linear: LinearFactory, residual_scale: float) -> None:
        super().__init__()
        network = layer.feed_forward
        gate: nn.Linear | None = getattr(network, "gate", None)
        self.is_gated = gate is not None
        self.is_one_kernel = linear.is_fused and operators.takes(network.inner.out_features)
        self.activation = stack.activation
        first_maps = [network.inner] if gate is None else [gate, network.inner]
        is_relu = self.activation == "relu" and not self.is_gated
        self.inner = linear(first_maps, precedes_relu=is_relu)
        outer = linear([network.outer], follows_relu=is_relu)
        if self.is_gated or self.activation == "relu":
            scale_columns(self.inner, residual_scale, first=0 if gate is None else gate.out_features)
        else:
            scale_columns(outer, residual_scale)
        self.outer = with_norm(outer, layer, "feed_forward", residual_scale)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        if self.is_gated and self.is_one_kernel:
            return self.outer(operators.cuda_gated(hidden, self.activation))
        if self.is_gated:
            gate, hidden = hidden.chunk(2, dim=1)
            return self.outer(_ACTIVATIONS[self.activation](gate) * hidden)
        if self.inner.has_relu or self.outer.clamps_negative:
            return self.outer(hidden)
        return self.outer(_ACTIVATIONS[self.activation](hidden))


class _Block(nn.Module):
    """The parts of a layer with a single attention."""

    def __init__(
        self, layer: Any, stack: StackConfig, linear: LinearFactory, residual_scale: float = 1.0
    ) -> None:
        super().__init__()
        attention = layer.self_attention
        packed = [attention.query, attention.key, attention.value]
        self.query_key_value = linear(packed)
        self.output = _last(layer, "self_attention", linear, residual_scale)
        self.feed_forward = FeedForward(layer, stack, linear, residual_scale)
        self.num_heads, self.d_head, self.scale = stack.num_heads, stack.d_head, stack.attention_scale
        self.heads, self.cap = Heads(attention, stack), stack.score_cap

    def ends(self) -> list[tuple[Linear, Linear]]:
        """The first and the last map of each sublayer, in order."""
        inner, outer = self.feed_forward.inner, self.feed_forward.outer
        return [(self.query_key_value, self.output), (inner, outer)]


class EncoderBlock(_Block):
    """One encoder layer over the rows of a batch's layout."""

    def attend(self, x: Tensor, layout: Layout, bias: Tensor | None = None) -> Tensor:
        """Self-attention within each source; the bias `(1, H, S, S)` is added to the scores."""
        attended = layout.attend(self.query_key_value(x), bias, num_heads=self.num_heads, scale=self.scale)
        return self.output(attended)

    def attend_fully(
        self, x: Tensor, layout: Layout, mask: Tensor, rotation: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Self-attention by its definition; the mask is `(B, 1, 1 or S, S)`, True = may attend."""
        [packed] = layout.places(self.query_key_value(x))  # (B, S, (H + 2G)K)
        B, S, _ = packed.shape
        query, key, value = self.heads(packed, S, torch.zeros(1, dtype=torch.int64), rotation)
        attended, _ = attention(query, [(key, value, mask)], scale=self.scale, cap=self.cap)
        return self.output(layout.rows(attended.view(B, S, -1)))


class DecoderBlock(nn.Module):
    """One decoder layer, for one or several positions per row."""

    def __init__(
        self,
        layer: Any,
        stack: StackConfig,
        kind: LayerKind,
        linear: LinearFactory,
        residual_scale: float = 1.0,
    ) -> None:
        super().__init__()
        attention, cross = layer.self_attention, layer.cross_attention
        packed = [attention.query, attention.key, attention.value]
        self.query_key_value = linear(packed)
        self.output = _last(layer, "self_attention", linear, residual_scale)
        self.cross_query = linear([cross.query])
        self.cross_output = _last(layer, "cross_attention", linear, residual_scale)
        self.feed_forward = FeedForward(layer, stack, linear, residual_scale)
        self.num_heads, self.d_head, self.scale = stack.num_heads, stack.d_head, stack.attention_scale
        self.cap, self.kind = stack.score_cap, kind

    def ends(self) -> list[tuple[Linear, Linear]]:
        """The first and the last map of each sublayer, in order."""
        inner, outer = self.feed_forward.inner, self.feed_forward.outer
        return [(self.query_key_value, self.output), (self.cross_query, self.cross_output), (inner, outer)]

    def attend(
        self,
        x: Tensor,
        cache: tuple[Tensor, Tensor],
        lengths: Tensor,
        capacity: Tensor,
        target_length: int,
        bias: Tensor | None = None,
        rotation: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Masked self-attention of `(B·T, D)` rows; the cache grows by T positions.

        The bias `(B or 1, H, T, capacity)` is added to the scores.
        """
        packed = self.query_key_value(x)  # (B*T, (H + 2G)K)
        dtype, width = cache[0].dtype, self.num_heads * self.d_head
        if dtype is not packed.dtype:  # as in a step, only keys and values are rounded
            packed = torch.cat([packed[:, :width], packed[:, width:].to(dtype).to(packed.dtype)], dim=1)
        packed = packed.view(-1, target_length, packed.shape[1])  # (B, T, (H + 2G)K)
        attended, key, value = operators.group_query_attention(
            packed,
            None,
            None,
            cache[0].to(packed.dtype),
            cache[1].to(packed.dtype),
            lengths,
            capacity,
            num_heads=self.num_heads,
            scale=self.scale,
            bias=bias,
            cap=self.cap,
            window=None if self.kind.window is None else self.kind.window[0] + 1,
            rotation=rotation,
        )
        return self.output(attended.reshape(-1, width)), key.to(dtype), value.to(dtype)

    def attend_once(
        self,
        x: Tensor,
        cache: tuple[Tensor, Tensor],
        lengths: Tensor,
        owners: Tensor | None,
        capacity: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`attend` of separate positions, without rotation, in the project's own operator.

        The bias `(H, D)` is by distance.
        """
        attended, key, value = operators.cache_attention(
            self.query_key_value(x),
            *cache,
            lengths,
            owners,
            capacity,
            num_heads=self.num_heads,
            scale=self.scale,
            cap=self.cap,
            bias=bias,
        )
        return self.output(attended), key, value

    def attend_memory(
        self, x: Tensor, memory: Sequence[Tensor], lengths: Tensor, owners: Tensor, capacity: Tensor
    ) -> Tensor:
        """Cross-attention of `(B, D)` rows, each over the memory of its owner."""
        attended = operators.memory_attention(
            self.cross_query(x),
            memory,
            lengths,
            owners,
            capacity,
            num_heads=self.num_heads,
            scale=self.scale,
            cap=self.cap,
        )
        return self.cross_output(attended)

    def attend_memory_in_place(
        self, x: Tensor, memory: Sequence[Tensor], lengths: Tensor, capacity: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Cross-attention of one position per row, over the row's own source positions.

        ONNX Runtime's operator always appends a position, so it gets the last source position again and
        rewrites it in place.
        """
        query = self.cross_query(x)
        if operators.takes_on_cuda(self.d_head):
            attended, key, value = operators.cuda_memory_attention(
                query,
                memory,
                lengths,
                capacity,
                num_heads=self.num_heads,
                scale=self.scale,
                cap=self.cap,
            )
            return self.cross_output(attended), key, value
        key, value, last_key, last_value = memory
        attended, key, value = operators.group_query_attention(
            query.unsqueeze(1),
            last_key,
            last_value,
            key,
            value,
            lengths,
            capacity,
            num_heads=self.num_heads,
            scale=self.scale,
            cap=self.cap,
        )
        return self.cross_output(attended.squeeze(1)), key, value

    def attend_memory_fully(
        self, x: Tensor, key: Tensor, value: Tensor, mask: Tensor, target_length: int
    ) -> tuple[Tensor, Tensor]:
        """Cross-attention of T positions per row by its definition (equation 1), and its weights.

        `x` is `(B·T, D)`, key and value are `(B, G, C, K)`. The mask is `(B, 1, 1, C)`, True = may attend.
        """
        query = self.cross_query(x).view(-1, target_length, self.num_heads, self.d_head).transpose(1, 2)
        source = (key.to(x.dtype), only_live(value, mask).to(x.dtype), mask)
        attended, [weights] = attention(query, [source], scale=self.scale, cap=self.cap)
        return self.cross_output(attended), weights


class MergedBlock(_Block):
    """One decoder layer whose queries attend to cache and memory at once, for one or several positions."""

    def attend(
        self,
        x: Tensor,
        positions: Tensor,
        cache: tuple[Tensor, Tensor],
        cache_mask: Tensor,
        is_cached: Tensor,
        memory: tuple[Tensor, Tensor],
        memory_mask: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Attention of `(B·T, D)` rows at the positions `(B, T)`; the cache grows by T positions.

        The masks are `(B, 1, T, C)` and `(B, 1, 1, S)`, True = may attend; `is_cached` `(B, 1, 1, C)` is True
        for the positions up to the last query. Returns the output, the cache's keys and values, and the part
        of the weights that the memory has `(B, H, T, S)`.
        """
        query, *new = self.heads(self.query_key_value(x), positions.shape[1], positions, rotation)
        key, value = (
            operators.write_prefix(buffer, update, first=positions[:, 0])
            for buffer, update in zip(cache, new, strict=True)
        )
        sources = [
            (key, only_live(value, is_cached), cache_mask),
            (memory[0], only_live(memory[1], memory_mask), memory_mask),
        ]
        attended, weights = attention(query, sources, scale=self.scale, cap=self.cap)
        return self.output(attended), key, value, weights[1]


class Heads(nn.Module):
    """Separates a packed projection into heads; queries and keys may have norms, and may be rotated."""

    def __init__(self, attention: Any, stack: StackConfig) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads = stack.num_heads, stack.num_key_value_heads
        self.d_head = stack.d_head
        self.query_norm = HeadNorm.of(attention, "query_norm")
        self.key_norm = HeadNorm.of(attention, "key_norm")

    def forward(
        self, packed: Tensor, length: int, positions: Tensor, rotation: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `(B, H, T, K)`, keys and values `(B, G, T, K)` of `(B·T, (H + 2G)K)`, or of `(B, T, …)`.

        The positions are those that `operators.rotate` takes.
        """
        H, G, K = self.num_heads, self.num_key_value_heads, self.d_head
        # Of slices of one tensor ONNX Runtime makes a Split. If its parts are unequal, CUDA's copies their
        # sizes from the host, which a captured graph cannot do.
        query = packed[..., : H * K].view(-1, length, H, K).transpose(1, 2)
        rest = packed.view(-1, length, H + 2 * G, K)[:, :, H:].transpose(1, 2)
        key, value = rest.chunk(2, dim=1)
        query = query if self.query_norm is None else self.query_norm(query)
        key = key if self.key_norm is None else self.key_norm(key)
        if rotation is not None:
            query, key = (operators.rotate(x, positions, *rotation) for x in (query, key))
        return query, key, value


class HeadNorm(nn.Module):
    """An RMS norm of each head."""

    def __init__(self, norm: nn.RMSNorm) -> None:
        super().__init__()
        assert norm.eps is not None
        self.weight, self.epsilon = nn.Parameter(norm.weight.detach(), requires_grad=False), norm.eps

    @classmethod
    def of(cls, attention: Any, name: str) -> HeadNorm | None:
        """The norm of this name, if the attention has it."""
        norm = getattr(attention, name, None)
        return cls(norm) if isinstance(norm, nn.RMSNorm) else None

    def forward(self, x: Tensor) -> Tensor:
        return operators.rms_normalization(x, self.weight, epsilon=self.epsilon)


def only_live(values: Tensor, is_live: Tensor) -> Tensor:
    """Values `(…, S, K)` of a buffer, with zeros at the positions that a mask `(…, 1, S)` excludes.

    An earlier request may have left NaN there, which a weight of zero would not remove. Recurrent models and
    captioners save the time: their memory is finite, because it is bounded states or normalised features.
    """
    return values.masked_fill(~is_live.transpose(-2, -1), 0.0)


def attention(
    query: Tensor, sources: Sequence[tuple[Tensor, Tensor, Tensor]], *, scale: float, cap: float | None
) -> tuple[Tensor, list[Tensor]]:
    """Attention by its definition (Vaswani et al. 2017, equation 1), in groups of heads with equal keys.

    Args:
        query: `(B, H, T, K)`.
        sources: Keys and values `(B, G, S, K)`, and a mask that broadcasts to `(B, H, T, S)`, True = may
            attend; one softmax is over all of them.
        scale: The factor of the scores.
        cap: c; scores s become c tanh(s / c); None leaves them.

    Returns:
        The output `(B·T, HK)`, and the weights `(B, H, T, S)` of each source.
    """
    (_, H, T, K), G = query.shape, sources[0][0].shape[1]

    def grouped(x: Tensor) -> Tensor:
        return x if G == H else x.reshape(-1, G, H // G * T, x.shape[3])

    def separate(x: Tensor) -> Tensor:
        return x if G == H else x.reshape(-1, H, T, x.shape[3])

    query = grouped(query)  # (B, G, H/G*T, K)
    parts = []
    for key, _, mask in sources:
        scores = separate(query @ key.transpose(2, 3) * scale)  # (B, H, T, S)
        if cap is not None:
            scores = torch.tanh(scores / cap) * cap
        parts.append(scores.masked_fill(~mask, torch.finfo(scores.dtype).min))
    weights = _softmax(parts)
    products = [grouped(part) @ value for part, (_, value, _) in zip(weights, sources, strict=True)]
    attended = separate(reduce(torch.add, products))
    return attended.transpose(1, 2).reshape(-1, H * K), weights


def _softmax(parts: Sequence[Tensor]) -> list[Tensor]:
    """One softmax over the last axis of all parts.

    They are not joined: on CUDA, joining tensors of different sizes copies the sizes from the host, which a
    captured graph cannot do.
    """
    if len(parts) == 1:
        return [torch.softmax(parts[0], dim=-1)]
    largest = reduce(torch.maximum, (part.amax(dim=-1, keepdim=True) for part in parts))
    powers = [torch.exp(part - largest) for part in parts]
    total = reduce(torch.add, (power.sum(dim=-1, keepdim=True) for power in powers))
    return [power / total for power in powers]


def _last(layer: Any, attention: str, linear: LinearFactory, residual_scale: float) -> Linear:
    """The output map of an attention, with the norm of its output if the layer has one."""
    output = linear([getattr(layer, attention).output])
    scale_columns(output, residual_scale)
    return with_norm(output, layer, attention, residual_scale)


def scale_columns(linear: Linear, scale: float, *, first: int = 0) -> None:
    """Multiply the outputs of a map, from the first one given on, by a constant."""
    if scale == 1:
        return
    if isinstance(linear, AdaptedLinear):
        linear.scale_parts(scale, first)
        linear = linear.linear
    assert isinstance(linear, FloatLinear)
    linear.weight[:, first:] *= scale
    if linear.bias is not None:
        linear.bias[first:] *= scale


_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": operators.gelu,
    "gelu_tanh": operators.fast_gelu,
    "silu": operators.silu,
}
