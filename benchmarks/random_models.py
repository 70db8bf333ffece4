"""Models whose every weight is random, and the same on every machine."""

from __future__ import annotations

import math
import zlib

import numpy as np
import torch

from seq2seq_serve.training.config import ModelConfig
from seq2seq_serve.training.data.tokenizer import train_tokenizer
from seq2seq_serve.training.models.base import EncoderDecoder
from seq2seq_serve.training.models.registry import make_model
from seq2seq_serve.training.run import TrainedModel

# Standard deviations of products of maps with values of a deviation of 1. With sharp attention and small
# feed-forward layers, targets depend on the source and on the tokens before. With 4 in the place of 2.5,
# float16 would differ from float32 by 0.9 in a log-probability, and not by 0.01.
_GAINS = {"query": 2.5, "key": 2.5, "feed_forward": 0.5}
_BIAS = 0.05
_TEXT = "the quick brown fox jumps over the lazy dog"


def fill(model: EncoderDecoder) -> None:
    """Fill every parameter, biases and norms included, so that each of them has an effect.

    The numbers are numpy's, from a seed for each parameter's name: torch's own may differ between versions.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rng = np.random.default_rng(zlib.crc32(name.encode()))
            noise = torch.from_numpy(rng.standard_normal(tuple(parameter.shape), np.float32))
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(_BIAS * noise)
            else:
                gain = next((gain for part, gain in _GAINS.items() if part in name), 1.0)
                parameter.copy_(gain * noise / math.sqrt(parameter.shape[1]))


def random_trained(config: ModelConfig) -> TrainedModel:
    """Returns a model that `fill` filled."""
    model = make_model(config).eval()
    fill(model)
    return untrained(model, config)


def untrained(model: EncoderDecoder, config: ModelConfig) -> TrainedModel:
    """Returns a model as a trained one, with a tokenizer of 300 tokens; requests give it token ids."""
    provenance = {"corpus": "none: random weights"}
    dev = [(_TEXT, _TEXT)] * 4
    return TrainedModel(model, train_tokenizer([_TEXT], 300), config, provenance, dev, dev_score=0.0)
