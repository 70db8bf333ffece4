import pytest
import torch
from torch.nn import functional

from training import loss
from training.loss import label_smoothed_loss


def test_label_smoothing_spreads_its_share_over_the_vocabulary() -> None:
    logits = torch.tensor([[2.0, 0.0, 1.0, -1.0]])
    log_probabilities = logits.log_softmax(-1)[0]
    expected = -(0.9 * log_probabilities[2] + 0.1 * log_probabilities.mean())
    torch.testing.assert_close(label_smoothed_loss(logits, torch.eye(4), torch.tensor([2]), 0.1), expected)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_loss_and_gradients_are_those_of_the_whole_matrix_of_logits(
    label_smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loss._CHUNK_VALUES, "cpu", 3 * 50)  # 3 rows at a time, and 1 is left over
    torch.manual_seed(0)
    states, weight = torch.randn(10, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    label_ids = torch.randint(50, (10,))
    expected = functional.cross_entropy(states @ weight.T, label_ids, label_smoothing=label_smoothing)
    expected_gradients = torch.autograd.grad(2 * expected, [states, weight])
    found = label_smoothed_loss(states, weight, label_ids, label_smoothing)
    torch.testing.assert_close(found, expected)
    for gradient, expected_gradient in zip(
        torch.autograd.grad(2 * found, [states, weight]), expected_gradients, strict=True
    ):
        torch.testing.assert_close(gradient, expected_gradient)
