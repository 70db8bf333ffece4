"""The linear maps of a graph in each precision, and the factories that create them from trained layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from seq2seq_serve.export.graphs import operators

_LEAST_SHARED_BYTES = 2**24  # of a table
_BLOCK = 32  # inputs that share a scale in int4, and outputs of a panel
_PANELS_AT_ONCE = 8  # are quantised, so that they stay in a processor's cache
# What a block's largest weight may be of its scale, in int4
_EXTREME_LEVELS = (-8.0, 8.0, -7.5, 7.5, -7.0, 7.0, -8.5, 8.5, -9.0, 9.0)


class Linear(nn.Module):
    """`xW + b` over `(rows, I)`.

    Attributes:
        clamps_negative: Whether the map takes negative inputs for 0, so that it needs no ReLU before it.
        has_relu: Whether the map itself takes negative outputs for 0.
    """

    clamps_negative = False
    has_relu = False

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = super().__call__(x)
        return result

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


@runtime_checkable
class Chooser(Protocol):
    """An output projection that also finds the most probable tokens, without writing logits."""

    def choose(self, x: Tensor, added: Tensor, num_candidates: Tensor, places: Tensor) -> tuple[Tensor, ...]:
        """The outputs as logits, or the most probable tokens: see `operators.quantized_choice`."""


class LinearFactory(Protocol):
    """Creates the linear maps of one precision.

    Attributes:
        dtype: The type of all tensors in the graph except quantised weights.
        cache_dtype: The type of keys and values in memory and cache, where operators of this project read
            them.
        is_fused: Whether norms add the biases of the neighbouring maps. On a GPU, each bias that a map adds
            itself is one more kernel, whose launch costs about as much as its computation for a few rows.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def cache_dtype(self) -> torch.dtype: ...

    @property
    def is_fused(self) -> bool: ...

    def __call__(
        self, layers: Sequence[nn.Linear], *, follows_relu: bool = False, precedes_relu: bool = False
    ) -> Linear:
        """The layers side by side as one map, with weights of the trained model's type.

        Args:
            layers: Layers that all read one input.
            follows_relu: Whether the input is that of a ReLU, which the map may take over.
            precedes_relu: Whether a ReLU follows the map, which the map may apply itself (`has_relu`).
        """

    def output(self, weight: Tensor, bias: Tensor | None = None, *, scale: float = 1.0) -> Linear | None:
        """The output projection by a matrix (V, D) times a constant.

        None if the graph multiplies by the matrix itself.
        """

    def table(self, weight: Tensor) -> Table | None:
        """A table of embeddings (V, D); an output projection by the same matrix shares its weights.

        None if the graph looks tokens up itself.
        """


class Table(nn.Module):
    """Rows `(…, D)` of a table by ids `(…)`."""

    def __call__(self, ids: Tensor) -> Tensor:
        result: Tensor = super().__call__(ids)
        return result

    def forward(self, ids: Tensor) -> Tensor:
        raise NotImplementedError


def _is_large(table: Tensor) -> bool:
    """Whether a table is worth keeping as the weights of a map.

    In the weights of a map a token's numbers are far apart: 640 tokens of 256 numbers take a millisecond to
    collect.
    """
    return table.nbytes >= _LEAST_SHARED_BYTES


class FloatLinear(Linear):
    """A linear map in ONNX Runtime's own operator."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)  # (I, O)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)  # (O,)

    def take_bias(self) -> Tensor | None:
        """Removes the bias and returns it to the caller, who adds it elsewhere."""
        bias, self.bias = self.bias, None
        return None if bias is None else bias.detach()

    def fold_bias(self, shift: Tensor, scale: Tensor, total: float) -> None:
        """Moves the bias into the weights, for inputs `x + shift` instead of `x`.

        Requires that the sum of `(x + shift) / scale` is `total`, not 0, for every x. Then adding `c / (scale
        * total)` to a column of the weights adds exactly c to the column's output. Shift and scale are
        `(I,)`.
        """
        weight, bias = self.weight.detach(), self.take_bias()
        constant = -shift @ weight if bias is None else bias - shift @ weight  # (O,)
        self.weight = nn.Parameter(weight + torch.outer(1 / scale, constant / total))

    def forward(self, x: Tensor) -> Tensor:
        return operators.gemm(x, self.weight, self.bias)


class PanelLinear(Linear):
    """A linear map in float32 on the CPU.

    Its operator adds the products of an output in a fixed order, so a row has the same outputs in any batch,
    and on every processor. All graphs share its weights, which a server lays out in panels of outputs.
    """

    weight: Tensor
    bias: Tensor

    def __init__(
        self, weight: Tensor, bias: Tensor | None, *, factor: float = 1.0, has_relu: bool = False
    ) -> None:
        super().__init__()
        self.factor, self.has_relu = factor, has_relu
        self.register_buffer("weight", weight)  # (O, I)
        self.register_buffer("bias", weight.new_zeros(len(weight)) if bias is None else bias)  # (O,)

    def forward(self, x: Tensor) -> Tensor:
        return operators.linear(x, self.weight, self.bias, factor=self.factor, has_relu=self.has_relu)


class PanelTable(Table):
    """A table in the weights of a map: those of the output projection, if it is the same matrix."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)  # (V, D)

    def forward(self, ids: Tensor) -> Tensor:
        return operators.embedding(ids, self.weight)


