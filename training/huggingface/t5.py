"""T5, mT5 and ByT5: RMS norms, no biases, and a bias of scores by distance."""

from __future__ import annotations

from seq2seq_serve.training.huggingface.checkpoint import CheckpointFolder
from seq2seq_serve.training.huggingface.dialect import (
    EMBEDDINGS,
    Dialect,
    Limits,
    PublishedFamily,
    activation_of,
)
from seq2seq_serve.training.models.options import ALL_MAPS, Buckets, PublishedConfig, StackConfig


def _options(family: PublishedFamily, checkpoint: CheckpointFolder, limits: Limits) -> PublishedConfig:
    config = checkpoint.config
    feed_forward = config.get("feed_forward_proj", family.activation)
    gated, _, activation = feed_forward.rpartition("-")
    D, heads = config["d_model"], config["num_heads"]
    num_layers = {
        "encoder": config["num_layers"],
        "decoder": config.get("num_decoder_layers") or config["num_layers"],
    }
    num_buckets = config.get("relative_attention_num_buckets", 32)
    max_distance = config.get("relative_attention_max_distance", 128)
    encoder, decoder = (
        StackConfig(
            D,
            count,
            heads,
            heads,
            config["d_kv"],
            config["d_ff"],
            activation="gelu_tanh" if feed_forward == "gated-gelu" else activation_of(activation),
            norm_epsilon=config.get("layer_norm_epsilon", 1e-6),
            attention_scale=1.0,
            norm_kind="rms",
            is_pre_norm=True,
            is_gated=gated == "gated",
            unbiased=ALL_MAPS,
            buckets=Buckets(num_buckets, max_distance, is_two_sided=side == "encoder"),
        )
        for side, count in num_layers.items()
    )
    lengths = limits.filled(family.longest, None)
    return PublishedConfig(
        vocab_size=config["vocab_size"],
        source_vocab_size=config["vocab_size"],
        d_model=D,
        encoder=encoder,
        decoder=decoder,
        max_source_length=lengths.max_source_length,
        max_target_length=lengths.max_target_length,
    )


T5 = Dialect(
    _options,
    (
        (r"^(en|de)coder\.block\.", r"\1coder_layers."),
        (r"\.layer\.0\.SelfAttention\.", ".self_attention."),
        (r"\.layer\.1\.EncDecAttention\.", ".cross_attention."),
        (r"\.layer\.[12]\.DenseReluDense\.", ".feed_forward."),
        (r"\.layer\.0\.layer_norm\.", ".self_attention_norm."),
        (r"^(encoder_layers\.\d+)\.layer\.1\.layer_norm\.", r"\1.feed_forward_norm."),
        (r"\.layer\.1\.layer_norm\.", ".cross_attention_norm."),
        (r"\.layer\.2\.layer_norm\.", ".feed_forward_norm."),
        (r"attention\.q\.", "attention.query."),
        (r"attention\.k\.", "attention.key."),
        (r"attention\.v\.", "attention.value."),
        (r"attention\.o\.", "attention.output."),
        (r"\.feed_forward\.wi_0\.", ".feed_forward.gate."),
        (r"\.feed_forward\.wi(_1)?\.", ".feed_forward.inner."),
        (r"\.feed_forward\.wo\.", ".feed_forward.outer."),
        (r"^encoder_layers\.0\.self_attention\.relative_attention_bias\.weight$", "source_bias.weight"),
        (r"^decoder_layers\.0\.self_attention\.relative_attention_bias\.weight$", "target_bias.weight"),
        *EMBEDDINGS,
        (r"^(en|de)coder\.final_layer_norm\.", r"\1coder_norm."),
        (r"^lm_head\.", "output."),
    ),
    # Files of the first T5 models have it, and no release of transformers used it.
    unused=r"decoder_layers\.0\.cross_attention\.relative_attention_bias\.weight",
)
