"""What every family of models promises."""

import pytest
import torch
from torch import Tensor

from seq2seq_serve.training.config import ModelConfig, TransformerConfig
from seq2seq_serve.training.models.base import EncoderDecoder, select_rows
from seq2seq_serve.training.models.recurrent import RecurrentConfig
from seq2seq_serve.training.models.registry import make_model

V, T, LENGTHS = 50, 5, (7, 4, 1)


def recurrent(**settings: object) -> RecurrentConfig:
    return RecurrentConfig(V, 12, 16, 1, 1, **settings)


CONFIGS: dict[str, ModelConfig] = {
    "post": TransformerConfig(V, 32, 64, 2, 2, 2),
    "pre": TransformerConfig(V, 32, 64, 2, 2, 2, norm="pre", tied="none"),
    "none": recurrent(attention="none", reverses_source=True),
    "dot": recurrent(attention="dot", is_bidirectional=False),
    "additive": recurrent(attention="additive", tied="target"),
    "lstm": RecurrentConfig(V, 12, 16, 2, 2, cell="lstm", attention="additive", input_feeding=True),
    "fed, none": recurrent(attention="none", input_feeding=True),
    "fed, dot": recurrent(attention="dot", input_feeding=True, reverses_source=True),
}


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> EncoderDecoder:
    torch.manual_seed(0)
    return make_model(CONFIGS[request.param]).eval()


@pytest.fixture
def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Sources of several lengths with rubbish in the padding, their mask, and targets."""
    torch.manual_seed(1)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return torch.randint(4, V, mask.shape), mask, torch.randint(4, V, (len(LENGTHS), T))


def test_step_repeated_is_decode_once(model: EncoderDecoder, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    source, mask, target = batch
    memory = model.encode(source, mask)
    state = model.start(memory, mask)
    assert {len(tensor) for tensor in (*memory, *state)} == {len(source)}
    states = []
    for token_ids in target.unbind(1):
        output, state = model.step(token_ids, state, memory, mask)
        states.append(output)
    torch.testing.assert_close(torch.stack(states, 1), model.decode_states(target, memory, mask))
    torch.testing.assert_close(model.project(torch.stack(states, 1)), model(source, mask, target))


def test_a_row_is_the_same_without_padding_and_without_the_others(
    model: EncoderDecoder, batch: tuple[Tensor, Tensor, Tensor]
) -> None:
    source, mask, target = batch
    together = model(source, mask, target)
    for row, length in enumerate(LENGTHS):
        one = slice(row, row + 1)
        alone = model(source[one, :length], mask[one, :length], target[one])
        torch.testing.assert_close(alone, together[one])


def test_every_source_word_counts(model: EncoderDecoder, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    source, mask, target = batch
    before = model(source, mask, target)
    for place in range(LENGTHS[0]):
        other = source.clone()
        other[0, place] = (other[0, place] + 1) % V
        assert (model(other, mask, target)[0] - before[0]).abs().max() > 1e-4


def test_no_target_position_sees_the_future(
    model: EncoderDecoder, batch: tuple[Tensor, Tensor, Tensor]
) -> None:
    source, mask, target = batch
    before = model(source, mask, target)
    changed = target.clone()
    changed[:, 3:] = (changed[:, 3:] + 1) % V
    after = model(source, mask, changed)
    torch.testing.assert_close(after[:, :3], before[:, :3])
    assert (after[:, 3:] - before[:, 3:]).abs().amax(dim=(0, 2)).min() > 0.01


def test_rows_of_memory_and_state_may_be_chosen_between_steps(
    model: EncoderDecoder, batch: tuple[Tensor, Tensor, Tensor]
) -> None:
    source, mask, target = batch
    rows, is_kept = [2, 0, 0], [True, False, True]
    memory = model.encode(source, mask)
    _, state = model.step(target[:, 0], model.start(memory, mask), memory, mask)
    for chosen in (rows, is_kept):
        some = select_rows(memory, chosen)
        expected = model.decode_states(target[chosen], some, mask[chosen])[:, 1]
        found, _ = model.step(target[chosen][:, 1], select_rows(state, chosen), some, mask[chosen])
        torch.testing.assert_close(found, expected)


def test_the_alignment_is_a_distribution_over_the_real_source(
    model: EncoderDecoder, batch: tuple[Tensor, Tensor, Tensor]
) -> None:
    source, mask, target = batch
    memory = model.encode(source, mask)
    logits, weights = model.decode_with_attention(target, memory, mask)
    torch.testing.assert_close(logits, model.decode(target, memory, mask))
    alignment = model.alignment(weights)
    if getattr(model.config, "attention", "") == "none":
        assert (weights, alignment) == ([], None)
        return
    assert all(matrix.shape[:1] + matrix.shape[2:] == (3, T, 7) for matrix in weights)
    torch.testing.assert_close(alignment.sum(-1), torch.ones(3, T))
    assert alignment.masked_select(~mask[:, None]).abs().max() == 0


def test_every_weight_is_trained(model: EncoderDecoder, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    model(*batch).square().sum().backward()
    for name, weight in model.named_parameters():
        assert not weight.requires_grad or weight.grad.abs().max() > 0, name