@dataclass(frozen=True)
class FloatFactory:
    """Maps in a floating-point type.

    Attributes:
        is_beside_quantized: Whether the graph writes the memory of quantised graphs.
    """

    dtype: torch.dtype
    is_fused: bool = False
    is_beside_quantized: bool = False

    @property
    def cache_dtype(self) -> torch.dtype:
        return QuantizedFactory.cache_dtype if self.is_beside_quantized else self.dtype

    def __call__(
        self,
        layers: Sequence[nn.Linear],
        *,
        follows_relu: bool = False,  # noqa: ARG002
        precedes_relu: bool = False,
    ) -> Linear:
        weight, bias = _side_by_side(layers)
        if self.is_fused:
            return FloatLinear(weight.t().contiguous(), bias)
        return PanelLinear(weight, bias, has_relu=precedes_relu)

    def output(self, weight: Tensor, bias: Tensor | None = None, *, scale: float = 1.0) -> Linear | None:
        return None if self.is_fused else PanelLinear(weight.detach(), bias, factor=scale)

    def table(self, weight: Tensor) -> Table | None:
        return None if self.is_fused or not _is_large(weight) else PanelTable(weight.detach())


class Int8Weights:
    """Weights `(O, I)` with a scale for each output.

    Attributes:
        levels: `(I, O)` uint8: the levels from -127 to 127, plus 128. ONNX Runtime multiplies unsigned by
            unsigned levels exactly everywhere; unsigned by signed ones saturate on processors without VNNI.
        scale: `(O,)`.
    """

    def __init__(self, weight: Tensor) -> None:
        columns = weight.t()  # (I, O)
        self.scale = columns.abs().amax(dim=0).clamp_min(1e-8) / 127
        self.levels = (torch.round(columns / self.scale) + 128).to(torch.uint8)


class Int8Linear(Linear):
    """Products of 8-bit levels, exact on every processor, with a scale for each row and each output column.

    A row's scale and zero point are computed from this row alone, so a row's outputs do not depend on its
    neighbours.

    Attributes:
        weight: `(I, O)` uint8, as in `Int8Weights`.
        weight_scale: `(O,)`.
        weight_sum: `(O,)` int32: the sum of each column's levels.
        bias: `(O,)`.
    """

    weight: Tensor
    weight_scale: Tensor
    weight_sum: Tensor
    bias: Tensor

    def __init__(
        self, weights: Int8Weights, bias: Tensor, *, factor: float = 1.0, clamps_negative: bool = False
    ) -> None:
        super().__init__()
        self.clamps_negative = clamps_negative
        levels = weights.levels
        sums = levels.sum(dim=0, dtype=torch.int32) - 128 * len(levels)
        self.register_buffer("weight", levels)
        self.register_buffer("weight_scale", weights.scale * factor)
        self.register_buffer("weight_sum", sums.to(torch.int32))
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return operators.quantized_linear(
            x,
            self.weight,
            self.weight_scale,
            self.weight_sum,
            self.bias,
            clamps_negative=self.clamps_negative,
        )

    def choose(self, x: Tensor, added: Tensor, num_candidates: Tensor, places: Tensor) -> tuple[Tensor, ...]:
        return operators.quantized_choice(
            x, self.weight, self.weight_scale, self.weight_sum, self.bias, added, num_candidates, places
        )


class Int4Weights:
    """Weights `(O, I)` of 4 bits, with a scale for each 32 inputs of an output.

    Attributes:
        levels: `(panels, blocks, 8, 16, 4)` uint8, as for `operators.int4_linear`.
        scale: `(panels, blocks, 32)` float16.
    """

    def __init__(self, weight: Tensor) -> None:
        panels = [_int4_panels(some) for some in torch.split(weight, _PANELS_AT_ONCE * _BLOCK)]
        self.levels, self.scale = (torch.cat(parts) for parts in zip(*panels, strict=True))


