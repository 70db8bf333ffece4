"""Converts our weights to a `MarianMTModel` of transformers, so that `generate` decodes the same model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import MarianConfig, MarianMTModel

from seq2seq_serve.training.config import BOS_ID, EOS_ID, PAD_ID, TransformerConfig
from seq2seq_serve.training.models.base import EncoderDecoder
from seq2seq_serve.training.models.transformer import Transformer


def as_marian(model: EncoderDecoder, device: torch.device, dtype: torch.dtype) -> Any:
    """Returns an equal model in eval mode; `load_state_dict` rejects missing, extra and misshapen tensors.

    Raises:
        ValueError: The model has pre-norm.
    """
    assert isinstance(model, Transformer)
    config, positions = model.config, model.target_positions
    assert isinstance(config, TransformerConfig)
    assert positions is not None
    if config.norm != "post":
        raise ValueError(f"MarianMTModel is post-norm, and the model has norm={config.norm!r}")
    marian: Any = MarianMTModel(
        MarianConfig(
            vocab_size=config.vocab_size,
            d_model=config.d_model,
            encoder_layers=config.num_encoder_layers,
            decoder_layers=config.num_decoder_layers,
            encoder_attention_heads=config.num_heads,
            decoder_attention_heads=config.num_heads,
            encoder_ffn_dim=config.d_ff,
            decoder_ffn_dim=config.d_ff,
            activation_function="relu",
            scale_embedding=True,
            max_position_embeddings=len(positions),
            dropout=0.0,
            pad_token_id=PAD_ID,
            bos_token_id=BOS_ID,
            eos_token_id=EOS_ID,
            forced_eos_token_id=None,
            decoder_start_token_id=BOS_ID,
        )
    )
    state = {name: tensor.detach().cpu() for name, tensor in _weights(model)}
    marian.load_state_dict(state | {"final_logits_bias": torch.zeros(1, config.vocab_size)})
    return marian.to(device, dtype).eval()


def _weights(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    assert model.config.tied == "all", "Marian shares one matrix"
    embedding, positions = model.embedding.weight, model.target_positions
    assert positions is not None
    yield "lm_head.weight", embedding
    yield "model.shared.weight", embedding
    for name, layers in (("encoder", model.encoder_layers), ("decoder", model.decoder_layers)):
        yield f"model.{name}.embed_tokens.weight", embedding
        # Marian's default table has all sines before all cosines.
        yield f"model.{name}.embed_positions.weight", positions
        for i, layer in enumerate(layers):
            yield from _layer_weights(f"model.{name}.layers.{i}", layer)


def _layer_weights(prefix: str, layer: Any) -> Iterator[tuple[str, Tensor]]:
    modules = {
        "fc1": layer.feed_forward.inner,
        "fc2": layer.feed_forward.outer,
        "final_layer_norm": layer.feed_forward_norm,
    }
    for theirs, ours in (("self_attn", "self_attention"), ("encoder_attn", "cross_attention")):
        attention = getattr(layer, ours, None)
        if attention is None:
            continue  # an encoder layer
        modules[f"{theirs}_layer_norm"] = getattr(layer, f"{ours}_norm")
        for part, name in (("q", "query"), ("k", "key"), ("v", "value"), ("out", "output")):
            modules[f"{theirs}.{part}_proj"] = getattr(attention, name)
    for name, module in modules.items():
        yield f"{prefix}.{name}.weight", module.weight
        yield f"{prefix}.{name}.bias", module.bias
