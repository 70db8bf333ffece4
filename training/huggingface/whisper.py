"""Whisper: BART's names, a spectrogram as the source, and maps of keys without biases."""

from __future__ import annotations

from itertools import product

from seq2seq_serve.training.huggingface.bart import BART_NAMES, bart_stack
from seq2seq_serve.training.huggingface.checkpoint import CheckpointError, CheckpointFolder
from seq2seq_serve.training.huggingface.dialect import Dialect, Family, Limits, target_limit
from seq2seq_serve.training.huggingface.sounds import Sounds
from seq2seq_serve.training.models.options import PublishedConfig, StackConfig


def _options(family: Family, checkpoint: CheckpointFolder, limits: Limits) -> PublishedConfig:
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
    """The heads that the checkpoint names; otherwise those of the upper half of layers, as OpenAI's code."""
    shape = decoder.num_layers, decoder.num_heads
    named = checkpoint.generation.get("alignment_heads") or ()
    try:
        heads = sorted({(int(layer), int(head)) for layer, head in named})
    except (TypeError, ValueError):
        raise CheckpointError(
            f"alignment_heads is {named!r:.80}, and must be pairs of a layer and a head"
        ) from None
    if wrong := set(heads) - set(product(*map(range, shape))):
        raise CheckpointError(
            f"alignment_heads has {min(wrong)}, and there are {shape[0]} layers of {shape[1]} heads"
        )
    return tuple(heads or product(range(shape[0] // 2, shape[0]), range(shape[1])))


WHISPER = Dialect(
    _options,
    (
        *BART_NAMES,
        (r"^encoder\.conv1\.", "front.first."),
        (r"^encoder\.conv2\.", "front.last."),
        (r"^proj_out\.", "output."),
    ),
)
