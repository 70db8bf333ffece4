"""The products of int8 weights: one result on every processor, bit for bit, and that of the definition."""

import numpy as np
import onnx_ir as ir
import pytest

from seq2seq_serve import kernels
from tests.kernels.test_operators import (
    FLOAT,
    INT32,
    INT64,
    UINT8,
    model_of,
    pytestmark,
    session_of,
    values_of,
)

__all__ = ["pytestmark"]

SIZES = [
    (1, 2, 1),
    (1, 128, 96),
    (2, 40, 70),
    (5, 3, 40),
    (6, 64, 31),
    (7, 18, 33),
    (13, 513, 100),
    (300, 256, 512),
]


@pytest.fixture(params=kernels.INSTRUCTIONS)
def isa(request, monkeypatch):
    """One kind of instructions that this processor has."""
    monkeypatch.setenv("SEQ2SEQ_ISA", request.param)
    try:
        assert kernels.instructions() == request.param
    except ValueError:
        pytest.skip("this processor does not have them")
    return request.param


def linear_of(width, num_outputs, *, is_positive=False, added=None):
    """A map of levels, or with `added` the choice of tokens by it; and its constants."""
    rng = np.random.default_rng(width)
    constants = {
        "weight": rng.integers(1, 256, (width, num_outputs)).astype(np.uint8),
        "weight_scale": rng.uniform(0.001, 0.01, num_outputs).astype(np.float32),
        "bias": rng.standard_normal(num_outputs).astype(np.float32),
    } | ({} if added is None else {"added": added})
    half = num_outputs // 2
    for name in ("weight", "weight_scale", "bias"):  # every output has an equal one
        constants[name][..., half : 2 * half] = constants[name][..., :half]
    return graph_of(constants, is_positive=is_positive), constants


def graph_of(constants, *, is_positive=False, sums=None):
    inputs = values_of({"x": FLOAT}, [["N", "I"]])
    if sums is None:
        sums = (constants["weight"].astype(np.int32) - 128).sum(axis=0, dtype=np.int32)
    names = ["weight", "weight_scale", "weight_sum", "bias", "added"]
    for name in names[: 4 + ("added" in constants)]:
        array = (constants | {"weight_sum": sums})[name]
        inputs.append(ir.val(name, const_value=ir.tensor(array, name=name)))
    attributes = {"least_input": 0.0 if is_positive else -np.inf}
    if "added" not in constants:
        return model_of("QuantizedLinear", inputs, attributes, {"output": FLOAT})
    inputs += values_of({"num_candidates": INT64}, [[1]])
    outputs = {"logits": FLOAT, "token_ids": INT64, "log_probabilities": FLOAT}
    return model_of("QuantizedChoice", inputs, attributes, outputs)


def expected_of(x, constants, *, is_positive=False):
    """The outputs in the kernels' arithmetic: the products of levels are exact, and the last sum is fused."""
    counted = np.where(x < 0, np.float32(0), x) if is_positive else x
    low = np.minimum(counted.min(axis=1, keepdims=True), np.float32(0))
    high = np.maximum(counted.max(axis=1, keepdims=True), np.float32(0))
    span = np.maximum(high - low, np.float32(2.0**-100))
    per_unit = (np.float32(255) / span).astype(np.float64)
    zero_point = -np.rint(low * per_unit)
    levels = np.minimum(np.rint(counted * per_unit) + zero_point, 255)
    sums = (levels - zero_point).astype(np.int64) @ (constants["weight"].astype(np.int64) - 128)
    of_levels = sums.astype(np.float32) * (span / np.float32(255))
    fused = of_levels.astype(np.float64) * constants["weight_scale"] + constants["bias"]
    return fused.astype(np.float32)


