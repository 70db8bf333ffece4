"""Graphs of random models, as files with sessions over them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from bundle.manifest import Manifest
from bundle.names import Precision, Verb
from export import convert
from export.exporter import export_bundle, make_graphs
from export.graphs import DecodeGraph, Graph
from export.runtime import Graphs
from training.run import TrainedModel


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
    modules = make_graphs(trained, precision)
    paths = {verb: folder / f"{verb}.onnx" for verb in Verb}
    return Exported(trained, modules, folder, Graphs(paths, modules, "CPUExecutionProvider"))


@pytest.fixture(scope="session")
def post_fp32(random_trained: TrainedModel, bundle_path: Path) -> Exported:
    return _exported(random_trained, Precision.FP32, bundle_path / "fp32")


@pytest.fixture(scope="session")
def post_int8(random_trained: TrainedModel, bundle_path: Path) -> Exported:
    return _exported(random_trained, Precision.INT8, bundle_path / "int8")


def _converted(trained: TrainedModel, precision: Precision, folder: Path) -> Exported:
    modules = make_graphs(trained, precision)
    convert.save({verb: convert.convert(module) for verb, module in modules.items()}, folder)
    return _exported(trained, precision, folder)


@pytest.fixture(scope="session")
def pre_fp32(random_pre_norm: TrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return _converted(random_pre_norm, Precision.FP32, tmp_path_factory.mktemp("pre-norm"))


@pytest.fixture(scope="session")
def target_tied_fp32(random_target_tied: TrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return _converted(random_target_tied, Precision.FP32, tmp_path_factory.mktemp("target-tied"))


@pytest.fixture(scope="session")
def untied_fp32(random_untied: TrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return _converted(random_untied, Precision.FP32, tmp_path_factory.mktemp("untied"))


@pytest.fixture(scope="session")
def untied_int8(random_untied: TrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return _converted(random_untied, Precision.INT8, tmp_path_factory.mktemp("untied-int8"))


@pytest.fixture
def exported(request: pytest.FixtureRequest) -> Exported:
    """The fixture that the parameter names."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def fp16_manifest(
    one_layer_trained: TrainedModel, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Manifest]:
    """A bundle for CUDA, and its manifest."""
    path = tmp_path_factory.mktemp("fp16") / "bundle"
    return path, export_bundle(one_layer_trained, path, [Precision.FP16])


@pytest.fixture
def told() -> tuple[list[str], Callable[[str], None]]:
    lines: list[str] = []
    return lines, lines.append
