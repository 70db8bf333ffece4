import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn

from seq2seq_serve.training.config import Tied, TransformerConfig
from seq2seq_serve.training.models.attention import MultiHeadAttention
from seq2seq_serve.training.models.transformer import (
    DecoderLayer,
    EncoderLayer,
    FeedForward,
    Transformer,
    View,
    alignment_layer,
    sinusoidal_positions,
)


def random_ids(*shape: int) -> Tensor:
    return torch.randint(4, 300, shape)


def all_real(ids: Tensor) -> Tensor:
    return torch.ones_like(ids, dtype=torch.bool)


def test_positions_follow_the_papers_formula() -> None:
    positions = sinusoidal_positions(50, 16)
    assert positions.shape == (50, 16)
    for position, i in [(0, 0), (1, 0), (7, 3), (49, 7)]:
        angle = position / 10000 ** (2 * i / 16)
        assert positions[position, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
        assert positions[position, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


@pytest.mark.parametrize(("num_layers", "layer"), [(1, 0), (2, 0), (3, 1), (6, 4)])
def test_the_layer_before_the_last_aligns(num_layers: int, layer: int) -> None:
    assert alignment_layer(num_layers) == layer


def test_feed_forward_is_two_linear_maps_around_a_relu() -> None:
    network = FeedForward(8, 12)
    x = torch.randn(2, 3, 8)
    inner = (x @ network.inner.weight.T + network.inner.bias).clamp(min=0)
    torch.testing.assert_close(network(x), inner @ network.outer.weight.T + network.outer.bias)


def test_post_norm_normalises_the_sum_and_pre_norm_the_input(model_config: TransformerConfig) -> None:
    x, mask = torch.randn(2, 4, 32), torch.ones(2, 1, 1, 4, dtype=torch.bool)
    view = View(mask)
    post = EncoderLayer(model_config).eval()
    y = post.self_attention_norm(x + post.self_attention(x, x, mask)[0])
    torch.testing.assert_close(post(x, view)[0], post.feed_forward_norm(y + post.feed_forward(y)))

    pre = EncoderLayer(dataclasses.replace(model_config, norm="pre")).eval()
    normed = pre.self_attention_norm(x)
    y = x + pre.self_attention(normed, normed, mask)[0]
    torch.testing.assert_close(pre(x, view)[0], y + pre.feed_forward(pre.feed_forward_norm(y)))


def test_decoder_layer_is_the_papers_three_sublayers(model_config: TransformerConfig) -> None:
    layer = DecoderLayer(model_config).eval()
    x, memory = torch.randn(2, 3, 32), torch.randn(2, 5, 32)
    causal, memory_mask = torch.ones(3, 3).tril().bool(), torch.ones(2, 1, 1, 5, dtype=torch.bool)
    y = layer.self_attention_norm(x + layer.self_attention(x, x, causal)[0])
    y = layer.cross_attention_norm(y + layer.cross_attention(y, memory, memory_mask)[0])
    expected = layer.feed_forward_norm(y + layer.feed_forward(y))
    keys_and_values = layer.memory_attention.keys_and_values(memory)
    torch.testing.assert_close(layer(x, View(causal), keys_and_values, memory_mask)[0], expected)


def test_only_pre_norm_ends_each_stack_in_a_norm(model_config: TransformerConfig) -> None:
    post = Transformer(model_config)
    pre = Transformer(dataclasses.replace(model_config, norm="pre"))
    assert isinstance(post.encoder_norm, nn.Identity)
    assert isinstance(post.decoder_norm, nn.Identity)
    assert isinstance(pre.encoder_norm, nn.LayerNorm)
    assert isinstance(pre.decoder_norm, nn.LayerNorm)


def test_one_matrix_embeds_source_and_target_and_projects_the_output(model: Transformer) -> None:
    names = [name for name, _ in model.named_parameters() if "embedding" in name or "project" in name]
    assert names == ["embedding.weight"]
    source, target = random_ids(1, 3), random_ids(1, 2)
    memory = model.encode(source, all_real(source))
    states = model.decode_states(target, memory, all_real(source))
    logits = model.decode(target, memory, all_real(source))
    torch.testing.assert_close(logits, states @ model.embedding.weight.T)


@pytest.mark.parametrize(
    ("tied", "extra"),
    [("target", {"source_embedding.weight"}), ("none", {"source_embedding.weight", "output.weight"})],
)
def test_what_is_not_tied_has_a_matrix_of_its_own(
    model_config: TransformerConfig, tied: Tied, extra: set[str]
) -> None:
    model = Transformer(dataclasses.replace(model_config, tied=tied)).eval()
    assert model.state_dict().keys() - Transformer(model_config).state_dict().keys() == extra
    source, target = random_ids(1, 3), random_ids(1, 2)
    mask = all_real(source)
    with_source = model(source, mask, target)
    with torch.no_grad():
        model.source_weight.zero_()
    assert not torch.equal(model(source, mask, target), with_source)
    with torch.no_grad():
        model.output_weight.zero_()
    assert model(source, mask, target).abs().max() == 0
    assert (model.embedding.weight.abs().max() == 0) == (tied == "target")


def test_word_dropout_leaves_out_whole_tokens_on_both_sides(model_config: TransformerConfig) -> None:
    config = dataclasses.replace(
        model_config, dropout=0.0, word_dropout=0.5, num_encoder_layers=1, num_decoder_layers=1
    )
    model = Transformer(config)
    model.source_positions.zero_()
    ids = random_ids(40, 24)
    embedded = model._embed(ids, model.encoder)
    is_left_out = embedded.abs().amax(dim=2) == 0  # (B, T)
    assert 0.4 < is_left_out.float().mean().item() < 0.6
    whole = model.eval()._embed(ids, model.encoder)
    torch.testing.assert_close(embedded[~is_left_out], 2 * whole[~is_left_out])

    source, target = random_ids(2, 6), random_ids(2, 4)
    mask = all_real(source)
    assert not torch.equal(model.train().encode(source, mask)[0], model.encode(source, mask)[0])
    memory = model.eval().encode(source, mask)
    torch.testing.assert_close(model.encode(source, mask), memory)
    assert not torch.equal(model.train().decode(target, memory, mask), model.decode(target, memory, mask))


def test_every_attention_drops_weights_while_training(model_config: TransformerConfig) -> None:
    model = Transformer(dataclasses.replace(model_config, dropout=0.0, attention_dropout=0.5))
    attentions = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    assert [attention.dropout for attention in attentions] == [0.5] * 6
    source, target = random_ids(2, 6), random_ids(2, 4)
    mask = all_real(source)
    assert not torch.equal(model(source, mask, target), model(source, mask, target))
    model.eval()
    torch.testing.assert_close(model(source, mask, target), model(source, mask, target))


def test_embeddings_are_scaled_by_the_root_of_d_model(model: Transformer) -> None:
    source = random_ids(1, 3)
    expected = model.embedding.weight[source] * math.sqrt(32) + sinusoidal_positions(3, 32)
    torch.testing.assert_close(model._embed(source, model.encoder), expected)


def test_more_positions_than_the_model_has_are_refused(model: Transformer) -> None:
    source = random_ids(1, 25)
    with pytest.raises(ValueError, match="25 positions, and the model has 24"):
        model.encode(source, all_real(source))


def test_positions_are_not_part_of_the_saved_weights(model: Transformer) -> None:
    assert not [name for name in model.state_dict() if "positions" in name]
