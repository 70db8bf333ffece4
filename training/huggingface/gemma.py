"""T5Gemma and T5Gemma 2: Gemma's layers in an encoder and a decoder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from seq2seq_serve.training.huggingface.checkpoint import CheckpointError, CheckpointFolder
from seq2seq_serve.training.huggingface.dialect import (
    EMBEDDINGS,
    PROJECTIONS,
    Dialect,
    Limits,
    PublishedFamily,
    activation_of,
)
from seq2seq_serve.training.models.options import ALL_MAPS, LayerKind, PublishedConfig, Rotary, StackConfig

_DEFAULTS: dict[str, Any] = {  # that both halves of a model share
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
}


def _options(family: PublishedFamily, checkpoint: CheckpointFolder, limits: Limits) -> PublishedConfig:
    encoder, decoder, unscaled_id = checkpoint.config["encoder"], checkpoint.config["decoder"], None
    if family.is_merged:
        encoder, unscaled_id = encoder["text_config"], encoder.get("eoi_token_index", 256_000)
    shared = {}
    for name, default in _DEFAULTS.items():
        values = {side.get(name, default) for side in (encoder, decoder)}
        if len(values) > 1:
            raise CheckpointError(f"{name} differs between encoder and decoder, which is not supported")
        (shared[name],) = values
    if shared["attention_bias"]:
        raise CheckpointError("attention_bias is true, which is not supported")
    options = {
        "score_cap": None if family.is_merged else shared["attn_logit_softcapping"],  # T5Gemma 2 ignores it
        "unscaled_id": unscaled_id,  # the end of an image
    }
    most = min(side["max_position_embeddings"] for side in (encoder, decoder))
    lengths = limits.filled(min(family.longest, most), most)
    return PublishedConfig(
        vocab_size=decoder["vocab_size"],
        source_vocab_size=encoder["vocab_size"],
        d_model=decoder["hidden_size"],
        encoder=_gemma_stack(family, encoder, is_causal=False, **options),
        decoder=_gemma_stack(family, decoder, is_causal=True, **options),
        is_merged=family.is_merged,
        logits_cap=decoder.get("final_logit_softcapping", None if family.is_merged else 30.0),
        max_source_length=lengths.max_source_length,
        max_target_length=lengths.max_target_length,
    )


def _gemma_stack(
    family: PublishedFamily, config: Mapping[str, Any], *, is_causal: bool, **options: Any
) -> StackConfig:
    num_layers, window = config["num_hidden_layers"], config.get("sliding_window", 4096)
    period = config.get("sliding_window_pattern", 6) if family.is_merged else 2
    types = config.get("layer_types") or [
        "sliding_attention" if (i + 1) % period else "full_attention" for i in range(num_layers)
    ]
    if is_causal:
        sliding = (window - 1, 0)
    elif family.is_merged:
        sliding = ((window + 1) // 2 - 1, window // 2)
    else:
        sliding = (window, window)
    windows = {"full_attention": None, "sliding_attention": sliding}
    if unknown := set(types) - windows.keys():
        raise CheckpointError(f"layer_types has {', '.join(sorted(unknown))}, which is not supported")
    return StackConfig(
        config["hidden_size"],
        num_layers,
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
        config["intermediate_size"],
        activation=activation_of(config.get("hidden_activation", "gelu_pytorch_tanh")),
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
        norm_kind="rms",
        unbiased=ALL_MAPS,
        attention_scale=config.get("query_pre_attn_scalar", 256) ** -0.5,
        embedding_scale=math.sqrt(config["hidden_size"]),
        is_pre_norm=True,
        is_gated=True,
        has_output_norms=True,
        has_head_norms=family.is_merged,
        kinds=tuple(LayerKind(windows[one], _rotary(family, config, one)) for one in types),
        **options,
    )


def _rotary(family: PublishedFamily, config: Mapping[str, Any], layer_type: str) -> Rotary:
    """The rotary positions of a type of layers; their settings have had several names."""
    given = config.get("rope_parameters") or {}
    base, base_name = 10_000.0, "rope_theta"
    scaling = config.get("rope_scaling") or {}
    if family.is_merged:
        given = given.get(layer_type) or {}
        if layer_type == "full_attention":
            base = 1_000_000.0
        else:
            base_name, scaling = "rope_local_base_freq", {}
    rope = {"rope_type": "default", "rope_theta": config.get(base_name, base)} | scaling | given
    if rope["rope_type"] not in ("default", "linear"):
        raise CheckpointError(
            f"rotary positions of the type {rope['rope_type']!r} are not supported; there are default, linear"
        )
    return Rotary(rope["rope_theta"], rope["factor"] if rope["rope_type"] == "linear" else 1.0)


GEMMA = Dialect(
    _options,
    (
        (r"^model\.", ""),
        (r"^encoder\.text_model\.", "encoder."),
        (r"^(en|de)coder\.layers\.", r"\1coder_layers."),
        (r"\.(self|cross)_attn\.", r".\1_attention."),
        (r"\.q_norm\.", ".query_norm."),
        (r"\.k_norm\.", ".key_norm."),
        *PROJECTIONS,
        (r"\.o_proj\.", ".output."),
        (r"\.pre_(self|cross)_attn_layernorm\.", r".\1_attention_norm."),
        (r"\.post_(self|cross)_attn_layernorm\.", r".\1_attention_output_norm."),
        (r"\.pre_feedforward_layernorm\.", ".feed_forward_norm."),
        (r"\.post_feedforward_layernorm\.", ".feed_forward_output_norm."),
        (r"\.mlp\.gate_proj\.", ".feed_forward.gate."),
        (r"\.mlp\.up_proj\.", ".feed_forward.inner."),
        (r"\.mlp\.down_proj\.", ".feed_forward.outer."),
        *EMBEDDINGS,
        (r"^(source|target)_embedding\.eoi_embedding$", r"\1_unscaled"),
        (r"^(en|de)coder\.norm\.", r"\1coder_norm."),
        (r"^lm_head\.out_proj\.", "output."),
    ),
    unused=r"encoder\.(vision_tower|multi_modal_projector)\..*",
    norm_offset=1.0,
)
