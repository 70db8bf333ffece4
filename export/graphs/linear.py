"""The linear maps of a graph in each precision, and the factories that create them from trained layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from seq2seq_serve.export.graphs import operators


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


class LinearFactory(Protocol):
    """Creates the linear maps of one precision.

    Attributes:
        dtype: The type of all tensors in the graph except quantised weights.
        cache_dtype: The type of keys and values in memory and cache, where operators of this project read
            them.
        is_fused: Whether norms add the biases of the neighbouring maps. On a GPU, each bias that a map adds
            itself is one more kernel, whose launch costs about as much as its computation for a few rows.
        shares_tables: Whether an output projection and an embedding can read one table as a server packs it.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def cache_dtype(self) -> torch.dtype: ...

    @property
    def is_fused(self) -> bool: ...

    @property
    def shares_tables(self) -> bool: ...

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


@dataclass(frozen=True)
class FloatFactory:
    """Maps in a floating-point type.

    Attributes:
        is_beside_int8: Whether the graph writes the memory of int8 graphs.
    """

    dtype: torch.dtype
    is_fused: bool = False
    is_beside_int8: bool = False

    @property
    def cache_dtype(self) -> torch.dtype:
        return Int8Factory.cache_dtype if self.is_beside_int8 else self.dtype

    @property
    def shares_tables(self) -> bool:
        return not self.is_fused

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


class Int8Linear(Linear):
    """Products of 8-bit levels, exact on every processor, with a scale for each row and each output column.

    A row's scale and zero point are computed from this row alone, so a row's outputs do not depend on its
    neighbours.

    Attributes:
        weight: `(I, O)` uint8: the levels from -127 to 127, plus 128. ONNX Runtime multiplies unsigned by
            unsigned levels exactly everywhere; unsigned by signed ones saturate on processors without VNNI.
        weight_scale: `(O,)`.
        weight_sum: `(O,)` int32: the sum of each column's levels.
        bias: `(O,)`.
    """

    weight: Tensor
    weight_scale: Tensor
    weight_sum: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None, *, clamps_negative: bool = False) -> None:
        super().__init__()
        weight_scale = weight.abs().amax(dim=0).clamp_min(1e-8) / 127  # (O,)
        self.clamps_negative = clamps_negative
        levels = torch.round(weight / weight_scale)
        self.register_buffer("weight", (levels + 128).to(torch.uint8))
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("weight_sum", levels.sum(dim=0, dtype=torch.float64).to(torch.int32))
        self.register_buffer("bias", torch.zeros_like(weight_scale) if bias is None else bias)

    def forward(self, x: Tensor) -> Tensor:
        return operators.quantized_linear(
            x,
            self.weight,
            self.weight_scale,
            self.weight_sum,
            self.bias,
            clamps_negative=self.clamps_negative,
        )

    def choose(self, x: Tensor, added: Tensor, num_candidates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The outputs as logits, or the most probable tokens: see `operators.quantized_choice`."""
        return operators.quantized_choice(
            x, self.weight, self.weight_scale, self.weight_sum, self.bias, added, num_candidates
        )


@dataclass(frozen=True)
class Int8Factory:
    """Quantised maps.

    Keys and values are in half precision: rounding changes a number by 1/2048 of itself at most, and they are
    read in half the time.
    """

    dtype: ClassVar[torch.dtype] = torch.float32
    cache_dtype: ClassVar[torch.dtype] = torch.float16
    is_fused: ClassVar[bool] = False
    shares_tables: ClassVar[bool] = False

    def __call__(
        self,
        layers: Sequence[nn.Linear],
        *,
        follows_relu: bool = False,
        precedes_relu: bool = False,  # noqa: ARG002
    ) -> Linear:
        weight, bias = _side_by_side(layers)
        return Int8Linear(weight.t().contiguous(), bias, clamps_negative=follows_relu)

    def output(self, weight: Tensor, bias: Tensor | None = None, *, scale: float = 1.0) -> Linear | None:
        return Int8Linear(weight.detach().t() * scale, bias)


def _side_by_side(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weight `(O, I)` and bias `(O,)` of the layers as one map; the bias is None if no layer has one."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    given: list[Tensor | None] = [layer.bias for layer in layers]
    if all(bias is None for bias in given):
        return weight, None
    zeros = [weight.new_zeros(layer.out_features) for layer in layers]
    biases = [zero if bias is None else bias.detach() for bias, zero in zip(given, zeros, strict=True)]
    return weight, torch.cat(biases)
