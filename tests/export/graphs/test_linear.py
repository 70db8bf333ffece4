"""int8 maps: what they quantise to, and what ONNX Runtime computes by the definition of their operator."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from seq2seq_serve.export.convert import OPSET
from seq2seq_serve.export.graphs.functions import DOMAIN, definition
from seq2seq_serve.export.graphs.linear import (
    FloatFactory,
    Int4Weights,
    Int8Linear,
    Int8Weights,
    QuantizedFactory,
)
from tests.kernels.test_products import panels_of

Floats = npt.NDArray[np.float32]
Run = Callable[[Floats], Floats]
CLAMPS = pytest.mark.parametrize("clamps", [False, True])
_WEIGHTS = ("weight", "weight_scale", "weight_sum", "bias")


@pytest.fixture
def layers() -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(6, 3), nn.Linear(6, 5)]


def test_layers_side_by_side_are_one_map(layers):
    made = FloatFactory(torch.float32)(layers)
    x = torch.randn(4, 6)
    expected = torch.cat([layer(x) for layer in layers], dim=1)
    torch.testing.assert_close(x @ made.weight.T + made.bias, expected)


def test_int8_weights_are_at_most_half_a_level_off(layers):
    made = QuantizedFactory(8)(layers)
    assert isinstance(made, Int8Linear)
    weight = torch.cat([layer.weight.t() for layer in layers], dim=1)
    assert made.weight.dtype == torch.uint8
    levels = made.weight.float() - 128
    assert (levels * made.weight_scale - weight).abs().max() <= made.weight_scale.max() / 2 + 1e-7
    assert levels.abs().amax(dim=0).tolist() == [127] * 8, "every column uses its whole range"


def test_only_a_map_after_a_relu_clamps_by_itself(layers):
    assert not QuantizedFactory(8)(layers).clamps_negative
    assert QuantizedFactory(8)(layers, follows_relu=True).clamps_negative


def test_a_column_of_zeros_has_a_finite_scale(layers):
    with torch.no_grad():
        layers[0].weight[1] = 0
    made = QuantizedFactory(8)(layers)
    assert isinstance(made, Int8Linear)
    assert made.weight[:, 1].tolist() == [128] * 6
    assert torch.isfinite(made.weight_scale).all()


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (33, 65), (64, 512)])
def test_int4_weights_lie_as_the_kernels_read_them(num_outputs, num_inputs):
    rng = np.random.default_rng(0)
    num_blocks = -(-num_inputs // 32)
    levels = rng.integers(-8, 8, (num_outputs, num_inputs))
    levels[:, ::32] = -8  # so that each block has its scale
    scales = rng.uniform(0.001, 0.01, (num_outputs, num_blocks)).astype(np.float16)
    weight = levels * np.repeat(scales.astype(np.float32), 32, axis=1)[:, :num_inputs]
    made = Int4Weights(torch.from_numpy(weight.astype(np.float32)))
    expected_levels, expected_scale = panels_of(levels, scales)
    np.testing.assert_array_equal(made.scale.numpy(), expected_scale)
    padded = torch.zeros(64 if num_outputs > 32 else 32, 32 * num_blocks)
    padded[:num_outputs, :num_inputs] = torch.from_numpy(weight)
    torch.testing.assert_close(dequantized(made), padded)
    if num_outputs % 32 == num_inputs % 32 == 0:  # levels of padding may be any
        np.testing.assert_array_equal(made.levels.numpy(), expected_levels)


@pytest.mark.parametrize("spread", [1e-6, 1.0, 1e4])
def test_int4_weights_have_a_twelfth_of_their_deviation_as_error(spread):
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * spread
    weight[5] = 0
    error = float((dequantized(Int4Weights(weight)) - weight).norm() / weight.norm())
    assert 0.07 < error < 0.09


def dequantized(weights: Int4Weights) -> torch.Tensor:
    P, B = weights.levels.shape[:2]
    levels = torch.stack([weights.levels & 15, weights.levels >> 4], 2).float() - 8  # (P, B, 2, 8, 16, 4)
    rows = levels.permute(0, 2, 4, 1, 3, 5).reshape(32 * P, B, 32)
    return (rows * weights.scale.transpose(1, 2).reshape(32 * P, B, 1).float()).flatten(1)


def int8_map(weight: torch.Tensor, bias: torch.Tensor, *, clamps: bool = False) -> Int8Linear:
    return Int8Linear(Int8Weights(weight), bias, clamps_negative=clamps)


def made_map(num_inputs: int, *, clamps: bool, spread: float = 1.0) -> Int8Linear:
    """A map of random weights and one of the largest levels, whose columns' scales differ by `spread`."""
    chance = torch.Generator().manual_seed(1)
    weight = torch.randn(num_inputs, 10, generator=chance)
    # Levels of 127 and of -127 only: pairs of their products saturate 16 bits where the weights are signed.
    weight[:, 0], weight[:, 1] = 1, -1
    weight *= torch.logspace(0, torch.tensor(spread).log10().item(), 10)
    return int8_map(weight.t(), torch.randn(10, generator=chance), clamps=clamps)


