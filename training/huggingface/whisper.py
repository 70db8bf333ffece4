"""Whisper: BART's names, a spectrogram as the source, and maps of keys without biases."""

from __future__ import annotations

from seq2seq_serve.training.huggingface.bart import BART_NAMES, bart_stack
from seq2seq_serve.training.huggingface.checkpoint import CheckpointFolder
from seq2seq_serve.training.huggingface.dialect import Dialect, Family, Limits, target_limit
from seq2seq_serve.training.huggingface.sounds import Sounds
from seq2seq_serve.training.models.options import PublishedConfig


def _options(family: Family, checkpoint: CheckpointFolder, limits: Limits) -> PublishedConfig:
    config = checkpoint.config
    most = config["max_target_positions"]
    sounds = Sounds.of(config, checkpoint.feature_extractor)
    unbiased = frozenset({"key"})
    return PublishedConfig(
        vocab_size=config["vocab_size"],
        source_vocab_size=0,
        d_model=config["d_model"],
        encoder=bart_stack(family, config, "encoder", sounds.num_positions, unbiased=unbiased),
        decoder=bart_stack(family, config, "decoder", most, unbiased=unbiased),
        media=sounds,
        max_source_length=sounds.num_positions,
        max_target_length=target_limit(limits, most),
    )


WHISPER = Dialect(
    _options,
    (
        *BART_NAMES,
        (r"^encoder\.conv1\.", "front.first."),
        (r"^encoder\.conv2\.", "front.last."),
        (r"^proj_out\.", "output."),
    ),
)
