"""The page on training says of presets and settings what the code has."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from seq2seq_serve.training.config import TrainingConfig
from seq2seq_serve.training.data.sources import TOKENS
from seq2seq_serve.training.models.captioner import CaptionerConfig
from seq2seq_serve.training.models.memory_network import MemoryNetworkConfig
from seq2seq_serve.training.models.recurrent import RecurrentConfig
from seq2seq_serve.training.models.registry import make_model, source_kind_of
from seq2seq_serve.training.presets import PRESETS

TEXT = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")


ATTENTIONS = {
    "none": "none",
    "dot": "dot (Luong et al. 2015)",
    "additive": "additive (Bahdanau et al. 2015)",
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_as_its_row_says(name):
    preset = PRESETS[name]()
    model, training = preset.model, preset.training
    with torch.device("meta"):
        num_parameters = sum(weight.numel() for weight in make_model(model).parameters())
    size = f"{num_parameters / 1e6:.1f} M"
    if isinstance(model, CaptionerConfig | MemoryNetworkConfig):
        sizes = [size, f"{model.d_model}", f"{model.vocab_size:,}"]
        sizes += [f"{model.max_source_length}", f"{model.max_target_length}"]
    elif isinstance(model, RecurrentConfig):
        layers = f"{model.num_encoder_layers}+{model.num_decoder_layers}"
        assert (model.cell, model.is_bidirectional) == ("gru", True)
        sizes = [ATTENTIONS[model.attention], size, layers, f"{model.d_model}", f"{model.d_hidden}"]
        sizes += [f"{model.vocab_size:,}"]
    else:
        layers = f"{model.num_encoder_layers}+{model.num_decoder_layers}"
        sizes = [size, layers, f"{model.d_model:,}", f"{model.d_ff:,}", f"{model.num_heads}"]
        sizes += [f"{model.vocab_size:,}", model.norm]
    # Other sources than texts have no BPE dropout.
    bpe_dropout = [f"{training.bpe_dropout:g}"] if source_kind_of(model) is TOKENS else []
    cells = [
        f"`{name}`",
        *sizes,
        f"{model.dropout:g}",
        *bpe_dropout,
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
    assert re.search(rf"^\| .*`{name}`.* \| {re.escape(' | '.join(schedule))} \|$", TEXT, re.MULTILINE)
    # What the two tables leave out is the default, or told beside them.
    told = {
        "demo": {"max_length_ratio"},
        "captioner": {"max_length_ratio"},
        "clip-captioner": {"max_length_ratio"},
        "memory-network": {"max_length_ratio", "label_smoothing", "mixes_lengths"},
        "memory-network-babi": {"max_length_ratio", "label_smoothing", "mixes_lengths", "patience"},
    }.get(name, set())
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
