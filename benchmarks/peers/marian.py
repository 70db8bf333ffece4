"""Our weights in a `MarianMTModel` of transformers: `generate` decodes it, and CTranslate2 converts it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import MarianConfig, MarianMTModel

from seq2seq_serve.training.config import BOS_ID, EOS_ID, PAD_ID, TransformerConfig
from seq2seq_serve.training.huggingface.bart import BART
from seq2seq_serve.training.huggingface.weights import TIED, renamed_by
from seq2seq_serve.training.models.base import EncoderDecoder
from seq2seq_serve.training.models.transformer import Transformer


def as_marian(model: EncoderDecoder, device: torch.device, dtype: torch.dtype) -> Any:
    """Returns an equal model in eval mode.

    Raises:
        ValueError: The model has pre-norm.
    """
    assert isinstance(model.config, TransformerConfig)
    if model.config.norm != "post":
        raise ValueError(f"MarianMTModel is post-norm, and the model has norm={model.config.norm!r}")
    return with_names_of_marian(model).to(device, dtype).eval()


def with_names_of_marian(model: EncoderDecoder) -> Any:
    """Returns a MarianMTModel with the model's weights; it computes the same only if that has post-norm."""
    assert isinstance(model, Transformer)
    config, positions = model.config, model.target_positions
    assert isinstance(config, TransformerConfig)
    assert positions is not None
    assert config.tied == "all", "Marian shares one matrix"
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
    own = model.state_dict() | dict.fromkeys(TIED, model.embedding.weight)
    # Marian's default table has all sines before all cosines.
    own |= dict.fromkeys(("source_positions", "target_positions"), positions)
    own["output_bias"] = torch.zeros(1, config.vocab_size)
    marian.load_state_dict({name: own[renamed_by(BART, name)] for name in marian.state_dict()})
    return marian
