import dataclasses
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from seq2seq_serve.training.config import ModelConfig, TransformerConfig
from seq2seq_serve.training.data.corpus import Corpus
from seq2seq_serve.training.models.base import EncoderDecoder, Memory, State
from seq2seq_serve.training.models.recurrent import Recurrent
from seq2seq_serve.training.models.registry import (
    FAMILIES,
    Family,
    config_from_json,
    config_to_json,
    kind_of,
    make_model,
)
from seq2seq_serve.training.prepare import continue_run, start_run
from seq2seq_serve.training.presets import PRESETS, Preset, preset_named
from seq2seq_serve.training.reports.attention_maps import alignment, encoder_self_attention
from seq2seq_serve.training.run import RunFolder, load_run


@dataclasses.dataclass(frozen=True)
class ToyConfig(ModelConfig):
    """A family of a test: a table of word pairs that knows which words the source has."""


class Toy(EncoderDecoder):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.layer = nn.Linear(2 * config.d_model, config.d_model)
        self._initialise_embeddings()

    def encode(self, source_ids: Tensor, source_mask: Tensor) -> Memory:
        words = self._look_up(source_ids, self.source_weight) * source_mask[:, :, None]
        return (words.sum(dim=1),)  # (B, D)

    def decode_states(self, target_ids: Tensor, memory: Memory, source_mask: Tensor) -> Tensor:
        words = self._look_up(target_ids, self.embedding.weight)  # (B, T, D)
        source = memory[0][:, None].expand_as(words)
        return self.layer(torch.cat([words, source], dim=-1)).tanh()

    def decode_with_attention(
        self, target_ids: Tensor, memory: Memory, source_mask: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        return self.decode(target_ids, memory, source_mask), []

    def alignment(self, weights: list[Tensor]) -> None:
        return None

    def start(self, memory: Memory, source_mask: Tensor) -> State:
        return ()

    def step(
        self, token_ids: Tensor, state: State, memory: Memory, source_mask: Tensor
    ) -> tuple[Tensor, State]:
        return self.decode_states(token_ids[:, None], memory, source_mask)[:, 0], ()


@pytest.fixture
def toy(preset: Preset, monkeypatch: pytest.MonkeyPatch) -> Preset:
    monkeypatch.setitem(FAMILIES, "toy", Family(ToyConfig, Toy))
    model = ToyConfig(300, 32, max_source_length=24, max_target_length=24)
    return dataclasses.replace(preset, model=model)


def test_a_family_of_ones_own_is_trained_and_loaded(
    toy: Preset, corpus: Corpus, console: Console, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    start_run(folder, toy, corpus)
    assert json.loads(folder.config_file.read_text())["model"]["kind"] == "toy"
    continue_run(folder, corpus, torch.device("cpu"), console)
    losses = [line["loss"] for line in folder.read_metrics() if line["kind"] == "dev"]
    assert losses[-1] < losses[0]
    run = load_run(folder.path)
    assert isinstance(run.model, Toy)
    assert isinstance(run.config, ToyConfig)
    with pytest.raises(ValueError, match="this model has no attention"):
        alignment(run, [5, 2], [6])
    with pytest.raises(ValueError, match="this model's encoder has no self-attention"):
        encoder_self_attention(run, [5, 2])


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_json_and_is_built(name: str) -> None:
    config = preset_named(name).model
    content = json.loads(json.dumps(config_to_json(config)))
    assert config_from_json(content) == config
    with torch.device("meta"):
        model = make_model(config)
    assert type(model) is FAMILIES[content["kind"]].model
    if isinstance(model, Recurrent):
        assert sum(weight.numel() for weight in model.parameters()) < 8_000_000


def test_a_config_without_a_kind_is_a_transformers(model_config: TransformerConfig) -> None:
    assert kind_of(model_config) == "transformer"
    assert config_from_json(model_config.to_json()) == model_config


def test_an_unknown_kind_is_refused_with_those_that_exist(model_config: TransformerConfig) -> None:
    with pytest.raises(ValueError, match="unknown kind of model 'rnn'; there are transformer, recurrent"):
        config_from_json(model_config.to_json() | {"kind": "rnn"})
    with pytest.raises(ValueError, match="the model must be a JSON object, not list"):
        config_from_json([])
