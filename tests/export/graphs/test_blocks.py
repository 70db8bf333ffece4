"""The fused form: norms take the biases of the maps beside them."""

import pytest
import torch
from torch import nn

from seq2seq_serve.export.graphs.blocks import AddNorm
from seq2seq_serve.export.graphs.linear import FloatFactory, FloatLinear

WIDTH, OUT = 64, 24


@pytest.fixture
def trained() -> tuple[nn.LayerNorm, nn.Linear, nn.Linear]:
    """A norm with the map before it and the one after it, all random."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(WIDTH)
    nn.init.normal_(norm.weight, 1, 0.3)
    nn.init.normal_(norm.bias)
    return norm, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUT)


def fused(trained, residual_shift=None) -> tuple[AddNorm, FloatLinear, FloatLinear]:
    norm, before, after = trained
    linear = FloatFactory(torch.float32, is_fused=True)
    last, first = linear([before]), linear([after])
    assert isinstance(last, FloatLinear)
    assert isinstance(first, FloatLinear)
    return AddNorm(norm, last, first, residual_shift, pre_norm=False, linear=linear), last, first


def computed(made: AddNorm, x: torch.Tensor) -> torch.Tensor:
    """What SkipLayerNormalization makes of the map's output and the residual, here both x."""
    total = x + made.sublayer_bias + x
    return nn.functional.layer_norm(total, (WIDTH,), made.weight, made.bias, made.epsilon)


def test_a_norm_takes_the_biases_of_the_maps_beside_it(trained):
    norm, before, after = trained
    made, last, first = fused(trained)
    x = torch.randn(100, WIDTH)
    assert last.bias is None
    assert first.bias is None
    torch.testing.assert_close(made.sublayer_bias, before.bias)
    expected = after(norm(x + before.bias + x))
    torch.testing.assert_close(computed(made, x) @ first.weight, expected, atol=1e-5, rtol=0)


def test_the_next_norm_reads_the_shifted_residual_as_though_it_were_not(trained):
    norm, before, _ = trained
    made, _, _ = fused(trained)
    following, _, _ = fused(trained, made.shift)
    x = torch.randn(100, WIDTH)
    residual = computed(made, x)
    torch.testing.assert_close(residual - made.shift, norm(x + before.bias + x), atol=1e-5, rtol=0)
    torch.testing.assert_close(residual + following.sublayer_bias, residual - made.shift + before.bias)


def test_a_norm_that_scales_a_feature_by_nothing_leaves_the_bias_where_it_is(trained):
    """The sum that is the same for every input needs every feature."""
    norm, before, after = trained
    with torch.no_grad():
        norm.weight[3] = 0
    made, last, first = fused(trained)
    assert last.bias is None
    assert made.shift is None
    torch.testing.assert_close(first.bias, after.bias)
    x = torch.randn(100, WIDTH)
    expected = after(norm(x + before.bias + x))
    torch.testing.assert_close(computed(made, x) @ first.weight + first.bias, expected)
