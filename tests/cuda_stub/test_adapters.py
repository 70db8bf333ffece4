"""The terms of adapters on CUDA: ONNX Runtime captures the operator, and its definition."""

import json

import pytest

from benchmarks.gpu_check.steps import step_kernels
from seq2seq_serve.bundle.names import Precision
from tests.cuda_stub.log import Copy
from tests.cuda_stub.programs.common import NUM_SLOTS
from tests.kernels.test_adapters import PARTS_BEFORE, UNITS_AFTER, UNITS_BEFORE, low_rank_of, parts_of

pytestmark = pytest.mark.cuda_stub
MAPS_OF_A_LAYER = 6


def test_a_step_of_rows_with_adapters_is_one_captured_graph(stub, adapted_cuda_bundle, tmp_path):
    """The terms of a map are one kernel; and biases that norms added are added by the maps again."""
    program = "-m", "tests.cuda_stub.programs.paths", str(adapted_cuda_bundle), Precision.FP16
    finished = stub.run(tmp_path / "log", *program)
    assert finished.log.whole.errors == []
    assert finished.stdout == "captured\n"
    steady = finished.log["steady_step"]
    [num_nodes] = steady.graph_launches
    assert steady.launches == {}
    assert steady.num_allocations == 0
    num_maps = 2 * MAPS_OF_A_LAYER
    num_activations = 2  # they follow the terms
    assert num_nodes == step_kernels(num_decoder_layers=2, num_rows=NUM_SLOTS) + num_maps + num_activations
    written = finished.log["write_adapter"]
    assert written.captures == []
    [encoded] = written.graph_launches  # the encode call with adapters is a captured one, too
    assert encoded > 30


@pytest.mark.parametrize("has_kernels", [True, False])
def test_terms_of_adapters_are_captured(has_kernels, stub, tmp_path):
    N, width, widths, K, R = 4, 64, (64, 32), 3, 8
    path = tmp_path / "low_rank.onnx"
    path.write_bytes(low_rank_of(parts_of(widths), width, on_cuda=True))
    num_units = UNITS_BEFORE + len(widths) * width + sum(widths) + UNITS_AFTER
    feeds = {
        "x": ("float16", (N, width)),
        "y": ("float16", (N, sum(widths))),
        "adapters": ("float16", (K, R * num_units)),
        "ranks": ("int32", (K, PARTS_BEFORE + len(widths))),
        "adapter_ids": ("int64", (N,)),
    }
    program = "tests.cuda_stub.programs.operator", path, has_kernels, json.dumps(feeds)
    finished = stub.run(tmp_path / "log", "-m", *map(str, program))
    assert finished.log.whole.errors == []
    again = finished.log["again"]
    [num_nodes] = again.graph_launches
    assert not again.launches
    assert not again.copies
    assert again.num_allocations == 0
    if has_kernels:
        assert num_nodes == 1
        assert finished.log.whole.captured_launches == {"low_rank_float16": 1}
        # The operator reads the parts on the host.
        assert finished.log.whole.copies == {Copy("H2D", is_synchronous=True): len(feeds)}
