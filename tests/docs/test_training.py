"""The page on training says of presets and settings what the code has."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from training.config import TrainingConfig, TransformerConfig
from training.presets import PRESETS
from training.transformer import Transformer

TEXT = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_as_its_row_says(name):
    preset = PRESETS[name]()
    model, training = preset.model, preset.training
    with torch.device("meta"):
        num_parameters = sum(weight.numel() for weight in Transformer(model).parameters())
    cells = [
        f"`{name}`",
        f"{num_parameters / 1e6:.1f} M",
        f"{model.num_encoder_layers}+{model.num_decoder_layers}",
        f"{model.d_model:,}",
        f"{model.d_ff:,}",
        f"{model.num_heads}",
        f"{model.vocab_size:,}",
        model.norm,
        f"{model.dropout:g}",
        f"{training.bpe_dropout:g}",
        f"{training.batch_tokens:,}",
        f"{training.max_steps:,}",
    ]
    assert f"| {' | '.join(cells)} |\n" in TEXT
    schedule = [
        f"{training.learning_rate_scale:g}",
        f"{training.warmup_steps:,}",
        f"{training.cooldown_share:g}",
        f"{training.eval_interval_steps:,}",
        f"{training.checkpoint_interval_steps:,}",
        f"{training.num_averaged}",
    ]
    assert f"| `{name}` | {' | '.join(schedule)} |\n" in TEXT
    # What the two tables leave out is the default, or told beside them.
    told = {"max_length_ratio"} if name == "demo" else set()
    shown = {
        "bpe_dropout",
        "batch_tokens",
        "max_steps",
        "learning_rate_scale",
        "warmup_steps",
        "cooldown_share",
        "eval_interval_steps",
        "checkpoint_interval_steps",
        "num_averaged",
    }
    rest = dataclasses.asdict(training).items() - dataclasses.asdict(TrainingConfig()).items()
    assert {field for field, _ in rest} - shown == told


def test_every_setting_is_listed():
    listed = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", TEXT, flags=re.MULTILINE))))
    fields = {
        field.name for config in (TransformerConfig, TrainingConfig) for field in dataclasses.fields(config)
    }
    assert fields <= listed
