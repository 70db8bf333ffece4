"""A conversion is read from its file only where it would be made again exactly so."""

from pathlib import Path

import onnx_ir as ir
import pytest

from seq2seq_serve.bundle.names import Precision, Verb
from seq2seq_serve.export.exporter import make_graphs
from seq2seq_serve.export.graphs.base import Graph
from seq2seq_serve.training.run import TrainedModel
from tests.conversions import Conversions


class Traced:
    """Stands in for the tracing of a graph: its model has one weight, the number of graphs traced so far."""

    num_graphs = 0

    def __call__(self, graph: Graph) -> ir.Model:
        self.num_graphs += 1
        weight = ir.Value(name="weight", const_value=ir.tensor([self.num_graphs]))
        content = ir.Graph([], [weight], nodes=[], initializers=[weight], opset_imports={"": 24})
        return ir.Model(content, ir_version=10)


@pytest.fixture
def traced() -> Traced:
    return Traced()


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "code.py").write_text("a = 1")
    return folder


@pytest.fixture
def kept(tmp_path: Path, traced: Traced, sources: Path):
    """Conversions in one folder, as a process has them that starts now."""
    return lambda: Conversions(tmp_path / "converted", traced, [sources])


def graph_of(trained: TrainedModel, precision: Precision = Precision.FP32) -> Graph:
    return make_graphs(trained, precision)[Verb.ENCODE]


def number_of(model: ir.Model) -> int:
    return model.graph.initializers["weight"].const_value.numpy().item()


def test_an_equal_graph_is_traced_once(kept, one_layer_trained):
    first = kept()
    assert [number_of(first.convert(graph_of(one_layer_trained))) for _ in range(2)] == [1, 1]
    assert number_of(kept().convert(graph_of(one_layer_trained))) == 1


def test_a_changed_or_new_source_file_makes_all_graphs_again(kept, sources, one_layer_trained):
    graph = graph_of(one_layer_trained)
    assert number_of(kept().convert(graph)) == 1
    (sources / "code.py").write_text("a = 2")
    assert number_of(kept().convert(graph)) == 2
    (sources / "more.py").write_text("")
    assert number_of(kept().convert(graph)) == 3
    (sources / "more.py").unlink()
    assert number_of(kept().convert(graph)) == 2


def test_a_half_written_file_is_never_read(kept, tmp_path, one_layer_trained, monkeypatch):
    def half(model: ir.Model, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ir, "save", half)
        with pytest.raises(KeyboardInterrupt):
            kept().convert(graph_of(one_layer_trained))
    assert [file.read_bytes() for file in (tmp_path / "converted").iterdir()] == [b"half"]
    assert number_of(kept().convert(graph_of(one_layer_trained))) == 2
    assert number_of(kept().convert(graph_of(one_layer_trained))) == 2