def inputs_of(N, width):
    """Rows of many magnitudes, around and beside 0, one of zeros and one of tiny numbers."""
    rng = np.random.default_rng(N)
    x = (rng.standard_normal((N, width)) + rng.integers(-3, 4, (N, 1))) * 10.0 ** rng.integers(-6, 6, (N, 1))
    if N > 3:
        x[N // 2] = 0
        x[N // 3] *= 1e-33
    return x.astype(np.float32)


@pytest.mark.parametrize("is_positive", [False, True])
@pytest.mark.parametrize(("N", "width", "num_outputs"), SIZES)
def test_every_kind_of_instructions_gives_the_same_bits(N, width, num_outputs, is_positive, isa):
    model, constants = linear_of(width, num_outputs, is_positive=is_positive)
    x = inputs_of(N, width)
    (output,) = session_of(model, has_kernels=True).run(None, {"x": x})
    np.testing.assert_array_equal(output, expected_of(x, constants, is_positive=is_positive))


@pytest.mark.parametrize("is_positive", [False, True])
@pytest.mark.parametrize(("N", "width", "num_outputs"), SIZES)
def test_the_definition_gives_the_same_up_to_rounding(N, width, num_outputs, is_positive):
    model, constants = linear_of(width, num_outputs, is_positive=is_positive)
    x = inputs_of(N, width)
    (output,) = session_of(model, has_kernels=False).run(None, {"x": x})
    expected = expected_of(x, constants, is_positive=is_positive)
    # The definition rounds an input's product with the scale before it rounds to a level.
    largest = np.abs(x).max(axis=1, keepdims=True)
    np.testing.assert_array_less(np.abs(output - expected), 1e-6 * np.abs(expected) + 1e-6 + 1.3e-2 * largest)
    assert np.median(np.abs(output - expected) / (np.abs(expected) + 1e-6)) < 1e-6


@pytest.mark.parametrize("is_positive", [False, True])
@pytest.mark.parametrize("weight", [1, 255, None])
def test_sums_of_extreme_levels_do_not_saturate(weight, is_positive, isa):
    """ONNX Runtime's products of unsigned by signed levels do, without VNNI."""
    N, width, num_outputs = 3, 2048, 33
    _, constants = linear_of(width, num_outputs)
    rng = np.random.default_rng(0)
    constants["weight"][:] = rng.choice([1, 255], (width, num_outputs)) if weight is None else weight
    model = graph_of(constants, is_positive=is_positive)
    x = np.ones((N, width), np.float32)
    x[1] = -1
    x[2] = rng.choice([-1, 1], width)
    for has_kernels in (True, False):
        (output,) = session_of(model, has_kernels=has_kernels).run(None, {"x": x})
        expected = expected_of(x, constants, is_positive=is_positive)
        np.testing.assert_allclose(output, expected, rtol=1e-6, atol=1e-5)


def test_products_of_many_rows_are_those_of_each_row(isa):
    session = session_of(linear_of(96, 1000)[0], has_kernels=True)
    x = np.random.default_rng(0).standard_normal((201, 96)).astype(np.float32)
    (together,) = session.run(None, {"x": x})
    for row in (0, 5, 77, 200):
        np.testing.assert_array_equal(session.run(None, {"x": x[row : row + 1]})[0][0], together[row])


@pytest.mark.parametrize(
    ("N", "width", "V", "K"),
    [(1, 8, 1, 1), (3, 16, 37, 1), (3, 16, 37, 37), (80, 128, 6000, 10), (13, 64, 20_001, 70)],
)
@pytest.mark.parametrize("share", [0.1, 0.97])
def test_kernel_and_definition_choose_tokens(N, width, V, K, share):
    rng = np.random.default_rng(V)
    added = np.where(rng.random(V) < share, -np.inf, 0).astype(np.float32)
    added[0] = 0
    model, constants = linear_of(width, V, added=added)
    # Whole levels, so that the definition rounds as the kernel does.
    x = rng.integers(-127, 129, (N, width)).astype(np.float32)
    x[:, :2] = -127, 128
    feeds = {"x": x, "num_candidates": np.array([K])}
    for has_kernels in (True, False):
        session = session_of(model, has_kernels=has_kernels)
        all_logits, *nothing = session.run(None, feeds | {"num_candidates": np.array([0])})
        assert [values.shape for values in nothing] == [(N, 0)] * 2
        np.testing.assert_allclose(all_logits, expected_of(x, constants), rtol=1e-5, atol=1e-3)
        logits, ids, scores = session.run(None, feeds)
        assert len(logits) == (0 if has_kernels else N)
        allowed = all_logits + added
        order = np.argsort(-allowed, axis=1, kind="stable")[:, :K]
        finite = np.isfinite(np.take_along_axis(allowed, order, 1))
        np.testing.assert_array_equal(ids[finite], order[finite])
        assert all(len(set(row)) == K for row in ids.tolist())
        if K > 1:
            shifted = allowed.astype(np.float64) - allowed.max(axis=1, keepdims=True)
            log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
            expected = np.take_along_axis(log_probabilities, ids, 1)
            np.testing.assert_allclose(scores, expected, atol=3e-5, rtol=1e-6)


def test_choices_of_many_rows_are_those_of_each_row(isa):
    session = session_of(linear_of(96, 5000, added=np.zeros(5000, np.float32))[0], has_kernels=True)
    x, number = np.random.default_rng(0).standard_normal((201, 96)).astype(np.float32), np.array([7])
    together = session.run(None, {"x": x, "num_candidates": number})
    for row in (0, 5, 77, 200):
        alone = session.run(None, {"x": x[row : row + 1], "num_candidates": number})
        for one, many in zip(alone[1:], together[1:], strict=True):
            np.testing.assert_array_equal(one[0], many[row])


@pytest.mark.parametrize("V", [300, 6001])
def test_tokens_are_chosen_as_from_logits_bit_for_bit(V, isa):
    """A row's numbers must not depend on rows beside it, for which the step computes logits."""
    inputs = values_of({"logits": FLOAT, "num_candidates": INT64}, [["m", "V"], [1]])
    outputs = {"token_ids": INT64, "log_probabilities": FLOAT}
    from_logits = session_of(model_of("Candidates", inputs, {}, outputs), has_kernels=True)
    choice = session_of(linear_of(128, V, added=np.zeros(V, np.float32))[0], has_kernels=True)
    x = np.random.default_rng(0).standard_normal((77, 128)).astype(np.float32)
    (logits, *_), (_, *chosen) = (
        choice.run(None, {"x": x, "num_candidates": np.array([number])}) for number in (0, 6)
    )
    expected = from_logits.run(None, {"logits": logits, "num_candidates": np.array([6])})
    for one, other in zip(chosen, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("count", [-1, 38])
def test_a_wrong_number_of_chosen_tokens_is_refused(count):
    session = session_of(linear_of(8, 37, added=np.zeros(37, np.float32))[0], has_kernels=True)
    with pytest.raises(Exception, match="number of candidates"):
        session.run(None, {"x": np.zeros((2, 8), np.float32), "num_candidates": np.array([count])})


def test_weights_that_are_not_constant_are_refused():
    types = {"x": FLOAT, "weight": UINT8, "weight_scale": FLOAT, "weight_sum": INT32, "bias": FLOAT}
    inputs = values_of(types, [["N", 8], [8, 4], [4], [4], [4]])
    attributes = {"least_input": 0.0}
    with pytest.raises(Exception, match="constants"):
        session_of(model_of("QuantizedLinear", inputs, attributes, {"output": FLOAT}), has_kernels=True)


@pytest.mark.parametrize("count", [None, 0, 1, 3])
def test_no_rows_have_no_products_and_no_candidates(count):
    added = None if count is None else np.zeros(37, np.float32)
    session = session_of(linear_of(8, 37, added=added)[0], has_kernels=True)
    feeds = {"x": np.zeros((0, 8), np.float32)}
    if count is not None:
        feeds["num_candidates"] = np.array([count])
    first, *chosen = session.run(None, feeds)
    assert first.shape == (0, 37)
    assert [values.shape[0] for values in chosen] == ([] if count is None else [0, 0])


def packed_of(weights):
    packed = np.zeros(kernels.packed_shape(weights), np.uint8)
    kernels.pack(weights, packed)
    return packed


@pytest.mark.parametrize(("N", "width", "num_outputs"), SIZES)
def test_packed_weights_give_the_same_bits(N, width, num_outputs, isa):
    model, constants = linear_of(width, num_outputs)
    packed = constants | {"weight": packed_of(constants["weight"])}
    sums = (constants["weight"].astype(np.int32) - 128).sum(axis=0, dtype=np.int32)
    x = inputs_of(N, width)
    (expected,) = session_of(model, has_kernels=True).run(None, {"x": x})
    (output,) = session_of(graph_of(packed, sums=sums), has_kernels=True).run(None, {"x": x})
    np.testing.assert_array_equal(output, expected)


def test_weights_that_are_packed_for_other_instructions_are_refused():
    _, constants = linear_of(32, 64)
    packed = packed_of(constants["weight"])
    constants["weight"] = packed.reshape(packed.shape[0], -1, 1, 1, 1)
    with pytest.raises(Exception, match="packed for other instructions"):
        session_of(graph_of(constants, sums=np.zeros(64, np.int32)), has_kernels=True)


def test_instructions_that_the_processor_lacks_are_an_error(monkeypatch):
    monkeypatch.setenv("SEQ2SEQ_ISA", "mmx")
    with pytest.raises(ValueError, match=r"SEQ2SEQ_ISA is 'mmx'"):
        kernels.instructions()


def test_a_processor_without_any_of_the_instructions_runs_the_definitions(monkeypatch):
    """Its graphs run by their definitions, as ONNX Runtime's refusal of the library says in the log."""
    monkeypatch.delenv("SEQ2SEQ_ISA", raising=False)
    monkeypatch.setattr(kernels, "_function", lambda *_: lambda: None)
    assert kernels.instructions() == ""
