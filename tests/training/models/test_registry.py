import json
from dataclasses import asdict

import pytest
import torch

from seq2seq_serve.bundle.checked import from_json
from seq2seq_serve.training.config import TrainingConfig, TransformerConfig
from seq2seq_serve.training.models.recurrent import Recurrent
from seq2seq_serve.training.models.registry import (
    FAMILIES,
    config_from_json,
    config_to_json,
    make_model,
)
from seq2seq_serve.training.presets import PRESETS, preset_named


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_json_and_is_built(name: str) -> None:
    preset = preset_named(name)
    assert preset.name == name
    recipe = json.loads(json.dumps(asdict(preset.training)))
    assert from_json(TrainingConfig, recipe) == preset.training
    config = preset.model
    content = json.loads(json.dumps(config_to_json(config)))
    assert config_from_json(content) == config
    with torch.device("meta"):
        model = make_model(config)
    assert type(model) is FAMILIES[content["kind"]].model
    if isinstance(model, Recurrent):
        assert sum(weight.numel() for weight in model.parameters()) < 8_000_000


def test_an_unknown_kind_is_refused_with_those_that_exist(model_config: TransformerConfig) -> None:
    with pytest.raises(ValueError, match=r"'rnn'; .* transformer, recurrent"):
        config_from_json(model_config.to_json() | {"kind": "rnn"})
    with pytest.raises(ValueError, match="unknown kind of model None"):
        config_from_json(model_config.to_json())
    with pytest.raises(ValueError, match="the model must be a JSON object, not list"):
        config_from_json([])
