"""BART, Marian, Pegasus, mBART, M2M100, NLLB and Blenderbot: the dialect of fairseq."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from seq2seq_serve.training.huggingface.checkpoint import CheckpointFolder
from seq2seq_serve.training.huggingface.dialect import (
    PROJECTIONS,
    Dialect,
    Limits,
    PositionRule,
    PublishedFamily,
    activation_of,
    head_width,
)
from seq2seq_serve.training.models.options import Positions, PublishedConfig, StackConfig

LEARNED = PositionRule("learned")
BART_LEARNED = PositionRule("learned", offset=2)
SINUSOIDAL = PositionRule("halves")
M2M100 = PositionRule("tensor2tensor", offset=2, is_limited=False, skips_pad=True)

Side = Literal["encoder", "decoder"]


def positions_of(rule: PositionRule, count: int, zero_position_id: int | None) -> Positions:
    """The vectors of a rule; where a token has none, the others follow its number."""
    first = zero_position_id + 1 if isinstance(zero_position_id, int) else rule.offset
    return Positions(rule.kind, count, first)


def bart_stack(
    family: PublishedFamily,
    config: Mapping[str, Any],
    side: Side,
    num_positions: int,
    positions: PositionRule | None = None,
    **options: Any,
) -> StackConfig:
    """The options of a half by settings with BART's names; `positions` None is the family's rule."""
    D, heads = config["d_model"], config[f"{side}_attention_heads"]
    num_layers, d_ff = config[f"{side}_layers"], config[f"{side}_ffn_dim"]
    scales = config.get("scale_embedding", family.scales_embedding)
    rule = positions or family.positions
    assert rule is not None
    zero_position_id = config.get("pad_token_id", 1) if rule.skips_pad else None
    given: dict[str, Any] = {
        "activation": activation_of(config.get("activation_function", family.activation)),
        "attention_scale": 1 / math.sqrt(D // heads),
        "is_pre_norm": family.is_pre_norm,
        "has_embedding_norm": family.has_embedding_norm,
        "embedding_scale": math.sqrt(D) if scales else 1.0,
        "positions": positions_of(rule, num_positions, zero_position_id),
        "zero_position_id": zero_position_id,
    }
    return StackConfig(D, num_layers, heads, heads, head_width(D, heads), d_ff, **given | options)


def _options(family: PublishedFamily, checkpoint: CheckpointFolder, limits: Limits) -> PublishedConfig:
    config = checkpoint.config
    assert family.positions is not None
    most = config["max_position_embeddings"]
    lengths = limits.filled(most, most if family.positions.is_limited else None)
    num_positions = most if family.positions.is_limited else max(vars(lengths).values())
    return PublishedConfig(
        vocab_size=config.get("decoder_vocab_size") or config["vocab_size"],
        source_vocab_size=config["vocab_size"],
        d_model=config["d_model"],
        encoder=bart_stack(family, config, "encoder", num_positions),
        decoder=bart_stack(family, config, "decoder", num_positions),
        max_source_length=lengths.max_source_length,
        max_target_length=lengths.max_target_length,
    )


BART_NAMES = (
    (r"^model\.", ""),
    (r"^(en|de)coder\.layers\.", r"\1coder_layers."),
    (r"\.self_attn\.", ".self_attention."),
    (r"\.encoder_attn\.", ".cross_attention."),
    *PROJECTIONS,
    (r"\.out_proj\.", ".output."),
    (r"\.self_attn_layer_norm\.", ".self_attention_norm."),
    (r"\.encoder_attn_layer_norm\.", ".cross_attention_norm."),
    (r"\.fc1\.", ".feed_forward.inner."),
    (r"\.fc2\.", ".feed_forward.outer."),
    (r"\.final_layer_norm\.", ".feed_forward_norm."),
    (r"^encoder\.(layernorm_embedding|embed_\w+)\.", r"source_\1."),
    (r"^decoder\.(layernorm_embedding|embed_\w+)\.", r"target_\1."),
    (r"^(source|target)_layernorm_embedding\.", r"\1_norm."),
    (r"^(source|target)_embed_tokens\.", r"\1_embedding."),
    (r"^(source|target)_embed_positions\.weights?$", r"\1_positions"),
    (r"^(en|de)coder\.layer_norm\.", r"\1coder_norm."),
    (r"^lm_head\.", "output."),
    (r"^final_logits_bias$", "output_bias"),
)
BART = Dialect(_options, BART_NAMES)
