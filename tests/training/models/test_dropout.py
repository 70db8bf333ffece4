import pytest
import torch

from seq2seq_serve.training.models.dropout import Dropout, dropout


@pytest.mark.parametrize("probability", [0.1, 0.3, 0.9])
def test_that_share_of_the_values_is_dropped_and_the_mean_stays(probability: float) -> None:
    torch.manual_seed(0)
    x = torch.full((100, 1001), 2.0)
    y = dropout(x, probability)
    assert (y == 0).float().mean().item() == pytest.approx(probability, abs=0.005)
    assert y[y != 0].unique().numel() == 1
    assert y.max().item() == pytest.approx(2 / (1 - probability), rel=1e-3)  # in steps of 1/65536


@pytest.mark.parametrize("probability", [1e-9, 0.4 / 65536, 1 - 0.4 / 65536, 0.999995, 1 - 1e-9])
def test_at_the_borders_values_stay_finite(probability: float) -> None:
    """A probability that rounds to 1 divided by zero."""
    torch.manual_seed(0)
    x = torch.ones(1000, 1000, requires_grad=True)
    y = dropout(x, probability)
    y.sum().backward()
    assert y.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert (y == 0).float().mean().item() == pytest.approx(probability, abs=1e-4)


def test_values_are_dropped_independently_of_their_neighbours() -> None:
    torch.manual_seed(0)
    is_dropped = dropout(torch.ones(400_000), 0.5) == 0
    for distance in range(1, 9):
        both = (is_dropped[:-distance] & is_dropped[distance:]).float().mean().item()
        assert both == pytest.approx(0.25, abs=0.005)


def test_the_generator_decides_what_is_dropped() -> None:
    x = torch.ones(3, 5)
    torch.manual_seed(1)
    first, second = dropout(x, 0.5), dropout(x, 0.5)
    torch.manual_seed(1)
    torch.testing.assert_close(dropout(x, 0.5), first)
    assert not torch.equal(first, second)


def test_the_gradient_passes_where_the_value_did() -> None:
    x = torch.ones(50, requires_grad=True)
    y = dropout(x, 0.5)
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, y.detach())


def test_nothing_is_dropped_in_eval_mode_or_with_probability_0() -> None:
    x = torch.randn(4, 4)
    assert torch.equal(Dropout(0.5).eval()(x), x)
    assert torch.equal(Dropout(0.0)(x), x)
    assert not torch.equal(Dropout(0.5)(x), x)
