"""The boxes of a graph: small torch modules over a trained model's layers, with fused operators inside.

Every token is one row of a matrix; only attention sees batch and position apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from export import operators
from export.linear import Linear, LinearFactory
from training.transformer import DecoderLayer, EncoderLayer, Transformer

# B batch rows   S source length   T target length   D d_model   H heads   K d_head   C cache capacity


class AddNorm(nn.Module):
    """The residual connection around a sublayer, with the layer norm that follows it.

    Post-norm (Vaswani et al. 2017, section 3.1) goes on with the norm alone; pre-norm (Xiong et al. 2020,
    arXiv:2002.04745) keeps the sum as the residual and takes the norm of the next sublayer.

    Args:
        norm: The trained layer norm.
        last: The last map of the sublayer; None where only the norm is used.
        pre_norm: Whether the stack is pre-norm.
        linear: Makes the graph's maps.
    """

    def __init__(
        self, norm: nn.LayerNorm, last: Linear | None, *, pre_norm: bool, linear: LinearFactory
    ) -> None:
        super().__init__()
        left_bias = None if last is None else last.left_bias
        self.weight = nn.Parameter(norm.weight.detach().to(linear.dtype))
        self.bias = nn.Parameter(norm.bias.detach().to(linear.dtype))
        self.sublayer_bias = None if left_bias is None else nn.Parameter(left_bias.to(linear.dtype))
        self.epsilon = norm.eps
        self.pre_norm = pre_norm
        self.is_fused = linear.is_fused

    def enter(self, x: Tensor) -> Tensor:
        """The norm alone: what the first sublayer of a pre-norm stack reads."""
        return operators.layer_normalization(x, self.weight, self.bias, epsilon=self.epsilon)

    def forward(self, output: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """What the next sublayer reads, and what its output will be added to."""
        if self.is_fused:
            normalized, total = operators.skip_layer_normalization(
                output, residual, self.weight, self.bias, self.sublayer_bias, epsilon=self.epsilon
            )
        else:  # ONNX Runtime 1.31 runs two nodes faster than the fused one on the CPU
            total = output + residual
            normalized = self.enter(total)
        return normalized, total if self.pre_norm else normalized


class FeedForward(nn.Module):
    """FFN(x) = max(0, xW₁ + b₁)W₂ + b₂ (Vaswani et al. 2017, equation 2)."""

    def __init__(self, layer: EncoderLayer | DecoderLayer, path: str, linear: LinearFactory) -> None:
        super().__init__()
        trained = layer.feed_forward
        self.inner = linear(f"{path}.feed_forward.inner", [trained.inner], may_leave_bias=True)
        self.outer = linear(f"{path}.feed_forward.outer", [trained.outer], may_leave_bias=True)
        self.floor: Tensor | None = None
        if self.inner.left_bias is not None and self.outer.left_bias is not None:
            # max(0, xW₁ + b₁) = max(xW₁, -b₁) + b₁, and b₁W₂ becomes part of b₂, as the graph rounds both.
            self.floor = nn.Parameter(-self.inner.left_bias.to(linear.dtype))
            rounded = -self.floor.detach().to(torch.float32)
            outer_weight = trained.outer.weight.detach().to(linear.dtype).to(torch.float32)
            self.outer.left_bias = self.outer.left_bias + outer_weight @ rounded

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        if self.floor is not None:
            return self.outer(torch.maximum(hidden, self.floor))
        return self.outer(hidden if self.outer.clamps_negative else torch.relu(hidden))


class Embedding(nn.Module):
    """Token embeddings scaled by √D, plus sinusoidal positions (Vaswani et al. 2017, sections 3.4, 3.5).

    Attributes:
        weight: `(V, D)`.
        weight_scale: By which `weight` is multiplied already.
    """

    def __init__(self, model: Transformer, weight: Tensor, linear: LinearFactory) -> None:
        super().__init__()
        self.scale = math.sqrt(model.config.d_model)
        self.weight_scale = self.scale if linear.is_fused else 1.0
        self.weight = nn.Parameter((weight.detach() * self.weight_scale).to(linear.dtype))
        self.positions = nn.Parameter(model.positions.detach().to(linear.dtype))

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        embedded = nn.functional.embedding(ids, self.weight)
        return (embedded if self.weight_scale == self.scale else embedded * self.scale) + positions


class EncoderBlock(nn.Module):
    """One encoder layer over `(B·S, D)` rows."""

    def __init__(self, layer: EncoderLayer, path: str, linear: LinearFactory, num_heads: int) -> None:
        super().__init__()
        attention = layer.self_attention
        packed = [attention.query, attention.key, attention.value]
        self.query_key_value = linear(f"{path}.self_attention.query", packed)
        self.output = linear(f"{path}.self_attention.output", [attention.output], may_leave_bias=True)
        self.feed_forward = FeedForward(layer, path, linear)
        self.num_heads = num_heads

    def lasts(self) -> list[Linear]:
        """The last map of each sublayer, in order."""
        return [self.output, self.feed_forward.outer]

    def attend(self, x: Tensor, lengths: Tensor, source_length: int) -> Tensor:
        """Self-attention within each row of `(B, S)`."""
        packed = self.query_key_value(x)  # (B*S, 3D)
        packed = packed.reshape(-1, source_length, packed.shape[1])  # (B, S, 3D)
        query, key, value = packed.chunk(3, dim=2)
        attended = operators.multi_head_attention(query, key, value, lengths, num_heads=self.num_heads)
        return self.output(attended.reshape(-1, x.shape[1]))


class DecoderBlock(nn.Module):
    """One decoder layer, for one position a row and for several."""

    def __init__(self, layer: DecoderLayer, path: str, linear: LinearFactory, num_heads: int) -> None:
        super().__init__()
        attention, cross = layer.self_attention, layer.cross_attention
        packed = [attention.query, attention.key, attention.value]
        self.query_key_value = linear(f"{path}.self_attention.query", packed)
        self.output = linear(f"{path}.self_attention.output", [attention.output], may_leave_bias=True)
        self.cross_query = linear(f"{path}.cross_attention.query", [cross.query])
        self.cross_output = linear(f"{path}.cross_attention.output", [cross.output], may_leave_bias=True)
        self.feed_forward = FeedForward(layer, path, linear)
        self.num_heads = num_heads

    def lasts(self) -> list[Linear]:
        """The last map of each sublayer, in order."""
        return [self.output, self.cross_output, self.feed_forward.outer]

    def attend(
        self, x: Tensor, cache: tuple[Tensor, Tensor], lengths: Tensor, capacity: Tensor, target_length: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Masked self-attention of `(B·T, D)` rows; the cache grows by T positions."""
        packed = self.query_key_value(x)  # (B*T, 3D)
        packed = packed.view(-1, target_length, packed.shape[1])  # (B, T, 3D)
        attended, key, value = operators.group_query_attention(
            packed, None, None, *cache, lengths, capacity, num_heads=self.num_heads
        )
        return self.output(attended.reshape(-1, x.shape[1])), key, value

    def attend_memory(
        self, x: Tensor, memory: Sequence[Tensor], lengths: Tensor, capacity: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Cross-attention of one position a row, over the row's own source positions.

        The operator always appends; it is handed the last source position again, which lands where it is.
        """
        key, value, last_key, last_value = memory
        query = self.cross_query(x).unsqueeze(1)  # (B, 1, D)
        attended, key, value = operators.group_query_attention(
            query, last_key, last_value, key, value, lengths, capacity, num_heads=self.num_heads
        )
        return self.cross_output(attended.squeeze(1)), key, value

    def attend_memory_fully(
        self, x: Tensor, key: Tensor, value: Tensor, mask: Tensor, target_length: int
    ) -> tuple[Tensor, Tensor]:
        """Cross-attention of T positions a row by its definition (equation 1); also its weights.

        Args:
            x: `(B·T, D)`.
            key: `(B, H, C, K)`.
            value: `(B, H, C, K)`.
            mask: `(B, 1, 1, C)`, True = may attend.
            target_length: T.
        """
        H, K = self.num_heads, key.shape[3]
        query = self.cross_query(x).view(-1, target_length, H, K).transpose(1, 2)  # (B, H, T, K)
        scores = query @ key.transpose(2, 3) / math.sqrt(K)  # (B, H, T, C)
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores, dim=-1)
        attended = (weights @ value).transpose(1, 2).reshape(-1, x.shape[1])  # (B*T, D)
        return self.cross_output(attended), weights
