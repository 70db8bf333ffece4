"""Exports models with random weights, for measurements of speed."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

from benchmarks.load.mix import VOCAB_SIZE
from benchmarks.peers.work import random_model
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.bundle.tokenizer import Tokenizer
from seq2seq_serve.export.exporter import export_bundle
from seq2seq_serve.training.data.tokenizer import train_tokenizer
from seq2seq_serve.training.presets import PRESETS
from seq2seq_serve.training.run import TrainedModel


def export_random(preset: str, folder: Path, vocab_size: int | None = VOCAB_SIZE) -> TrainedModel:
    """Export a preset with random weights in int8; returns it as a trained model.

    Args:
        preset: The name of the preset.
        folder: The folder of the bundle.
        vocab_size: The number of tokens; None for the preset's own.
    """
    config = PRESETS[preset]().model
    config = dataclasses.replace(config, vocab_size=vocab_size or config.vocab_size)
    trained = dataclasses.replace(random_model(config), tokenizer=_wide_tokenizer(config.vocab_size))
    export_bundle(trained, folder, (Precision.INT8,))
    return trained


def _wide_tokenizer(vocab_size: int) -> Tokenizer:
    """Train a tokenizer on random words, so that the server must look up a text for every id."""
    chance = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(chance.choices(letters, k=chance.randint(2, 8))) for _ in range(2 * vocab_size)]
    return train_tokenizer([" ".join(words)], vocab_size)
