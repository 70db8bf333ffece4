"""Low-rank terms of adapters: one result on every processor, bit for bit, whatever rows are beside."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from seq2seq_serve import kernels
from seq2seq_serve.export.graphs.functions import DOMAIN
from tests.kernels.test_linear import numbers
from tests.kernels.test_operators import (
    FLOAT,
    FLOAT16,
    INT32,
    INT64,
    model_of,
    pytestmark,
    session_of,
    values_of,
)
from tests.kernels.test_products import isa

__all__ = ["isa", "pytestmark"]

# N rows   I inputs   O outputs   P parts   K adapters   R largest rank
K = 5
# N, I, widths of the parts, R: whole tiles, and more than a tile of rows, outputs or ranks
SIZES = [
    (1, 512, (512,), 16),
    (32, 512, (64, 128, 64), 8),
    (3, 8, (8,), 1),
    (9, 24, (24, 8, 40), 3),
    (40, 136, (7, 70), 5),
    (150, 64, (200,), 4),
    (5, 1, (1, 1, 1), 2),
]
# Other maps have weights before and after those of the map.
UNITS_BEFORE, UNITS_AFTER, PARTS_BEFORE = 3, 2, 2


def low_rank_of(
    parts, width, *, first_unit=UNITS_BEFORE, first_part=PARTS_BEFORE, num_units=None, on_cuda=False
):
    if num_units is None:
        num_units = UNITS_BEFORE + (int(max(parts)) + 1) * width + len(parts) + UNITS_AFTER
    numbers = FLOAT16 if on_cuda else FLOAT
    types = {"x": numbers, "y": numbers, "adapters": FLOAT16, "ranks": INT32, "adapter_ids": INT64}
    shapes = [["N", "I"], ["N", "O"], ["K", "W"], ["K", "P"], ["N"]]
    inputs = values_of(types, shapes)
    inputs.append(ir.val("parts", const_value=ir.tensor(np.array(parts, np.int64), name="parts")))
    attributes = {"first_unit": first_unit, "first_part": first_part, "num_units": num_units}
    return model_of("CudaLowRank" if on_cuda else "LowRank", inputs, attributes, {"output": numbers})


def parts_of(widths):
    return np.repeat(np.arange(len(widths)), widths)


def feeds_of(N, width, widths, R):
    """Random inputs; the first adapter changes all parts, the others those that chance chooses."""
    rng = np.random.default_rng(N + width)
    P, num_outputs = len(widths), sum(widths)
    ranks = rng.integers(0, R + 1, (K, P)).astype(np.int32)
    ranks[0], ranks[1] = R, 0
    weights = []
    for of_adapter in ranks:
        is_live = np.arange(R) < of_adapter[:, None]
        a = numbers(P, R, width) * is_live[:, :, None]
        b = numbers(R, num_outputs) * is_live[parts_of(widths)].T
        others = np.full(R * UNITS_BEFORE, np.nan), np.full(R * UNITS_AFTER, np.nan)
        weights.append(np.concatenate([others[0], a.ravel(), b.ravel(), others[1]]))
    return {
        "x": numbers(N, width),
        "y": numbers(N, num_outputs),
        "adapters": np.array(weights).astype(np.float16),
        "ranks": np.concatenate([np.full((K, PARTS_BEFORE), R + 1, np.int32), ranks], axis=1),
        "adapter_ids": rng.integers(-1, K, N) if N > 1 else np.zeros(1, np.int64),
    }


def expected_of(feeds, widths, R):
    """By the definition, in float64."""
    x, y = (feeds[name].astype(np.float64) for name in ("x", "y"))
    P, width, num_outputs = len(widths), x.shape[1], y.shape[1]
    for row, adapter in enumerate(feeds["adapter_ids"]):
        if adapter >= 0:
            weights = feeds["adapters"][adapter, R * UNITS_BEFORE :].astype(np.float64)
            a, b = np.split(weights, [P * R * width])
            reduced = a.reshape(P, R, width) @ x[row]
            b = b[: R * num_outputs].reshape(R, num_outputs)
            y[row] += (reduced[parts_of(widths)].T * b).sum(axis=0)
    return y


def session_for(widths, width, *, has_kernels=True):
    return session_of(low_rank_of(parts_of(widths), width), has_kernels=has_kernels)


def run(session, feeds):
    (output,) = session.run(None, feeds)
    return output


def bits(array):
    return array.view(np.uint32)


def tolerance(width, R):
    return 2e-6 * (width * R) ** 0.5 + 1e-6


@pytest.mark.parametrize(("N", "width", "widths", "R"), SIZES)
def test_kernel_and_definition_add_the_terms(N, width, widths, R, isa):
    feeds = feeds_of(N, width, widths, R)
    expected = expected_of(feeds, widths, R)
    for has_kernels in (True, False):
        output = run(session_for(widths, width, has_kernels=has_kernels), feeds)
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=tolerance(width, R))


@pytest.mark.parametrize(("N", "width", "widths", "R"), SIZES)
def test_a_row_has_the_same_bits_alone_and_on_every_processor(N, width, widths, R, isa, monkeypatch):
    feeds = feeds_of(N, width, widths, R)
    session = session_for(widths, width)
    output = run(session, feeds)
    for row in range(N):
        alone = {name: feeds[name][row : row + 1] for name in ("x", "y", "adapter_ids")}
        np.testing.assert_array_equal(bits(run(session, feeds | alone)[0]), bits(output[row]))
    monkeypatch.delenv("SEQ2SEQ_ISA")
    np.testing.assert_array_equal(bits(run(session_for(widths, width), feeds)), bits(output))


@pytest.mark.parametrize("adapter_ids", ["mixed", "one"])
def test_several_threads_compute_the_bits_of_one(adapter_ids):
    N, width, widths, R = 300, 512, (512, 512), 16
    feeds = feeds_of(N, width, widths, R)
    if adapter_ids == "one":
        feeds["adapter_ids"][:] = 0
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    assert kernels.register(options)
    model = low_rank_of(parts_of(widths), width)
    alone = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(bits(run(session_for(widths, width), feeds)), bits(run(alone, feeds)))


@pytest.mark.parametrize("has_kernels", [True, False])
def test_a_row_without_an_adapter_has_the_bits_of_y(has_kernels):
    N, width, widths, R = 6, 40, (24, 16), 4
    feeds = feeds_of(N, width, widths, R)
    feeds["adapter_ids"] = np.array([-1, 0, -1, 2, -1, 0])
    feeds["y"][[0, 1]] = -0.0
    feeds["y"][2, 3], feeds["x"][2, 5], feeds["x"][4] = np.nan, np.inf, np.nan
    output = run(session_for(widths, width, has_kernels=has_kernels), feeds)
    np.testing.assert_array_equal(bits(output[[0, 2, 4]]), bits(feeds["y"][[0, 2, 4]]))
    assert np.isfinite(output[[1, 3, 5]]).all()


@pytest.mark.parametrize("is_output", [True, False])
def test_outputs_that_others_read_are_kept(is_output):
    """The operator may write over y, but here two nodes read it, and it may be an output itself."""
    N, width, widths, R = 9, 40, (24, 16), 4
    feeds = feeds_of(N, width, widths, R)
    graph = ir.from_proto(onnx.load_from_string(low_rank_of(parts_of(widths), width)))
    [first] = graph.graph
    first.outputs[0].shape = ir.Shape(["N", "O"])
    for name in "second", "third":
        inputs = [first.inputs[0], first.outputs[0], *first.inputs[2:]]
        node = ir.node("LowRank", inputs, first.attributes, domain=DOMAIN, num_outputs=1)
        [output] = node.outputs
        output.name, output.type, output.shape = name, ir.TensorType(FLOAT), ir.Shape(["N", "O"])
        graph.graph.append(node)
        graph.graph.outputs.append(output)
    if not is_output:
        graph.graph.outputs.pop(0)
    outputs = session_of(ir.to_proto(graph).SerializeToString(), has_kernels=True).run(None, feeds)
    session = session_for(widths, width)
    once = run(session, feeds)
    if is_output:
        np.testing.assert_array_equal(bits(outputs.pop(0)), bits(once))
    for output in outputs:
        np.testing.assert_array_equal(bits(output), bits(run(session, feeds | {"y": once})))


def test_a_part_of_rank_0_has_the_bits_of_y():
    N, width, widths, R = 4, 40, (24, 16), 4
    feeds = feeds_of(N, width, widths, R)
    feeds["adapter_ids"][:] = 0
    feeds["ranks"][0, PARTS_BEFORE + 1] = 0
    feeds["y"][:] = -0.0
    output = run(session_for(widths, width), feeds)
    np.testing.assert_array_equal(bits(output[:, 24:]), bits(feeds["y"][:, 24:]))
    assert (output[:, :24] != 0).all()


@pytest.mark.parametrize("has_kernels", [True, False])
def test_nan_stays_in_its_row_and_its_adapter(has_kernels):
    """The definition needs finite weights."""
    N, width, widths, R = 9, 40, (24, 16), 4
    feeds = feeds_of(N, width, widths, R)
    feeds["adapter_ids"] = np.array([0, 2, 0, -1, 3, 3, 0, 2, 2])
    feeds["x"][2, 7] = np.nan
    feeds["ranks"][2, PARTS_BEFORE:] = R
    if has_kernels:
        feeds["adapters"][2] = np.nan
    isnan = np.isnan(run(session_for(widths, width, has_kernels=has_kernels), feeds))
    rows = [1, 2, 7, 8] if has_kernels else [2]
    assert isnan[rows].all()
    assert isnan.sum() == len(rows) * sum(widths)


@pytest.mark.parametrize("has_kernels", [True, False])
def test_no_rows_give_no_outputs(has_kernels):
    feeds = feeds_of(3, 40, (24, 16), 4)
    none = {name: feeds[name][:0] for name in ("x", "y", "adapter_ids")}
    output = run(session_for((24, 16), 40, has_kernels=has_kernels), feeds | none)
    assert output.shape == (0, 40)


def test_without_adapters_the_outputs_are_those_of_the_map():
    feeds = feeds_of(3, 40, (24, 16), 4)
    none = {"adapters": feeds["adapters"][:0], "ranks": feeds["ranks"][:0], "adapter_ids": np.full(3, -1)}
    output = run(session_for((24, 16), 40), feeds | none)
    np.testing.assert_array_equal(bits(output), bits(feeds["y"]))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"adapter_ids": np.array([0, K, 0])}, "adapter is not there"),
        ({"adapter_ids": np.array([0, -2, 0])}, "adapter is not there"),
        ({"adapter_ids": np.zeros(2, np.int64)}, "differ in number"),
        ({"x": numbers(2, 40)}, "differ in number"),
        ({"y": numbers(3, 39)}, "differ in number"),
        ({"x": numbers(3, 43)}, "among the units"),
        ({"ranks": np.full((K, 4), 5, np.int32)}, "rank must be from 0"),
        ({"ranks": np.full((K, 4), -1, np.int32)}, "rank must be from 0"),
        ({"ranks": np.zeros((K, 3), np.int32)}, "ranks differ in number"),
        ({"ranks": np.zeros((K + 1, 4), np.int32)}, "ranks differ in number"),
        ({"adapters": np.zeros((K, 4 * 125 + 1), np.float16)}, "multiple of the units"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(changed, message):
    feeds = feeds_of(3, 40, (24, 16), 4)
    with pytest.raises(Exception, match=message):
        run(session_for((24, 16), 40), feeds | changed)


def test_a_size_that_overflows_is_refused():
    """The inputs of 16 parts are 2^64, which 64 bits hold as 0."""
    widths = (1,) * 16
    none = {"x": np.empty((0, 2**60), np.float32), "y": numbers(0, 16), "adapter_ids": np.empty(0, np.int64)}
    with pytest.raises(Exception, match="among the units"):
        run(session_for(widths, 40), feeds_of(3, 40, widths, 4) | none)


@pytest.mark.parametrize(
    ("parts", "changed", "message"),
    [
        ([0, 1, 0], {}, "must be neighbours"),
        ([0, 2, 2], {}, "must be neighbours"),
        ([1, 1], {}, "begin with 0"),
        ([0, 0], {"first_unit": -1}, "among the units"),
        ([0, 0], {"first_unit": 2, "num_units": 2}, "among the units"),
        ([0, 0], {"first_part": -1}, "among the units"),
    ],
)
def test_maps_that_do_not_fit_are_refused(parts, changed, message):
    with pytest.raises(Exception, match=message):
        session_of(low_rank_of(parts, 8, **changed), has_kernels=True)
