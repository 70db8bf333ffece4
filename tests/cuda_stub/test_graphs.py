"""Which provider runs the nodes of the graphs, and what graphs cost."""

import json
from pathlib import Path

import pytest

from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.export.graphs import weightless

pytestmark = pytest.mark.cuda_stub

# Small integers, such as shapes, belong on the CPU; their graphs are not captured.
ELSEWHERE = {
    "encode": ["Concat"],
    "decode": ["Add", "Cast", "Concat", "Expand", "MemcpyFromHost", "Squeeze", "Sub"],
    "sample": ["Concat", "Mod", "Neg"],
    "sample_sorted": ["Squeeze"],
    "times": ["Squeeze"],
}
# That of voice activity always runs on the CPU.
WEIGHTLESS = [path for path in sorted(weightless.FOLDER.glob("*.onnx")) if path.stem != "voice_activity"]
MAX_TOP_P_LAUNCHES = 40  # 546 where all tokens are sorted


@pytest.fixture(scope="module")
def not_on_cuda(stub, cuda_bundle, tmp_path_factory) -> dict[Path, list[str]]:
    graphs = [*WEIGHTLESS, *cuda_bundle.rglob("*.onnx")]
    log = tmp_path_factory.mktemp("placement") / "log"
    finished = stub.run(log, "-m", "tests.cuda_stub.programs.placement", *map(str, graphs))
    return {Path(path): operators for path, operators in json.loads(finished.stdout).items()}


@pytest.mark.parametrize("graph", WEIGHTLESS, ids=lambda graph: graph.stem)
def test_a_weightless_graph_runs_on_cuda(graph, not_on_cuda):
    assert not_on_cuda[graph] == ELSEWHERE.get(graph.stem, [])


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16])
@pytest.mark.parametrize("verb", ["encode", "step", "decode"])
def test_a_graph_of_the_model_runs_on_cuda(verb, precision, not_on_cuda, cuda_bundle):
    assert not_on_cuda[cuda_bundle / precision / f"{verb}.onnx"] == ELSEWHERE.get(verb, [])


def test_a_draw_by_top_p_does_not_sort_row_by_row(stub, tmp_path):
    finished = stub.run(tmp_path / "log", "-m", "tests.cuda_stub.programs.top_p")
    assert 0 < finished.log["again"].launches.total() <= MAX_TOP_P_LAUNCHES
    assert finished.log.whole.errors == []
