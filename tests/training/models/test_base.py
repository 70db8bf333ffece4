"""What every family of models promises."""

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from seq2seq_serve.training.config import BOS_ID, ModelConfig, TransformerConfig
from seq2seq_serve.training.data.sources import STORIES, Inputs
from seq2seq_serve.training.models.base import EncoderDecoder, select_rows
from seq2seq_serve.training.models.memory_network import MemoryNetworkConfig
from seq2seq_serve.training.models.recurrent import RecurrentConfig
from seq2seq_serve.training.models.registry import make_model
from tests.training.models.test_captioner import ATTENTIONS
from tests.training.models.test_captioner import CONFIGS as CAPTIONERS

V, T, LENGTHS = 50, 5, (7, 4, 1)


class Batch(NamedTuple):
    """Random sources of several lengths with rubbish in their padding, the mask of these, and targets."""

    rows: list[Inputs]
    source: tuple[Tensor, ...]
    target: Tensor

    @property
    def mask(self) -> Tensor:
        return self.source[-1]


def recurrent(**settings: object) -> RecurrentConfig:
    return RecurrentConfig(V, 12, 16, 1, 1, **settings)


TEXTS: dict[str, ModelConfig] = {
    "post": TransformerConfig(V, 32, 64, 2, 2, 2),
    "pre": TransformerConfig(V, 32, 64, 2, 2, 2, norm="pre", tied="none"),
    "none": recurrent(attention="none", reverses_source=True),
    "dot": recurrent(attention="dot", is_bidirectional=False),
    "additive": recurrent(attention="additive", tied="target"),
    "lstm": RecurrentConfig(V, 12, 16, 2, 2, cell="lstm", attention="additive"),
}
STORY = MemoryNetworkConfig(V, 12, max_source_length=9, has_empty_memories=False)
CONFIGS: dict[str, ModelConfig] = TEXTS | {
    "adjacent": STORY,
    "layer-wise": dataclasses.replace(STORY, tying="layer-wise"),
    **{
        f"{name}, {attention}": dataclasses.replace(CAPTIONERS[name], attention=attention)
        for name, attention in itertools.product(CAPTIONERS, ATTENTIONS)
    },
}
of_texts = pytest.mark.parametrize("model", TEXTS, indirect=True)


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> EncoderDecoder:
    torch.manual_seed(0)
    return make_model(CONFIGS[request.param]).eval()


@pytest.fixture
def batch(model: EncoderDecoder) -> Batch:
    rng, kind, size = np.random.default_rng(1), model.source_kind, model.config.vocab_size
    rows = [kind.random(rng, length, size) for length in LENGTHS]
    source = kind.tensors(rows)
    if source[0].shape[:2] == source[-1].shape and kind is not STORIES:  # padding ends its sentences
        source[0][~source[-1]] = 3
    target = torch.from_numpy(rng.integers(4, size, (len(LENGTHS), T)))
    target[:, 0] = BOS_ID
    return Batch(rows, source, target)


def test_step_repeated_is_decode_once(model: EncoderDecoder, batch: Batch) -> None:
    memory = model.encode(*batch.source)
    state = model.start(memory, batch.mask)
    assert {len(tensor) for tensor in (*memory, *state)} == {len(LENGTHS)}
    states = []
    for token_ids in batch.target.unbind(1):
        output, state = model.step(token_ids, state, memory, batch.mask)
        states.append(output)
    stepped = torch.stack(states, 1)
    torch.testing.assert_close(stepped, model.decode_states(batch.target, memory, batch.mask))
    torch.testing.assert_close(model.project(stepped), model(*batch.source, batch.target))


def test_a_row_is_the_same_without_padding_and_without_the_others(
    model: EncoderDecoder, batch: Batch
) -> None:
    together = model(*batch.source, batch.target)
    for number, row in enumerate(batch.rows):
        one = slice(number, number + 1)
        alone = model(*model.source_kind.tensors([row]), batch.target[one])
        torch.testing.assert_close(alone, together[one])


@of_texts
def test_every_source_word_counts(model: EncoderDecoder, batch: Batch) -> None:
    source_ids, mask = batch.source
    before = model(source_ids, mask, batch.target)
    for place in range(LENGTHS[0]):
        other = source_ids.clone()
        other[0, place] = (other[0, place] + 1) % V
        assert (model(other, mask, batch.target)[0] - before[0]).abs().max() > 1e-4


@of_texts
def test_no_target_position_sees_the_future(model: EncoderDecoder, batch: Batch) -> None:
    before = model(*batch.source, batch.target)
    changed = batch.target.clone()
    changed[:, 3:] = (changed[:, 3:] + 1) % V
    after = model(*batch.source, changed)
    torch.testing.assert_close(after[:, :3], before[:, :3])
    assert (after[:, 3:] - before[:, 3:]).abs().amax(dim=(0, 2)).min() > 0.01


def test_rows_of_memory_and_state_may_be_chosen_between_steps(model: EncoderDecoder, batch: Batch) -> None:
    target, mask = batch.target, batch.mask
    memory = model.encode(*batch.source)
    _, state = model.step(target[:, 0], model.start(memory, mask), memory, mask)
    for chosen in ([2, 0, 0], [True, False, True]):
        some = select_rows(memory, chosen)
        expected = model.decode_states(target[chosen], some, mask[chosen])[:, 1]
        found, _ = model.step(target[chosen][:, 1], select_rows(state, chosen), some, mask[chosen])
        torch.testing.assert_close(found, expected)


def test_the_alignment_is_a_distribution_over_the_real_source(model: EncoderDecoder, batch: Batch) -> None:
    memory = model.encode(*batch.source)
    logits, weights = model.decode_with_attention(batch.target, memory, batch.mask)
    torch.testing.assert_close(logits, model.decode(batch.target, memory, batch.mask))
    alignment = model.alignment(weights)
    if getattr(model.config, "attention", "") in ("none", "mean"):
        assert (weights, alignment) == ([], None)
        return
    B, S = batch.mask.shape
    assert all(matrix.shape[:1] + matrix.shape[2:] == (B, T, S) for matrix in weights)
    torch.testing.assert_close(alignment.sum(-1), torch.ones(B, T))
    assert not alignment.masked_select(~batch.mask[:, None]).any()


def test_every_weight_is_trained(model: EncoderDecoder, batch: Batch) -> None:
    model.train()
    states, trace = model.decode_and_trace(batch.target, model.encode(*batch.source), batch.mask)
    extra = model.extra_loss(trace, states, batch.target)
    (model.project(states).square().sum() + (0 if extra is None else extra)).backward()
    for name, weight in model.named_parameters():
        assert not weight.requires_grad or weight.grad.abs().max() > 0, name
