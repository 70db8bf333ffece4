"""The families of models by name: the rest of training knows a family only from here.

To add a family, write its config class and its model class in one file of this folder, and add both to
`FAMILIES`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from seq2seq_serve.bundle.checked import from_json
from seq2seq_serve.training.config import ModelConfig, TransformerConfig
from seq2seq_serve.training.data.sources import SourceKind
from seq2seq_serve.training.models.base import EncoderDecoder
from seq2seq_serve.training.models.captioner import Captioner, CaptionerConfig
from seq2seq_serve.training.models.memory_network import MemoryNetwork, MemoryNetworkConfig
from seq2seq_serve.training.models.options import PublishedConfig
from seq2seq_serve.training.models.recurrent import Recurrent, RecurrentConfig
from seq2seq_serve.training.models.transformer import Transformer


@dataclass(frozen=True)
class Family:
    """A kind of model: its config class, and its model class, whose only argument is such a config."""

    config: type[ModelConfig]
    model: type[EncoderDecoder]


FAMILIES: dict[str, Family] = {
    "transformer": Family(TransformerConfig, Transformer),
    "recurrent": Family(RecurrentConfig, Recurrent),
    "memory-network": Family(MemoryNetworkConfig, MemoryNetwork),
    "captioner": Family(CaptionerConfig, Captioner),
    "published": Family(PublishedConfig, Transformer),
}


def make_model(config: ModelConfig) -> EncoderDecoder:
    """Create a model with random weights."""
    return FAMILIES[kind_of(config)].model(config)


def kind_of(config: ModelConfig) -> str:
    """The name of the family that a config belongs to."""
    return next(name for name, family in FAMILIES.items() if type(config) is family.config)


def source_kind_of(config: ModelConfig) -> SourceKind:
    """The kind of sources that a model of this config reads."""
    return FAMILIES[kind_of(config)].model.source_kind_of(config)


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """The fields by name, and the family as `kind`."""
    return {"kind": kind_of(config)} | config.to_json()


def config_text(config: ModelConfig) -> str:
    """The JSON text of a config."""
    return json.dumps(config_to_json(config))


def config_from_json(content: Any) -> ModelConfig:
    """Read what `config_to_json` returned.

    Raises:
        ValueError: The family is unknown, or a field is missing, unknown or wrong.
    """
    if not isinstance(content, dict):
        raise ValueError(f"the model must be a JSON object, not {type(content).__name__}")
    sizes = dict(content)
    kind = sizes.pop("kind", None)
    if kind not in FAMILIES:
        raise ValueError(f"unknown kind of model {kind!r}; there are {', '.join(FAMILIES)}")
    return from_json(FAMILIES[kind].config, sizes)
