import math
from dataclasses import asdict

import pytest

from seq2seq_serve.training.presets import Preset, preset_named
from seq2seq_serve.training.schedule import learning_rate


def test_any_field_of_model_and_recipe_can_be_changed() -> None:
    preset = preset_named("tiny").changed({"norm": "pre", "bpe_dropout": 0.0, "patience": None})
    assert (preset.model.norm, preset.training.bpe_dropout, preset.training.patience) == ("pre", 0.0, None)
    assert preset.model.dropout == preset_named("tiny").model.dropout
    assert preset_named("tiny").changed({}) == preset_named("tiny")


def test_a_field_belongs_to_either_model_or_recipe(preset: Preset) -> None:
    model, training = asdict(preset.model).keys(), asdict(preset.training).keys()
    assert not model & training


def test_a_learning_rate_is_the_highest_of_the_schedule(preset: Preset) -> None:
    changed = preset.changed({"learning_rate": 3e-4, "warmup_steps": 50, "d_model": 64})
    rates = [learning_rate(step, 64, changed.training, last_step=10_000) for step in range(1, 200)]
    assert max(rates) == rates[49] == pytest.approx(3e-4)
    assert changed.changed(changed.scaled({"learning_rate": 3e-4})) == changed  # what a resume compares
    for rate in (0, -1, "much", math.nan):
        with pytest.raises(ValueError, match=f"learning_rate is {rate!r}, and must be a number above 0"):
            preset.changed({"learning_rate": rate})
    with pytest.raises(ValueError, match="give one of them"):
        preset.changed({"learning_rate": 1e-3, "learning_rate_scale": 1.0})


def test_unknown_and_wrong_settings_are_refused_by_name(preset: Preset) -> None:
    with pytest.raises(
        ValueError, match=r"unknown settings drop_out \(meant: dropout\?\); there are vocab_size, .*seed"
    ):
        preset.changed({"drop_out": 0.1})
    with pytest.raises(ValueError, match="dropout is 'much', and must be a number"):
        preset.changed({"dropout": "much"})
