import pytest
import torch

from seq2seq_serve.training.config import BOS_ID, EOS_ID
from seq2seq_serve.training.data.sources import pad_rows
from seq2seq_serve.training.data.tokenizer import train_tokenizer
from seq2seq_serve.training.models.recurrent import Recurrent, RecurrentConfig
from seq2seq_serve.training.models.transformer import Transformer
from seq2seq_serve.training.reports.attention_maps import alignment, encoder_self_attention
from seq2seq_serve.training.run import TrainedModel


@pytest.fixture
def run(model: Transformer) -> TrainedModel:
    return TrainedModel(model, train_tokenizer([], 260), model.config, {}, [], 0.0)


def test_the_attention_shown_is_that_of_the_layer_that_is_exported(run: TrainedModel) -> None:
    source_ids, target_ids = [7, 8, 9, EOS_ID], [10, 11]
    with torch.inference_mode():
        source = pad_rows([source_ids])
        mask = torch.ones_like(source, dtype=torch.bool)
        memory = run.model.encode(source, mask)
        _, weights = run.model.decode_with_attention(pad_rows([[BOS_ID, *target_ids]]), memory, mask)
    assert len(weights) == 2
    torch.testing.assert_close(alignment(run, source_ids, target_ids), weights[0][0].mean(dim=0))


def test_the_attention_of_a_recurrent_model_is_shown() -> None:
    torch.manual_seed(0)
    model = Recurrent(RecurrentConfig(300, 16, 16, 1, 1)).eval()
    run = TrainedModel(model, train_tokenizer([], 260), model.config, {}, [], 0.0)
    shown = alignment(run, [7, 8, 9, EOS_ID], [10, 11])
    assert shown.shape == (3, 4)
    torch.testing.assert_close(shown.sum(dim=-1), torch.ones(3))


def test_self_attention_is_each_heads_softmax_over_the_layers_input(run: TrainedModel) -> None:
    source_ids = [7, 8, 9, EOS_ID]
    found = encoder_self_attention(run, source_ids)
    assert found.shape == (2, 2, 4, 4)
    layer = run.model.encoder_layers[0]
    with torch.inference_mode():
        x = run.model.embedding(torch.tensor(source_ids)) * 32**0.5 + run.model.source_positions[:4]
        query, key = layer.self_attention.query(x), layer.self_attention.key(x)  # post-norm: the sum itself
    for head in range(2):
        part = slice(16 * head, 16 * head + 16)
        expected = (query[:, part] @ key[:, part].T / 4).softmax(dim=-1)
        torch.testing.assert_close(found[0, head], expected)


def test_a_model_without_attention_cannot_be_shown() -> None:
    model = Recurrent(RecurrentConfig(300, 16, 16, 1, 1, attention="none")).eval()
    run = TrainedModel(model, train_tokenizer([], 260), model.config, {}, [], 0.0)
    with pytest.raises(ValueError, match="this model has no attention"):
        alignment(run, [5, EOS_ID], [6])
    with pytest.raises(ValueError, match="this model's encoder has no self-attention"):
        encoder_self_attention(run, [5, EOS_ID])
