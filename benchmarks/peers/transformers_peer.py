"""Converts our weights to a `MarianMTModel` of transformers, and calls its `generate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import MarianConfig, MarianMTModel

from benchmarks.peers.work import Search
from seq2seq_serve.training.config import BOS_ID, EOS_ID, PAD_ID
from seq2seq_serve.training.data.sources import pad_rows
from seq2seq_serve.training.models.base import EncoderDecoder
from seq2seq_serve.training.models.transformer import Transformer

# The fastest of 32 to 256 on Multi30k; a batch runs until its last target ends.
_BATCH_SIZE = 32


class TransformersPeer:
    """Translates with `generate` of the converted model.

    Args:
        model: Our model; it must be post-norm, like Marian's.
        device: Device of the converted model.
        dtype: Data type of the converted model.
        is_static: Whether its cache is allocated once; transformers then compiles the step if it can.

    Raises:
        ValueError: The model has pre-norm.
    """

    def __init__(
        self, model: EncoderDecoder, device: torch.device, dtype: torch.dtype, *, is_static: bool = False
    ) -> None:
        assert isinstance(model, Transformer)
        self._model = _convert(model).to(device, dtype)
        self._device = device
        self._options = {"cache_implementation": "static"} if is_static else {}

    def translate(self, sources: Sequence[Sequence[int]], search: Search) -> list[list[int]]:
        """Returns the best target of each source, in batches of similar lengths; includes encoding."""
        targets: list[list[int]] = [[] for _ in sources]
        by_length = sorted(range(len(sources)), key=lambda row: len(sources[row]))
        for start in range(0, len(by_length), _BATCH_SIZE):
            rows = by_length[start : start + _BATCH_SIZE]
            for row, target in zip(rows, self._generate([sources[row] for row in rows], search), strict=True):
                targets[row] = target
        return targets

    def greedy(self, sources: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Returns exactly `num_tokens` target tokens of each source; includes encoding."""
        search = Search(beam_size=1, max_new_tokens=num_tokens, min_new_tokens=num_tokens)
        return self._generate(sources, search)

    def _generate(self, sources: Sequence[Sequence[int]], search: Search) -> list[list[int]]:
        source_ids = pad_rows(sources).to(self._device)  # (B, S)
        options: dict[str, Any] = dict(self._options)
        if search.beam_size > 1:
            options |= {"early_stopping": True, "length_penalty": 0.0}
        if search.min_new_tokens:
            options["min_new_tokens"] = search.min_new_tokens
        generated: Tensor = self._model.generate(
            input_ids=source_ids,
            attention_mask=(source_ids != PAD_ID).long(),
            num_beams=search.beam_size,
            do_sample=False,
            max_new_tokens=search.max_new_tokens,
            **options,
        )  # (B, 1 + T)
        return [_without_end(target[1:], search.min_new_tokens) for target in generated.tolist()]


def _without_end(target: list[int], min_new_tokens: int) -> list[int]:
    for special_id in (EOS_ID, PAD_ID):
        if special_id in target[min_new_tokens:]:
            target = target[: target.index(special_id, min_new_tokens)]
    return target


def _convert(model: Transformer) -> Any:
    """Returns an equal Marian model; `load_state_dict` rejects missing, extra and misshapen tensors."""
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
    assert model.config.tied == "all", "Marian shares one matrix"
    embedding = model.embedding.weight
    yield "lm_head.weight", embedding
    yield "model.shared.weight", embedding
    for name, layers in (("encoder", model.encoder_layers), ("decoder", model.decoder_layers)):
        yield f"model.{name}.embed_tokens.weight", embedding
        # Marian's default table has all sines before all cosines.
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
