"""Whisper: BART's names, a spectrogram as the source, and maps of keys without biases."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from seq2seq_serve.training.huggingface.bart import BART_NAMES, bart_stack
from seq2seq_serve.training.huggingface.checkpoint import CheckpointFolder
from seq2seq_serve.training.huggingface.dialect import Dialect, Limits, PublishedFamily, target_limit
from seq2seq_serve.training.huggingface.sounds import Sounds
from seq2seq_serve.training.models.options import PublishedConfig, StackConfig


def _options(family: PublishedFamily, checkpoint: CheckpointFolder, limits: Limits) -> PublishedConfig:
    config = checkpoint.config
    most = config["max_target_positions"]
    sounds = Sounds.of(config, checkpoint.feature_extractor)
    unbiased = frozenset({"key"})
    decoder = bart_stack(family, config, "decoder", most, unbiased=unbiased)
    return PublishedConfig(
        vocab_size=config["vocab_size"],
        source_vocab_size=0,
        d_model=config["d_model"],
        encoder=bart_stack(family, config, "encoder", sounds.num_positions, unbiased=unbiased),
        decoder=decoder,
        media=sounds,
        alignment_heads=_alignment_heads(checkpoint, decoder),
        max_source_length=sounds.num_positions,
        max_target_length=target_limit(limits, most),
    )


def _alignment_heads(checkpoint: CheckpointFolder, decoder: StackConfig) -> tuple[tuple[int, int], ...]:
    """The heads that the checkpoint names; otherwise those of the upper half of layers, as OpenAI's code.

    A distilled model may name heads of layers that it no longer has.
    """
    num_layers, num_heads = decoder.num_layers, decoder.num_heads
    named = named_heads(checkpoint.generation)
    heads = [pair for pair in product(range(num_layers), range(num_heads)) if list(pair) in named]
    return tuple(heads or product(range(num_layers // 2, num_layers), range(num_heads)))


def named_heads(generation: Mapping[str, Any]) -> list[Any]:
    """Returns the alignment heads of a checkpoint: pairs of a layer and a head, unless it is damaged."""
    named = generation.get("alignment_heads")
    return named if isinstance(named, list) else [named] if named else []


WHISPER = Dialect(
    _options,
    (
        *BART_NAMES,
        (r"^encoder\.conv1\.", "front.first."),
        (r"^encoder\.conv2\.", "front.last."),
        (r"^proj_out\.", "output."),
    ),
)
