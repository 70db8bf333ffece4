import math

import pytest
import torch

from seq2seq_serve.training.models.attention import (
    AdditiveAttention,
    MultiHeadAttention,
    additive_attention,
    causal_mask,
    dot_attention,
    scaled_dot_product_attention,
)

INPUTS = torch.tensor([[1.0, 0, 1, 0], [0, 2, 0, 2], [1, 1, 1, 1]])
KEY_WEIGHTS = torch.tensor([[0.0, 0, 1], [1, 1, 0], [0, 1, 0], [1, 1, 0]])
QUERY_WEIGHTS = torch.tensor([[1.0, 0, 1], [1, 0, 0], [0, 0, 1], [0, 1, 1]])
VALUE_WEIGHTS = torch.tensor([[0.0, 2, 0], [0, 3, 0], [1, 0, 3], [1, 1, 0]])


def test_hand_worked_example_has_the_known_values() -> None:
    query, key, value = INPUTS @ QUERY_WEIGHTS, INPUTS @ KEY_WEIGHTS, INPUTS @ VALUE_WEIGHTS
    assert key.tolist() == [[0, 1, 1], [4, 4, 0], [2, 3, 1]]
    assert value.tolist() == [[1, 2, 3], [2, 8, 0], [2, 6, 3]]
    assert query.tolist() == [[1, 0, 2], [2, 2, 2], [2, 1, 3]]
    assert (query @ key.T)[0].tolist() == [2, 4, 4]

    context, weights = scaled_dot_product_attention(query, key, value, scale=1.0)

    # The values are given to four digits.
    torch.testing.assert_close(weights[0], torch.tensor([0.0634, 0.4683, 0.4683]), atol=5e-5, rtol=0)
    expected = torch.tensor([[1.9366, 6.6831, 1.5951], [2.0000, 7.9640, 0.0540], [1.9997, 7.7599, 0.3584]])
    torch.testing.assert_close(context, expected, atol=6e-5, rtol=0)


def test_dot_attention_by_hand() -> None:
    # The scores s^T h are log 2, log 1 and log 5; with the second one masked the weights are 2/7 and 5/7.
    query = torch.tensor([[1.0, 0.0]])
    memory = torch.tensor([[math.log(2), 7.0], [0.0, 9.0], [math.log(5), 0.0]])
    context, weights = dot_attention(query, memory)
    torch.testing.assert_close(weights, torch.tensor([[0.25, 0.125, 0.625]]))
    torch.testing.assert_close(context[0, 1], torch.tensor(0.25 * 7 + 0.125 * 9))
    _, weights = dot_attention(query, memory, torch.tensor([True, False, True]))
    torch.testing.assert_close(weights, torch.tensor([[2 / 7, 0.0, 5 / 7]]))


def test_additive_attention_by_hand() -> None:
    # W s = (1, -1); with U h = (-1, 1) the sum is 0 and tanh, too; with (1, 1) it is tanh(2) and 0.
    query, keys = torch.tensor([[1.0, -1.0]]), torch.tensor([[-1.0, 1.0], [1.0, 1.0], [5.0, 5.0]])
    values, v = torch.tensor([[4.0], [8.0], [100.0]]), torch.tensor([math.log(3) / math.tanh(2), 6.0])
    context, weights = additive_attention(query, keys, values, v, torch.tensor([True, True, False]))
    torch.testing.assert_close(weights, torch.tensor([[0.25, 0.75, 0.0]]))  # of scores 0 and log 3
    torch.testing.assert_close(context, torch.tensor([[0.25 * 4 + 0.75 * 8]]))


