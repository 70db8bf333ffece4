"""Graphs of random models, as files with sessions over them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from seq2seq_serve.bundle.manifest import Bundle, Manifest, load_bundle
from seq2seq_serve.bundle.names import Precision, Verb
from seq2seq_serve.export import convert
from seq2seq_serve.export.exporter import export_bundle, make_graphs
from seq2seq_serve.export.graphs.base import Graph
from seq2seq_serve.export.graphs.families import make_modules
from seq2seq_serve.export.graphs.linear import FloatFactory
from seq2seq_serve.export.graphs.transformer import DecodeGraph
from seq2seq_serve.export.runtime import Graphs
from seq2seq_serve.training.run import TrainedModel


@dataclass(frozen=True)
class Exported:
    """One precision of a model: its modules, its files, and sessions over them.

    Attributes:
        folder: Holds the graphs and their weights.
    """

    trained: TrainedModel
    modules: dict[Verb, Graph]
    folder: Path
    graphs: Graphs

    @property
    def decode(self) -> DecodeGraph:
        graph = self.modules[Verb.DECODE]
        assert isinstance(graph, DecodeGraph)
        return graph


def _exported(trained: TrainedModel, precision: Precision, folder: Path) -> Exported:
    return _over(trained, make_graphs(trained, precision), folder)


def _over(trained: TrainedModel, modules: dict[Verb, Graph], folder: Path) -> Exported:
    """The modules with sessions over the files that they were converted to."""
    paths = {verb: folder / f"{verb}.onnx" for verb in Verb}
    return Exported(trained, modules, folder, Graphs(paths, modules, "CPUExecutionProvider"))


def _save(modules: dict[Verb, Graph], folder: Path) -> None:
    convert.save({verb: convert.convert(module) for verb, module in modules.items()}, folder)


@pytest.fixture(scope="session")
def post_fp32(random_trained: TrainedModel, bundle_path: Path) -> Exported:
    return _exported(random_trained, Precision.FP32, bundle_path / "fp32")


@pytest.fixture(scope="session")
def post_int8(random_trained: TrainedModel, bundle_path: Path) -> Exported:
    return _exported(random_trained, Precision.INT8, bundle_path / "int8")


@pytest.fixture(scope="session")
def post_int4(random_trained: TrainedModel, bundle_path: Path) -> Exported:
    return _exported(random_trained, Precision.INT4, bundle_path / "int4")


@pytest.fixture(scope="session")
def pre_fp32(trained_run) -> Exported:
    return _exported(trained_run.trained, Precision.FP32, trained_run.bundle / "fp32")


@pytest.fixture(scope="session")
def post_fused(random_trained: TrainedModel, fused_bundle: Bundle) -> Exported:
    """Graphs in the form that they have for CUDA, in float32, which the CPU computes exactly enough."""
    modules = make_modules(random_trained.model, FloatFactory(torch.float32, is_fused=True))
    return _over(random_trained, modules, fused_bundle.path / "fp32")


@pytest.fixture(scope="session")
def pre_fused(random_pre_norm: TrainedModel, made_once) -> Exported:
    modules = make_modules(random_pre_norm.model, FloatFactory(torch.float32, is_fused=True))
    folder = made_once("pre-fused", lambda folder: _save(modules, folder))
    return _over(random_pre_norm, modules, folder)


@pytest.fixture
def exported(request: pytest.FixtureRequest) -> Exported:
    """The fixture that the parameter names."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def fp16_manifest(one_layer_trained: TrainedModel, made_once) -> tuple[Path, Manifest]:
    """A bundle for CUDA, and its manifest."""
    make = lambda folder: export_bundle(one_layer_trained, folder / "bundle", [Precision.FP16])  # noqa: E731
    path = made_once("fp16", make) / "bundle"
    return path, load_bundle(path).manifest


@pytest.fixture
def told() -> tuple[list[str], Callable[[str], None]]:
    lines: list[str] = []
    return lines, lines.append
