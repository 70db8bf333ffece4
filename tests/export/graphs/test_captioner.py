"""The graphs of captioners in ONNX Runtime against torch, at sizes that the export never used."""

from pathlib import Path

import pytest
import torch

from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.names import Role, Verb
from seq2seq_serve.export import convert, parity
from seq2seq_serve.export.graphs.families import make_modules
from seq2seq_serve.export.graphs.linear import FloatFactory, LinearFactory, QuantizedFactory
from seq2seq_serve.export.runtime import Graphs
from seq2seq_serve.training.models.captioner import Captioner
from tests.training.models.test_captioner import CONFIGS, make

FP32, FP16 = FloatFactory(torch.float32), FloatFactory(torch.float16, is_fused=True)
INT8 = QuantizedFactory(8)
SHAPES = ((1, 1, 1), (1, 8, 6), (4, 5, 3))


def graphs_of(model: Captioner, linear: LinearFactory, folder: Path) -> Graphs:
    modules = make_modules(model, linear)
    paths = convert.save({verb: convert.convert(module) for verb, module in modules.items()}, folder)
    return Graphs(paths, modules, "CPUExecutionProvider", model.source_kind)


def test_the_graphs_of_hard_attention_compute_what_torch_computes(tmp_path: Path) -> None:
    """Other sources and attentions are exported, and so compared, in tests/server/test_every_source.py."""
    model = make(CONFIGS["features"], attention="hard")
    assert parity.worst_difference(model, graphs_of(model, FP32, tmp_path), SHAPES) <= 1e-4


@pytest.mark.slow  # the maps are those of Transformers and recurrent models
@pytest.mark.parametrize(("linear", "tolerance"), [(FP16, 0.1), (INT8, 0.05)])  # measured 0.016 in int8
def test_other_precisions_stay_close(linear: LinearFactory, tolerance: float, tmp_path: Path) -> None:
    model = make(CONFIGS["features"])
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    graphs = graphs_of(model, linear, tmp_path)
    assert parity.worst_difference(model, graphs, SHAPES) <= tolerance
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_the_form_for_cuda_feeds_the_most_probable_token_to_the_next_step() -> None:
    step = make_modules(make(CONFIGS["picture"]), FP16)[Verb.STEP]
    assert names.out(names.TOKEN_IDS) in [spec.name for spec in step.outputs]
    plain = make_modules(make(CONFIGS["picture"]), FP32)[Verb.STEP]
    assert names.out(names.TOKEN_IDS) not in [spec.name for spec in plain.outputs]


def test_the_network_stays_in_float32_and_the_memory_has_the_precision() -> None:
    encode = make_modules(make(CONFIGS["clip"]), FP16)[Verb.ENCODE]
    assert {spec.dtype for spec in encode.outputs} == {"float16"}
    assert {weight.dtype for name, weight in encode.named_parameters() if "annotate" in name} == {
        torch.float32
    }


def test_the_memory_of_a_model_without_attention_is_one_vector() -> None:
    graphs = make_modules(make(CONFIGS["clip"], attention="mean"), FP32)
    memory = [spec for spec in graphs[Verb.STEP].inputs if spec.role is Role.MEMORY]
    assert [spec.axes[1:] for spec in memory] == [(CONFIGS["clip"].d_annotation,)]
    assert names.LAST_SOURCE_POSITIONS not in [spec.name for spec in graphs[Verb.STEP].inputs]
    assert names.ATTENTION not in [spec.name for spec in graphs[Verb.STEP].outputs]
