"""TrOCR: the encoder of ViT or DeiT, and a decoder with BART's names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from seq2seq_serve.training.huggingface.bart import (
    BART_LEARNED,
    BART_NAMES,
    LEARNED,
    M2M100,
    bart_stack,
    positions_of,
)
from seq2seq_serve.training.huggingface.checkpoint import CheckpointError, CheckpointFolder
from seq2seq_serve.training.huggingface.dialect import (
    Dialect,
    Limits,
    PublishedFamily,
    activation_of,
    head_width,
    target_limit,
)
from seq2seq_serve.training.huggingface.pictures import Patches
from seq2seq_serve.training.models.options import PublishedConfig, StackConfig

_PICTURE_TOKENS = {"vit": 1, "deit": 2}  # before the patches of a picture, by the type of the encoder


def _options(family: PublishedFamily, checkpoint: CheckpointFolder, limits: Limits) -> PublishedConfig:
    encoder, decoder = checkpoint.config["encoder"], checkpoint.config["decoder"]
    types = encoder["model_type"], decoder["model_type"]
    if types[0] not in _PICTURE_TOKENS or types[1] != family.name:
        raise CheckpointError(
            f"the model reads pictures by {types[0]} and writes by {types[1]}, which is not supported; it "
            f"must read by {' or '.join(_PICTURE_TOKENS)}, and write by {family.name}"
        )
    pictures = Patches.of(encoder, _PICTURE_TOKENS[types[0]], checkpoint.path)
    most = decoder["max_position_embeddings"]
    has_table = decoder.get("use_learned_position_embeddings", True)
    return PublishedConfig(
        vocab_size=decoder["vocab_size"],
        source_vocab_size=0,
        d_model=decoder["d_model"],
        encoder=_vit_stack(encoder, pictures.num_positions),
        decoder=bart_stack(
            family,
            decoder,
            "decoder",
            most,
            BART_LEARNED if has_table else M2M100,
            is_pre_norm=False,
            has_embedding_norm=decoder.get("layernorm_embedding", True),
        ),
        media=pictures,
        max_source_length=pictures.num_positions,
        max_target_length=target_limit(limits, most),
    )


def _vit_stack(config: Mapping[str, Any], num_positions: int) -> StackConfig:
    D, heads = config["hidden_size"], config["num_attention_heads"]
    has_biases = config.get("qkv_bias", True)
    return StackConfig(
        D,
        config["num_hidden_layers"],
        heads,
        heads,
        head_width(D, heads),
        config["intermediate_size"],
        activation=activation_of(config.get("hidden_act", "gelu")),
        norm_epsilon=config.get("layer_norm_eps", 1e-12),
        attention_scale=1 / math.sqrt(D // heads),
        unbiased=frozenset() if has_biases else frozenset({"query", "key", "value"}),
        is_pre_norm=True,
        positions=positions_of(LEARNED, num_positions, None),
    )


TROCR = Dialect(
    _options,
    (
        (r"^decoder\.(model\.)?", ""),
        (r"^output_projection\.", "output."),
        (r"^enc_to_dec_proj\.", "projection."),
        (r"^encoder\.embeddings\.cls_token$", "front.class_token"),
        (r"^encoder\.embeddings\.distillation_token$", "front.distillation_token"),
        (r"^encoder\.embeddings\.patch_embeddings\.projection\.", "front.last."),
        (r"^encoder\.embeddings\.position_embeddings$", "source_positions"),
        (r"^encoder\.(encoder\.layer|layers)\.", "encoder_layers."),
        (r"\.attention\.attention\.", ".self_attention."),
        (r"\.attention\.(output\.dense|o_proj)\.", ".self_attention.output."),
        (r"\.attention\.(\w_proj)\.", r".self_attention.\1."),
        (r"\.intermediate\.dense\.", ".feed_forward.inner."),
        (r"\.output\.dense\.", ".feed_forward.outer."),
        (r"\.mlp\.", "."),
        (r"\.layernorm_before\.", ".self_attention_norm."),
        (r"\.layernorm_after\.", ".feed_forward_norm."),
        (r"^encoder\.layernorm\.", "encoder_norm."),
        *BART_NAMES,
    ),
    unused=r"encoder\.(pooler\..*|embeddings\.mask_token)",  # the training of the encoder needed them
)
