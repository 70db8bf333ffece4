"""A family that this file adds, as CONTRIBUTING describes it, is exported, proved and served."""

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.manifest import TensorSpec, load_bundle
from seq2seq_serve.bundle.names import SOURCE_IDS, Axis, Precision, Role, Verb
from seq2seq_serve.export.exporter import export_bundle
from seq2seq_serve.export.graphs import families
from seq2seq_serve.export.graphs.base import Embedding, Graph, Projection, outs, source_specs, token_specs
from seq2seq_serve.export.graphs.linear import LinearFactory
from seq2seq_serve.server.config import RunnerConfig
from seq2seq_serve.server.engine.request import Beam, Request
from seq2seq_serve.server.runner.runner import OnnxRunner
from seq2seq_serve.training.config import BOS_ID, EOS_ID, ModelConfig
from seq2seq_serve.training.evaluation.search import beam_search
from seq2seq_serve.training.models import registry
from seq2seq_serve.training.models.base import EncoderDecoder
from tests.models import random_model
from tests.server.driver import Driver


@dataclass(frozen=True)
class MeanConfig(ModelConfig):
    """Sizes that every family has are enough."""


class Mean(EncoderDecoder):
    """o_t = tanh(m + s_t), s_t = s_{t-1} / 2 + y_{t-1}; m, the memory, is the mean of the source."""

    def __init__(self, config: MeanConfig) -> None:
        super().__init__(config)
        self._initialise_embeddings()

    def encode(self, source_ids: Tensor, source_mask: Tensor) -> tuple[Tensor, ...]:
        words = self._look_up(source_ids, self.source_weight) * source_mask[:, :, None]
        return (words.sum(dim=1) / source_mask.sum(dim=1, keepdim=True),)

    def start(self, memory: tuple[Tensor, ...], source_mask: Tensor) -> tuple[Tensor, ...]:
        return (torch.zeros_like(memory[0]),)

    def step(self, token_ids, state, memory, source_mask):
        s = state[0] / 2 + self._look_up(token_ids, self.embedding.weight)
        return torch.tanh(memory[0] + s), (s,)

    def decode_states(self, target_ids: Tensor, memory: tuple[Tensor, ...], source_mask: Tensor) -> Tensor:
        state, all_states = self.start(memory, source_mask), []
        for token_ids in target_ids.unbind(dim=1):
            states, state = self.step(token_ids, state, memory, source_mask)
            all_states.append(states)
        return torch.stack(all_states, dim=1)

    def decode_with_attention(self, target_ids, memory, source_mask):
        return self.decode(target_ids, memory, source_mask), []

    def alignment(self, weights):
        return None


class Encode(Graph):
    def __init__(self, model: Mean, linear) -> None:
        super().__init__()
        self.embedding = Embedding(model.source_weight, linear)
        self.inputs = source_specs()
        self.outputs = (MEMORY, *outs([STATE]))

    def forward(self, source_ids: Tensor, source_lengths: Tensor) -> tuple[Tensor, ...]:
        is_word = torch.arange(source_ids.shape[1]) < source_lengths[:, None]
        total = (self.embedding(source_ids) * is_word[:, :, None]).sum(dim=1)
        return total / source_lengths[:, None], torch.zeros_like(total)


class Step(Graph):
    def __init__(self, model: Mean, linear) -> None:
        super().__init__()
        self.embedding = Embedding(model.embedding.weight, linear)
        self.projection = Projection.of(model, linear)
        self.inputs = (*token_specs(), MEMORY, STATE)
        axes = (Axis.BATCH, model.config.vocab_size)
        self.outputs = (TensorSpec(names.LOGITS, "float32", axes, Role.LOGITS), *outs([STATE]))

    def forward(self, token_ids: Tensor, memory: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        state = state / 2 + self.embedding(token_ids)
        return self.projection(torch.tanh(memory + state), self.embedding), state


D = 16
MEMORY = TensorSpec(names.memory("mean"), "float32", (Axis.BATCH, D), Role.MEMORY)
STATE = TensorSpec(names.state("s"), "float32", (Axis.BATCH, D), Role.STATE)


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.FAMILIES, "mean", registry.Family(MeanConfig, Mean))

    def make_graphs(model: Mean, linear: LinearFactory) -> dict[Verb, Graph]:
        return {Verb.ENCODE: Encode(model, linear), Verb.STEP: Step(model, linear)}

    monkeypatch.setitem(families.FAMILIES, "mean", make_graphs)


@pytest.mark.usefixtures("_registered")
def test_a_new_family_is_exported_and_served_with_the_oracles_answers(tmp_path):
    trained = random_model(MeanConfig, {"d_model": D})
    export_bundle(trained, tmp_path / "bundle", [Precision.FP32])
    bundle = load_bundle(tmp_path / "bundle")
    assert (bundle.manifest.kind, bundle.manifest.sizes["d_model"]) == ("mean", D)
    config = RunnerConfig(provider="cpu", num_threads=1, max_slots=7)
    driver = Driver(OnnxRunner(bundle, config))
    chance = random.Random(0)
    requests = []
    for size in (1, 2, 4, 1, 3):
        source = np.array(chance.choices(range(4, trained.config.vocab_size), k=chance.randint(1, 9)))
        beam = Beam(size, alpha=0.6) if size > 1 else None
        requests.append(Request("r", {SOURCE_IDS: source}, len(source), 12, 0.0, beam=beam))
    driver.submit(*requests)
    driver.finish()
    for request in requests:
        size = request.beam.size if request.beam else 1
        [expected, *_] = beam_search(
            trained.model,
            request.sources[SOURCE_IDS].tolist(),
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            beam_size=size,
            alpha=0.6 if request.beam else 0.0,
            max_new_tokens=12,
        )
        assert list(driver.results[request].best.token_ids) == expected.token_ids
        assert expected.token_ids


def test_no_file_of_the_server_names_a_family():
    for path in (Path(__file__).parent.parent / "server").rglob("*.py"):
        text = path.read_text(encoding="utf-8").lower()
        assert not [name for name in registry.FAMILIES if name in text], path
