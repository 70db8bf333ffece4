"""int8 maps: what they quantise to, and that torch's arithmetic is what the operators are told to do."""

import pytest
import torch
from torch import nn

from seq2seq_serve.export.graphs.linear import ActivationRange, FloatFactory, Int8Factory, Int8Linear


@pytest.fixture
def layers() -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(6, 3), nn.Linear(6, 5)]


def test_layers_side_by_side_are_one_map(layers):
    made = FloatFactory(torch.float32)("name", layers)
    x = torch.randn(4, 6)
    expected = torch.cat([layer(x) for layer in layers], dim=1)
    torch.testing.assert_close(x @ made.weight + made.bias, expected)


def test_int8_weights_are_at_most_half_a_level_off(layers):
    made = Int8Factory({"name": ActivationRange(-1.0, 3.0)})("name", layers)
    assert isinstance(made, Int8Linear)
    weight = torch.cat([layer.weight.t() for layer in layers], dim=1)
    assert made.weight.dtype == torch.int8
    error = (made.weight.float() * made.weight_scale - weight).abs().max()
    assert error <= made.weight_scale.max() / 2 + 1e-7
    assert made.weight.abs().amax(dim=0).tolist() == [127] * 8, "every column uses its whole range"


def test_zero_is_exactly_a_level_of_the_activation(layers):
    made = Int8Factory({"name": ActivationRange(-1.0, 3.0)})("name", layers)
    assert made.scale.item() == pytest.approx(4 / 255)
    assert made.zero_point.item() == 64
    assert not made.clamps_negative


def test_a_map_after_a_relu_clamps_by_itself(layers):
    made = Int8Factory({"name": ActivationRange(0.0, 3.0)})("name", layers)
    assert made.zero_point.item() == 0
    assert made.clamps_negative


def test_a_column_of_zeros_is_no_division_by_zero(layers):
    with torch.no_grad():
        layers[0].weight[1] = 0
    made = Int8Factory({"name": ActivationRange(0.0, 1.0)})("name", layers)
    assert made.weight[:, 1].tolist() == [0] * 6
    assert torch.isfinite(made.weight_scale).all()
