"""The same weights in transformers, as a `MarianMTModel`, and its `generate`: PyTorch in fp32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import MarianConfig, MarianMTModel

from benchmarks.workloads import Search
from training.batches import pad_rows
from training.config import BOS_ID, EOS_ID, PAD_ID
from training.transformer import Transformer

# The fastest of 32 to 256 on Multi30k: a batch goes on until its last target ends.
_BATCH_SIZE = 32


def convert(model: Transformer) -> MarianMTModel:
    """The same function: `load_state_dict` refuses a tensor that is missing, left over, or of another shape.

    Raises:
        ValueError: The model has pre-norm, and Marian's layers are post-norm.
    """
    config = model.config
    if config.norm != "post":
        raise ValueError(f"MarianMTModel is post-norm, and the model has norm={config.norm!r}")
    marian = MarianMTModel(
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
    marian.load_state_dict(dict(_weights(model)) | {"final_logits_bias": torch.zeros(1, config.vocab_size)})
    return marian.eval()


class TransformersPeer:
    """`generate` of the converted model."""

    def __init__(self, model: Transformer) -> None:
        self._model = convert(model)

    def translate(self, sources: Sequence[Sequence[int]], search: Search) -> list[list[int]]:
        """The best target of each source, encoding included; sources of like length share a batch."""
        targets: list[list[int]] = [[] for _ in sources]
        by_length = sorted(range(len(sources)), key=lambda row: len(sources[row]))
        for start in range(0, len(by_length), _BATCH_SIZE):
            rows = by_length[start : start + _BATCH_SIZE]
            for row, target in zip(rows, self._generate([sources[row] for row in rows], search), strict=True):
                targets[row] = target
        return targets

    def _generate(self, sources: list[Sequence[int]], search: Search) -> list[list[int]]:
        source_ids = pad_rows(sources)  # (B, S)
        beam = {"early_stopping": True, "length_penalty": 0.0} if search.beam_size > 1 else {}
        generated: Tensor = self._model.generate(
            input_ids=source_ids,
            attention_mask=(source_ids != PAD_ID).long(),
            num_beams=search.beam_size,
            do_sample=False,
            max_new_tokens=search.max_new_tokens,
            **beam,
        )  # (B, 1 + T)
        return [_without_end(target[1:]) for target in generated.tolist()]


def _without_end(target: list[int]) -> list[int]:
    for special_id in (EOS_ID, PAD_ID):
        if special_id in target:
            target = target[: target.index(special_id)]
    return target


def _weights(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    embedding = model.embedding.weight
    yield "lm_head.weight", embedding
    yield "model.shared.weight", embedding
    for name, layers in (("encoder", model.encoder_layers), ("decoder", model.decoder_layers)):
        yield f"model.{name}.embed_tokens.weight", embedding
        # Marian's own table has all sines before all cosines.
        yield f"model.{name}.embed_positions.weight", model.positions
        for i, layer in enumerate(layers):
            yield from _layer_weights(f"model.{name}.layers.{i}", layer, is_decoder=name == "decoder")


def _layer_weights(prefix: str, layer: Any, is_decoder: bool) -> Iterator[tuple[str, Tensor]]:
    attentions = {"self_attn": (layer.self_attention, layer.self_attention_norm)}
    if is_decoder:
        attentions["encoder_attn"] = (layer.cross_attention, layer.cross_attention_norm)
    modules = {
        "fc1": layer.feed_forward.inner,
        "fc2": layer.feed_forward.outer,
        "final_layer_norm": layer.feed_forward_norm,
    }
    for name, (attention, norm) in attentions.items():
        modules[f"{name}_layer_norm"] = norm
        for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value"), ("out", "output")):
            modules[f"{name}.{theirs}_proj"] = getattr(attention, ours)
    for name, module in modules.items():
        yield f"{prefix}.{name}.weight", module.weight
        yield f"{prefix}.{name}.bias", module.bias
