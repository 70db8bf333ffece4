"""The terms of adapters on CUDA: ONNX Runtime captures the operator, and its definition."""

import pytest

from tests.cuda_stub.log import Copy
from tests.kernels.test_adapters import PARTS_BEFORE, UNITS_AFTER, UNITS_BEFORE, low_rank_of, parts_of

pytestmark = pytest.mark.cuda_stub


@pytest.mark.parametrize("has_kernels", [True, False])
def test_terms_of_adapters_are_captured(has_kernels, stub, tmp_path):
    N, width, widths, K, R = 4, 64, (64, 32), 3, 8
    path = tmp_path / "low_rank.onnx"
    path.write_bytes(low_rank_of(parts_of(widths), width, on_cuda=True))
    num_units = UNITS_BEFORE + len(widths) * width + sum(widths) + UNITS_AFTER
    sizes = N, width, sum(widths), K, R, num_units, PARTS_BEFORE + len(widths)
    program = "tests.cuda_stub.programs.adapters", path, has_kernels, *sizes
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
        # Five inputs and an output; the operator reads the parts on the host.
        assert finished.log.whole.copies == {Copy("H2D", is_synchronous=True): 6}
