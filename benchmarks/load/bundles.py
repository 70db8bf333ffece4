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


def export_random(preset: str, folder: Path) -> TrainedModel:
    """Export a preset with random weights and `VOCAB_SIZE` tokens in int8; returns it as a trained model."""
    config = dataclasses.replace(PRESETS[preset]().model, vocab_size=VOCAB_SIZE)
    trained = dataclasses.replace(random_model(config), tokenizer=_wide_tokenizer())
    export_bundle(trained, folder, (Precision.INT8,))
    return trained


def _wide_tokenizer() -> Tokenizer:
    """Train a tokenizer on random words, so that the server must look up a text for every id."""
    chance = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(chance.choices(letters, k=chance.randint(2, 8))) for _ in range(60_000)]
    return train_tokenizer([" ".join(words)], VOCAB_SIZE)
