"""The same weights in transformers, as a `MarianMTModel`, and its `generate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import MarianConfig, MarianMTModel

from training.batches import pad_rows
from training.config import BOS_ID, EOS_ID, PAD_ID
from training.transformer import Transformer


class TransformersPeer:
    """`generate` of the converted model.

    Args:
        model: Ours; post-norm, as Marian's is.
        device: Where it runs.
        dtype: What it runs in.
        is_static: Whether its cache is allocated once; transformers then compiles the step, where it can.

    Raises:
        ValueError: The model has pre-norm.
    """

    def __init__(
        self, model: Transformer, device: torch.device, dtype: torch.dtype, *, is_static: bool = False
    ) -> None:
        self._model = _convert(model).to(device, dtype)
        self._device = device
        self._options = {"cache_implementation": "static"} if is_static else {}

    def greedy(self, sources: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Exactly `num_tokens` target tokens of each source, encoding included."""
        source_ids = pad_rows(sources).to(self._device)  # (B, S)
        generated: Tensor = self._model.generate(
            input_ids=source_ids,
            attention_mask=(source_ids != PAD_ID).long(),
            num_beams=1,
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            **self._options,
        )  # (B, 1 + T)
        return [target[1:] for target in generated.tolist()]


def _convert(model: Transformer) -> Any:
    """The same function: `load_state_dict` refuses a tensor that is missing, left over, or misshapen."""
    config = model.config
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
            max_position_embeddings=len(model.positions),
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
    return marian.eval()


def _weights(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    embedding = model.embedding.weight
    yield "lm_head.weight", embedding
    yield "model.shared.weight", embedding
    for name, layers in (("encoder", model.encoder_layers), ("decoder", model.decoder_layers)):
        yield f"model.{name}.embed_tokens.weight", embedding
        # Marian's own table has all sines before all cosines.
        yield f"model.{name}.embed_positions.weight", model.positions
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
