import pytest
import torch

from benchmarks.complexity.layers import (
    LAYER_TYPES,
    count_multiply_adds,
    layers_to_cross,
    restricted_attention,
)
from seq2seq_serve.training.models.attention import scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("n", [1, 2, 5, 15, 16, 17, 50])
@pytest.mark.parametrize("r", [1, 3, 5, 17])
def test_restricted_attention_is_full_attention_under_a_band(n, r):
    query, key, value = (torch.randn(2, 3, n, 8, dtype=torch.float64) for _ in range(3))
    place = torch.arange(n)
    band = (place[:, None] - place).abs() <= r // 2
    expected, _ = scaled_dot_product_attention(query, key, value, band)
    torch.testing.assert_close(restricted_attention(query, key, value, r), expected)


def count(kind, times_n=1, d=128, width=None):
    width = width or kind.width or 0
    n = 1170 if kind.width else 50  # 1170 positions are 18 blocks of 65, or 6 of 195: none is half empty
    return count_multiply_adds(kind.build(d, width), times_n * n, d)


@pytest.mark.parametrize("kind", [kind for kind in LAYER_TYPES if kind.orders], ids=lambda kind: kind.name)
def test_what_a_layer_multiplies_grows_as_its_row_says(kind):
    for axis, power in kind.orders.items():
        if axis == "n":
            grown, factor = count(kind, times_n=2), 2
        elif axis == "d":
            grown, factor = count(kind, d=256), 2
        else:
            grown, factor = count(kind, width=3 * kind.width), 3
        assert grown == pytest.approx(factor**power * count(kind), rel=0.02), axis


@pytest.mark.parametrize(
    ("place", "width", "num_layers"), [(0, 0, 1), (1, 0, 1), (2, 0, 1), (3, 3, 16), (3, 9, 4), (4, 9, 4)]
)
def test_a_stack_connects_the_ends_of_a_sentence_after_so_many_layers(place, width, num_layers):
    assert layers_to_cross(LAYER_TYPES[place], 17, width) == num_layers
