import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seq2seq_serve.training.models.attention import additive_attention
from seq2seq_serve.training.models.recurrent import GRUCell, LSTMCell, Recurrent, RecurrentConfig

CONFIG = RecurrentConfig(50, 12, 16, 1, 1)
LENGTHS = torch.tensor([6, 3])
MASK = torch.arange(6) < LENGTHS[:, None]


def make(**settings: Any) -> Recurrent:
    torch.manual_seed(0)
    return Recurrent(dataclasses.replace(CONFIG, **settings)).eval()


def random_ids(*shape: int) -> Tensor:
    return torch.randint(4, 50, shape)


@pytest.mark.parametrize(("ours", "theirs"), [(GRUCell, nn.GRUCell), (LSTMCell, nn.LSTMCell)])
def test_a_cell_computes_what_torchs_does(ours: type, theirs: type) -> None:
    torch.manual_seed(0)
    cell, torchs = ours(5, 8), theirs(5, 8)
    for weights, part in ((cell.input, "ih"), (cell.hidden, "hh")):
        weights.load_state_dict({name: getattr(torchs, f"{name}_{part}") for name in ("weight", "bias")})
    x, state = torch.randn(3, 5), tuple(torch.randn(3, 8) for _ in range(cell.num_tensors))
    expected = torchs(x, state if len(state) > 1 else state[0])
    found = cell(cell.input(x), state)
    torch.testing.assert_close(found, expected if len(state) > 1 else (expected,))


def test_an_encoder_state_is_what_each_direction_has_read_so_far() -> None:
    model = make()
    source = random_ids(2, 6)
    before, _ = model.encode(source, MASK)
    changed = source.clone()
    changed[0, 3] = 4
    after, _ = model.encode(changed, MASK)
    forward, backward = (before - after)[0].abs().split(8, dim=-1)  # (S, E / 2)
    assert forward[:3].max() == backward[4:].max() == 0
    assert min(forward[3:].amax(dim=1).min(), backward[:4].amax(dim=1).min()) > 0


@pytest.mark.parametrize("is_bidirectional", [True, False])
def test_a_reversed_source_is_read_from_its_end_within_its_length(is_bidirectional: bool) -> None:
    reverses = make(reverses_source=True, is_bidirectional=is_bidirectional, attention="dot")
    plain = make(is_bidirectional=is_bidirectional, attention="dot")
    source = random_ids(2, 6)
    mirrored = source.clone()
    for row, length in enumerate(LENGTHS.tolist()):
        mirrored[row, :length] = source[row, :length].flip(0)
    (found,), (expected,) = reverses.encode(source, MASK), plain.encode(mirrored, MASK)
    for row, length in enumerate(LENGTHS.tolist()):  # each state stands where its word does
        torch.testing.assert_close(found[row, :length], expected[row, :length].flip(0))
    torch.testing.assert_close(reverses.start((found,), MASK), plain.start((expected,), MASK))


def test_without_attention_the_memory_is_one_vector_whatever_the_length() -> None:
    model = make(attention="none")
    (memory,) = model.encode(random_ids(2, 6), MASK)
    assert memory.shape == (2, 16)
    # And it is an input of every step, not only what the decoder starts as.
    target = random_ids(2, 4)
    state = model.start((memory,), MASK)
    expected, _ = model.step(target[:, 0], state, (memory,), MASK)
    found, _ = model.step(target[:, 0], state, (memory + 1,), MASK)
    assert (found - expected).abs().max() > 0.01


def test_additive_attention_asks_before_the_update_and_dot_attention_after_it() -> None:
    source, token_ids = random_ids(2, 6), random_ids(2, 1)
    model = make()
    memory = model.encode(source, MASK)
    (before,) = model.start(memory, MASK)
    _, (weights,) = model.decode_with_attention(token_ids, memory, MASK)
    query = model.attention.query(before)[:, None]
    _, expected = additive_attention(query, memory[1], memory[0], model.attention.score, MASK[:, None])
    torch.testing.assert_close(weights[:, 0], expected)

    model = make(attention="dot")
    memory = model.encode(source, MASK)
    _, (after,) = model.step(token_ids[:, 0], model.start(memory, MASK), memory, MASK)
    _, (weights,) = model.decode_with_attention(token_ids, memory, MASK)
    scores = (memory[0] @ after[:, :, None])[..., 0].masked_fill(~MASK, -torch.inf)
    torch.testing.assert_close(weights[:, 0, 0], scores.softmax(-1))


def test_dropout_changes_two_passes_and_evaluation_has_none() -> None:
    model = make(num_encoder_layers=2, num_decoder_layers=2, dropout=0.5)
    batch = random_ids(2, 6), MASK, random_ids(2, 4)
    assert not torch.equal(model.train()(*batch), model(*batch))
    torch.testing.assert_close(model.eval()(*batch), model(*batch))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"d_hidden": 15}, "d_hidden is 15, and must be even for two directions"),
        ({"cell": "rnn"}, "cell is 'rnn', and must be 'gru' or 'lstm'"),
        ({"attention": True}, "attention is True, and must be a text"),
        ({"reverses_source": 1}, "reverses_source is 1, and must be true or false"),
        ({"num_encoder_layers": 0}, "num_encoder_layers is 0"),
    ],
)
def test_wrong_sizes_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **settings)