class Int4Linear(Linear):
    """Products of the 8-bit levels of a row by 4-bit weights, with the same bits on every processor.

    Attributes:
        weight: `(panels, blocks, 8, 16, 4)` uint8.
        weight_scale: `(panels, blocks, 32)` float16.
        factor: Multiplies the products.
        bias: `(O,)`.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor

    def __init__(
        self, weights: Int4Weights, bias: Tensor, *, factor: float = 1.0, clamps_negative: bool = False
    ) -> None:
        super().__init__()
        self.factor, self.clamps_negative = factor, clamps_negative
        self.register_buffer("weight", weights.levels)
        self.register_buffer("weight_scale", weights.scale)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return operators.int4_linear(
            x,
            self.weight,
            self.weight_scale,
            self.bias,
            factor=self.factor,
            clamps_negative=self.clamps_negative,
        )

    def choose(self, x: Tensor, added: Tensor, num_candidates: Tensor, places: Tensor) -> tuple[Tensor, ...]:
        return operators.int4_choice(
            x, self.weight, self.weight_scale, self.bias, added, num_candidates, places, factor=self.factor
        )


class QuantizedTable(Table):
    """A table in the weights of a map: those of the output projection, if it is the same matrix.

    Attributes:
        weight: The levels of the weights.
        weight_scale: Their scales.
    """

    weight: Tensor
    weight_scale: Tensor

    def __init__(self, weights: Int8Weights | Int4Weights) -> None:
        super().__init__()
        is_int8 = isinstance(weights, Int8Weights)
        self._look_up = operators.quantized_embedding if is_int8 else operators.int4_embedding
        self.register_buffer("weight", weights.levels)
        self.register_buffer("weight_scale", weights.scale)

    def forward(self, ids: Tensor) -> Tensor:
        return self._look_up(ids, self.weight, self.weight_scale)


@dataclass(frozen=True)
class QuantizedFactory:
    """Maps of 8-bit levels.

    Keys and values are in half precision: rounding changes a number by 1/2048 of itself at most, and they are
    read in half the time.

    Attributes:
        bits: Those of a weight, 8 or 4.
    """

    bits: int

    dtype: ClassVar[torch.dtype] = torch.float32
    cache_dtype: ClassVar[torch.dtype] = torch.float16
    is_fused: ClassVar[bool] = False

    def __call__(
        self,
        layers: Sequence[nn.Linear],
        *,
        follows_relu: bool = False,
        precedes_relu: bool = False,  # noqa: ARG002
    ) -> Linear:
        weight, bias = _side_by_side(layers)
        return self._linear(weight, bias, clamps_negative=follows_relu)

    def output(self, weight: Tensor, bias: Tensor | None = None, *, scale: float = 1.0) -> Linear | None:
        return self._linear(weight.detach(), bias, factor=scale)

    def table(self, weight: Tensor) -> Table | None:
        if not _is_large(weight) or weight.shape[1] % _BLOCK:
            return None
        return QuantizedTable((Int8Weights if self.bits == 8 else Int4Weights)(weight.detach()))

    def _linear(
        self, weight: Tensor, bias: Tensor | None, *, factor: float = 1.0, clamps_negative: bool = False
    ) -> Linear:
        added = torch.zeros(len(weight)) if bias is None else bias
        if self.bits == 8:
            return Int8Linear(Int8Weights(weight), added, factor=factor, clamps_negative=clamps_negative)
        return Int4Linear(Int4Weights(weight), added, factor=factor, clamps_negative=clamps_negative)


def _int4_panels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise weights `(O, I)`: their levels `(panels, blocks, 8, 16, 4)` uint8 and scales, float16.

    A block's largest weight may become less than its level of -8 or 8: of some scales the one with the least
    sum of squared errors is taken.
    """
    num_outputs, num_inputs = weight.shape
    padding = (0, -num_inputs % _BLOCK, 0, -num_outputs % _BLOCK)
    padded = nn.functional.pad(weight.float(), padding)
    blocks = padded.view(padded.shape[0] // _BLOCK, _BLOCK, -1, _BLOCK).transpose(1, 2)  # (P, B, 32 O, 32 I)
    extremes = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    best = torch.zeros_like(extremes)
    least = torch.full_like(extremes, math.inf)
    for level in _EXTREME_LEVELS:
        scale = (extremes / level).half().float()
        errors = ((_int4_levels(blocks, scale) * scale - blocks) ** 2).sum(-1, keepdim=True)
        is_better = errors < least
        best, least = torch.where(is_better, scale, best), torch.where(is_better, errors, least)
    shifted = (_int4_levels(blocks, best) + 8).to(torch.uint8)
    halves = shifted.view(*shifted.shape[:2], 2, 16, 8, 4)  # the outputs, and the inputs
    octets = (halves[:, :, 0] | halves[:, :, 1] << 4).transpose(2, 3).contiguous()
    return octets, best.squeeze(-1).half()


def _int4_levels(blocks: Tensor, scale: Tensor) -> Tensor:
    return torch.round(blocks / torch.where(scale == 0, 1.0, scale)).clamp_(-8, 7)


def _side_by_side(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weight `(O, I)` and bias `(O,)` of the layers as one map; the bias is None if no layer has one."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    given: list[Tensor | None] = [layer.bias for layer in layers]
    if all(bias is None for bias in given):
        return weight, None
    zeros = [weight.new_zeros(layer.out_features) for layer in layers]
    biases = [zero if bias is None else bias.detach() for bias, zero in zip(given, zeros, strict=True)]
    return weight, torch.cat(biases)