def test_a_gain_makes_only_the_steps_of_training_larger() -> None:
    plain, other = (AdditiveAttention(6, gain=gain) for gain in (1.0, 10.0))
    other.load_state_dict(plain.state_dict() | {"score": plain.score / 10})
    x, memory, mask = torch.randn(2, 3, 6), torch.randn(2, 4, 6), torch.ones(2, 3, 4, dtype=torch.bool)
    contexts, steps = [], []
    for attention in (plain, other):
        before = attention.v.detach()
        context, _ = attention(x, attention.key(memory), memory, mask)
        context.square().sum().backward()
        torch.optim.Adam([attention.score], lr=0.001, eps=1e-20).step()
        contexts.append(context)
        steps.append(attention.v.detach() - before)
    torch.testing.assert_close(contexts[1], contexts[0])
    torch.testing.assert_close(steps[1], 10 * steps[0])


def test_causal_mask_lets_each_position_see_itself_and_what_is_before() -> None:
    assert causal_mask(3).tolist() == [[True, False, False], [True, True, False], [True, True, True]]


@pytest.mark.parametrize("has_mask", [False, True])
def test_heads_are_the_papers_matrices_side_by_side(has_mask: bool) -> None:
    torch.manual_seed(0)
    attention = MultiHeadAttention(d_model=32, num_heads=4)
    x, memory = torch.randn(2, 3, 32), torch.randn(2, 5, 32)
    mask = (torch.rand(2, 1, 3, 5) < 0.6).index_fill(3, torch.tensor([0]), True) if has_mask else None

    heads, weights = [], []
    for head in range(4):
        rows = slice(8 * head, 8 * head + 8)
        query, key, value = (
            source @ layer.weight[rows].T + layer.bias[rows]
            for source, layer in ((x, attention.query), (memory, attention.key), (memory, attention.value))
        )
        scores = query @ key.mT / math.sqrt(8)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, 0], -math.inf)
        weights.append(scores.softmax(-1))
        heads.append(weights[-1] @ value)
    expected = torch.cat(heads, dim=-1) @ attention.output.weight.T + attention.output.bias

    output, found = attention(x, memory, mask, return_weights=True)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(found, torch.stack(weights, dim=1))
    for attention.is_fused in (True, False):
        output, none = attention(x, memory, mask)
        assert none is None
        torch.testing.assert_close(output, expected)


def test_dropout_leaves_out_weights_of_the_sum_and_not_those_returned() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(1, 4), torch.randn(400, 4)
    context, weights = scaled_dot_product_attention(query, key, torch.eye(400), dropout_probability=0.25)
    torch.testing.assert_close(weights, (query @ key.T / 2).softmax(-1))
    is_left_out = context == 0
    assert 0.15 < is_left_out.float().mean().item() < 0.35
    torch.testing.assert_close(context[~is_left_out], weights[~is_left_out] / 0.75, rtol=1e-4, atol=0)


def double(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("is_self_attention", [True, False])
def test_gradients_of_all_heads_are_finite_differences(is_self_attention: bool, is_fused: bool) -> None:
    torch.manual_seed(0)
    attention = MultiHeadAttention(d_model=8, num_heads=2).double()
    attention.is_fused = is_fused
    parameters = {name: each for name, each in attention.named_parameters() if each.requires_grad}
    mask = torch.ones(2, 1, 3, 3 if is_self_attention else 4, dtype=torch.bool)
    mask[1, :, :, -1] = False

    def output(x: torch.Tensor, memory: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        arguments = (x, x if is_self_attention else memory, mask)
        context, _ = torch.func.functional_call(
            attention, dict(zip(parameters, weights, strict=True)), arguments
        )
        return context

    assert torch.autograd.gradcheck(output, (double(2, 3, 8), double(2, 4, 8), *parameters.values()))


def test_a_bias_of_the_key_changes_nothing_and_is_not_trained() -> None:
    torch.manual_seed(0)
    attention = MultiHeadAttention(d_model=16, num_heads=2)
    x, memory = torch.randn(2, 3, 16), torch.randn(2, 4, 16)
    before, _ = attention(x, memory, None)
    assert [name for name, each in attention.named_parameters() if not each.requires_grad] == ["key.bias"]
    attention.key.bias.copy_(torch.randn(16))
    torch.testing.assert_close(attention(x, memory, None)[0], before)
