"""The linear maps of a graph in each precision, and the factories that make them from trained layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from export import operators


class Linear(nn.Module):
    """`xW + b` over `(rows, I)`.

    Attributes:
        clamps_negative: Whether negative inputs count as 0, so that a ReLU before it is not needed.
        left_bias: The bias `(O,)` in float32 where it computes `xW` only: the reader of its output adds it.
    """

    clamps_negative = False
    left_bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = super().__call__(x)
        return result

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class LinearFactory(Protocol):
    """Makes the linear maps of one precision.

    Attributes:
        dtype: Of everything in the graph that is not a quantised weight.
        is_fused: Whether element-wise work is left to the kernels that read a map's output. On a GPU each
            kernel that is launched costs about as much as what it computes for a few rows.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def is_fused(self) -> bool: ...

    def __call__(self, name: str, layers: Sequence[nn.Linear], *, may_leave_bias: bool = False) -> Linear:
        """The layers side by side as one map.

        Args:
            name: Where their common input was calibrated.
            layers: With one input.
            may_leave_bias: Whether the reader of the output adds the bias where the map leaves it.
        """

    def output(self, weight: Tensor) -> Linear | None:
        """The output projection by a matrix (V, D); None: multiply by the matrix as it is."""


class FloatLinear(Linear):
    """A linear map in floating point."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)  # (I, O)
        self.bias = None if bias is None else nn.Parameter(bias)  # (O,)

    def forward(self, x: Tensor) -> Tensor:
        return operators.gemm(x, self.weight, self.bias)


@dataclass(frozen=True)
class FloatFactory:
    """Maps in a floating-point type."""

    dtype: torch.dtype
    is_fused: bool = False

    def __call__(self, name: str, layers: Sequence[nn.Linear], *, may_leave_bias: bool = False) -> Linear:  # noqa: ARG002
        weight, bias = _side_by_side(layers)
        if not (self.is_fused and may_leave_bias):
            return FloatLinear(weight.to(self.dtype), bias.to(self.dtype))
        linear = FloatLinear(weight.to(self.dtype), None)
        linear.left_bias = bias.to(torch.float32)
        return linear

    def output(self, weight: Tensor) -> Linear | None:  # noqa: ARG002
        return None


@dataclass(frozen=True)
class ActivationRange:
    """The interval of a map's input that its 256 levels cover; `low` is at most 0 and `high` above it."""

    low: float
    high: float


class Int8Linear(Linear):
    """uint8 inputs with one calibrated scale, int8 weights with a scale per output column.

    A constant scale keeps rows independent of each other: with one computed from the whole batch, a row's
    tokens would depend on its neighbours.
    """

    weight: Tensor
    weight_scale: Tensor
    scale: Tensor
    zero_point: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: ActivationRange) -> None:
        super().__init__()
        weight_scale = weight.abs().amax(dim=0).clamp_min(1e-8) / 127  # (O,)
        scale = (activation.high - activation.low) / 255
        zero_point = round(-activation.low / scale)
        self.clamps_negative = zero_point == 0
        self.register_buffer("weight", torch.round(weight / weight_scale).to(torch.int8))
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("scale", torch.tensor(scale))
        self.register_buffer("zero_point", torch.tensor(zero_point, dtype=torch.uint8))
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        quantized = operators.quantize(x, self.scale, self.zero_point)
        return operators.integer_matmul(
            quantized, self.weight, self.scale, self.weight_scale, self.zero_point, self.bias
        )


@dataclass(frozen=True)
class Int8Factory:
    """Quantised maps.

    Attributes:
        ranges: The calibrated input range of each map, by name (`export.calibration`).
    """

    ranges: Mapping[str, ActivationRange]
    dtype: torch.dtype = torch.float32
    is_fused: bool = False

    def __call__(self, name: str, layers: Sequence[nn.Linear], *, may_leave_bias: bool = False) -> Linear:  # noqa: ARG002
        weight, bias = _side_by_side(layers)
        return Int8Linear(weight, bias, self.ranges[name])

    def output(self, weight: Tensor) -> Linear | None:
        return Int8Linear(weight.detach().t(), None, self.ranges["output"])


def _side_by_side(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor]:
    weight = torch.cat([layer.weight.detach().t() for layer in layers], dim=1).contiguous()  # (I, O)
    return weight, torch.cat([layer.bias.detach() for layer in layers])
