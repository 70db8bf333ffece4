"""The runner's calls of CUDA: it replays captured steps, and creates nothing while it serves."""

import json
from collections import Counter

import pytest

from benchmarks.gpu_check.steps import step_kernels
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.server.runner.runner import buckets_up_to
from tests.cuda_stub.log import Copy
from tests.cuda_stub.programs.common import NUM_SLOTS
from tests.cuda_stub.programs.paths import PATHS
from tests.cuda_stub.run import Finished
from tests.kernels.test_operators import FLOAT16, model_of, values_of

pytestmark = pytest.mark.cuda_stub

# What a greedy step of the model of these tests costs.
STEP_NODES = step_kernels(num_decoder_layers=2, num_rows=NUM_SLOTS)
FIRST_STEP_COPIES = Counter({Copy("H2D", is_synchronous=True): 3, Copy("D2H", is_synchronous=True): 1})
STEADY_STEP_COPIES = Counter({Copy("D2H", is_synchronous=True): 1})  # the selected tokens
STEADY_STEP_SYNCHRONISATIONS = Counter(stream=1)


@pytest.fixture(scope="module", params=[Precision.FP16, Precision.BF16])
def finished(request, stub, cuda_bundle, tmp_path_factory) -> Finished:
    log = tmp_path_factory.mktemp("steps") / "log"
    return stub.run(log, "-m", "tests.cuda_stub.programs.paths", str(cuda_bundle), request.param)


def test_every_path_is_legal(finished):
    assert finished.log.whole.errors == []


def test_warm_up_captures_every_shape_of_an_encode_call_and_a_step_of_every_bucket(finished):
    num_steps = len(buckets_up_to(NUM_SLOTS))
    captures = finished.log["warm_up"].captures
    assert captures[-num_steps:] == [STEP_NODES] * num_steps
    # 1 to 8 rows, which are all slots, of 16 to 128 tokens
    assert len(captures[:-num_steps]) == 4 * 4


@pytest.mark.parametrize("path", ["encode", "encode_longer"])
def test_an_encode_call_launches_one_graph_and_copies_what_it_wrote(path, finished):
    section = finished.log[path]
    [nodes] = section.graph_launches
    assert nodes > 30
    assert section.launches == {"move": 2}  # keys and values of all positions, and of the last one
    assert section.copies == {Copy("H2D", is_synchronous=True): 2}  # the tokens and the lengths
    assert section.num_allocations == 0
    assert finished.stdout == "captured\n"


def test_a_steady_step_launches_one_graph_and_reads_the_tokens(finished):
    step = finished.log["steady_step"]
    assert step.graph_launches == [STEP_NODES]
    assert step.launches == {}
    assert step.copies == STEADY_STEP_COPIES
    assert step.synchronisations == STEADY_STEP_SYNCHRONISATIONS
    assert step.num_allocations == 0


def test_a_step_of_new_rows_also_writes_their_tokens_and_source_lengths(finished):
    step = finished.log["first_step"]
    assert step.graph_launches == [STEP_NODES]
    assert step.launches == {}
    assert step.copies == FIRST_STEP_COPIES


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16])
def test_without_the_projects_own_operators_their_definitions_are_captured(
    precision, stub, cuda_bundle, tmp_path
):
    arguments = str(cuda_bundle), precision, "definitions"
    done = stub.run(tmp_path / "log", "-m", "tests.cuda_stub.programs.paths", *arguments)
    assert done.stdout == "captured\n"
    assert done.log.whole.errors == []
    step = done.log["steady_step"]
    # The choice of a token takes four kernels more, and embeddings three; maps are as for many rows.
    assert step.graph_launches == [step_kernels(num_decoder_layers=2, num_rows=17) + 7]
    assert step.copies == STEADY_STEP_COPIES


def test_an_encode_call_of_another_shape_is_neither_captured_nor_replayed(finished):
    section = finished.log["encode_uncaptured"]
    assert (section.graph_launches, section.captures) == ([], [])
    assert section.launches.total() > 30


def test_moves_are_one_kernel_for_each_kind_of_tensor(finished):
    move = finished.log["move"]
    assert move.launches == {"move": 3}
    assert move.copies == {}
    assert move.num_allocations == 0


def test_nothing_is_captured_after_warm_up(finished):
    assert len(finished.log.whole.captures) == len(finished.log["warm_up"].captures)


@pytest.mark.parametrize("path", [path.__name__ for path in PATHS])
def test_no_path_creates_streams_or_handles_while_it_serves(path, finished):
    section = finished.log[path]
    assert (section.num_streams_created, section.num_handles_created) == (0, 0)


@pytest.mark.parametrize(
    ("num_rows", "name", "launches"),
    [
        (16, "CudaNormLinearRelu", {"norm_linear_float16": 1}),
        (17, "CudaRmsNormLinear", {"norm_float16": 1, "cublasGemmEx": 1}),
        (17, "CudaNormLinearRelu", {"norm_float16": 1, "cublasGemmEx": 1, "finish_float16": 1}),
    ],
)
def test_a_norm_and_its_map_are_one_kernel_for_few_rows(num_rows, name, launches, stub, tmp_path):
    width, num_outputs = 64, 32
    shapes = {"x": (num_rows, width), "residual": (num_rows, width), "weight": (width, num_outputs)}
    shapes |= {"scale": (width,), "shift": (width,)}
    if "Rms" in name:
        del shapes["shift"]
    inputs = values_of(dict.fromkeys(shapes, FLOAT16), shapes.values())
    outputs = dict.fromkeys(("output", "normalized", "total"), FLOAT16)
    path = tmp_path / "norm.onnx"
    path.write_bytes(model_of(name, inputs, {"epsilon": 1e-5}, outputs))
    feeds = json.dumps({name: ("float16", shape) for name, shape in shapes.items()})
    finished = stub.run(tmp_path / "log", "-m", "tests.cuda_stub.programs.operator", str(path), "True", feeds)
    assert finished.log.whole.errors == []
    assert finished.log.whole.captured_launches == launches
    assert finished.log["again"].graph_launches == [len(launches)]