@functools.cache
def _session(clamps: bool) -> onnxruntime.InferenceSession:
    """The operator alone, by its definition: the project's own kernels are not registered."""
    names = ["x", *_WEIGHTS]
    kinds = onnx.TensorProto
    types = [kinds.FLOAT, kinds.UINT8, kinds.FLOAT, kinds.INT32, kinds.FLOAT]
    shapes: list[list[Any]] = [["rows", "inputs"], ["inputs", "outputs"], *[["outputs"]] * 3]
    inputs = [onnx.helper.make_tensor_value_info(*named) for named in zip(names, types, shapes, strict=True)]
    output = onnx.helper.make_tensor_value_info("output", onnx.TensorProto.FLOAT, ["rows", "outputs"])
    least = 0.0 if clamps else -np.inf
    node = onnx.helper.make_node("QuantizedLinear", names, ["output"], domain=DOMAIN, least_input=least)
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "map", inputs, [output]),
        opset_imports=[onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(DOMAIN, 1)],
        functions=[definition("QuantizedLinear", OPSET)],
        ir_version=10,
    )
    return onnxruntime.InferenceSession(model.SerializeToString())


def by_definition(made: Int8Linear, x: Floats) -> Floats:
    weights = {name: getattr(made, name).numpy() for name in _WEIGHTS}
    output: Floats = _session(made.clamps_negative).run(None, {"x": x, **weights})[0]
    return output


def by_numpy(made: Int8Linear, x: Floats) -> Floats:
    """One row after another, with exact sums; other arithmetic is float32's, in the definition's order."""
    weight = made.weight.numpy().astype(np.int64) - 128
    zero, most = np.float32(0), np.float32(255)
    rows = []
    for row in np.maximum(x, 0) if made.clamps_negative else x:
        low, high = min(row.min(), zero), max(row.max(), zero)
        span = max(high - low, np.float32(2.0**-100))
        zero_point = -np.rint(low * (most / span))
        levels = np.minimum(np.rint(row * (most / span)) + zero_point, 255)  # half to even
        assert levels.min() >= 0
        sums = ((levels - zero_point).astype(np.int64) @ weight).astype(np.float32)
        rows.append(sums * (span / most) * made.weight_scale.numpy() + made.bias.numpy())
    return np.stack(rows)


def rows_of(num_inputs: int) -> Floats:
    """Ordinary rows, one of zeros, ones of other magnitudes, of one sign, of one number, and of extremes."""
    x = np.random.default_rng(2).standard_normal((12, num_inputs)).astype(np.float32)
    x[1] = 0
    x[2] *= 1e-12
    x[3] *= 1e12
    x[4] = -np.abs(x[4])
    x[5] = np.abs(x[5])
    x[6, 1:] = 0
    x[7] = 3
    x[8] = np.where(np.arange(num_inputs) % 2, 2, -2)
    x[9, 0] = 1e4  # the levels of the row's other numbers are 0
    x[10] *= 1e-37
    return x


@CLAMPS
@pytest.mark.parametrize("num_inputs", [1, 7, 64, 2048])
@pytest.mark.parametrize("spread", [1.0, 1e6])
def test_onnx_runtime_computes_exact_products_by_row(num_inputs, spread, clamps):
    made, x = made_map(num_inputs, clamps=clamps, spread=spread), rows_of(num_inputs)
    found = by_definition(made, x)
    np.testing.assert_array_equal(found, by_numpy(made, x))
    np.testing.assert_array_equal(found[1], made.bias.numpy(), err_msg="a row of zeros")
    if clamps:
        np.testing.assert_array_equal(found[4], made.bias.numpy(), err_msg="a row of negative numbers")


@CLAMPS
def test_a_map_is_within_half_a_level_of_each_input(clamps):
    made = int8_map(torch.eye(64), torch.zeros(64), clamps=clamps)  # the levels of eye are exact
    x = rows_of(64)
    expected = np.maximum(x, 0) if clamps else x
    error = np.abs(by_definition(made, x) - expected).max(axis=1)
    span = np.maximum(expected.max(axis=1), 0) - np.minimum(expected.min(axis=1), 0)
    # The largest number may be a level off, because its zero point was rounded, too.
    assert (error <= 1.0001 / 255 * span + 1e-32).all()
    assert np.median(error / np.maximum(span, 1e-32)) < 0.51 / 255
    assert error.max() > 0


def test_half_a_level_is_rounded_to_the_even_one():
    made = int8_map(torch.eye(8), torch.zeros(8))
    x = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -128]], np.float32)
    np.testing.assert_allclose(by_definition(made, x)[0], [127, 0, 2, 2, 0, -2, -2, -128], rtol=1e-6)


@CLAMPS
def test_a_row_has_the_same_bits_alone_and_in_a_batch(clamps):
    made, x = made_map(64, clamps=clamps), rows_of(64)
    together = by_definition(made, x)
    for row in range(len(x)):
        alone = by_definition(made, x[row : row + 1])
        np.testing.assert_array_equal(alone[0].view(np.uint32), together[row].view(np.uint32))


@CLAMPS
def test_a_number_that_is_not_one_is_in_all_outputs_of_its_row_and_in_no_others(clamps):
    """ONNX Runtime's ReduceMax passes over NaN that are not a row's first number, and they vanished."""
    made, x = made_map(17, clamps=clamps), rows_of(17)
    expected = by_definition(made, x)
    row = 5
    others = np.arange(len(x)) != row
    for column in range(17):
        spoilt = x.copy()
        spoilt[row, column] = np.nan
        found = by_definition(made, spoilt)
        assert np.isnan(found[row]).all(), column
        np.testing.assert_array_equal(found[others], expected[others])
