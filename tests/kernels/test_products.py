"""Products of quantised weights: one result on every processor, bit for bit, and that of the definition."""

import numpy as np
import onnx
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

FACTOR = 0.7  # of int4 products
BITS = pytest.mark.parametrize("bits", [8, 4])
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


@pytest.fixture(params=kernels.available_instructions())
def isa(request, monkeypatch):
    """One kind of instructions that this processor has."""
    monkeypatch.setenv("SEQ2SEQ_ISA", request.param)
    assert kernels.instructions() == request.param
    return request.param


def linear_of(width, num_outputs, bits, *, is_positive=False, added=None):
    """A map of levels, or with `added` the choice of tokens by it; and its constants."""
    rng = np.random.default_rng(width)
    per_block = bits == 4 and -(-width // 32)
    least, most = (-127, 128) if bits == 8 else (-8, 8)
    constants = {
        "levels": rng.integers(least, most, (num_outputs, width)).astype(np.int64),
        "scales": rng.uniform(0.001, 0.01, (num_outputs, per_block) if per_block else num_outputs),
        "bias": rng.standard_normal(num_outputs).astype(np.float32),
    } | ({} if added is None else {"added": added})
    constants["scales"] = constants["scales"].astype(np.float16 if per_block else np.float32)
    half = num_outputs // 2
    for name in ("levels", "scales", "bias"):  # every output has an equal one
        constants[name][half : 2 * half] = constants[name][:half]
    return graph_of(constants, is_positive=is_positive), constants


def inputs_of_map(levels, scales, bias, **_):
    """The constants that the graph has."""
    if scales.ndim == 1:
        sums = levels.sum(axis=1, dtype=np.int32)
        return {
            "weight": np.ascontiguousarray(levels.T + 128).astype(np.uint8),
            "weight_scale": scales,
            "weight_sum": sums,
            "bias": bias,
        }
    weight, weight_scale = panels_of(levels, scales)
    return {"weight": weight, "weight_scale": weight_scale, "bias": bias}


def panels_of(levels, scales):
    """int4 weights as the kernels read them; what is beyond the last output has the level -8."""
    (num_outputs, width), num_blocks = levels.shape, scales.shape[1]
    num_panels = -(-num_outputs // 32)
    numbers = np.zeros((num_panels * 32, num_blocks * 32), np.uint8)
    numbers[:num_outputs, :width] = levels + 8
    columns = numbers.reshape(num_panels, 2, 16, num_blocks, 8, 4)
    weight = (columns[:, 0] | columns[:, 1] << 4).transpose(0, 2, 3, 1, 4)
    all_scales = np.zeros((num_panels * 32, num_blocks), np.float16)
    all_scales[:num_outputs] = scales
    return weight, all_scales.reshape(num_panels, 32, num_blocks).transpose(0, 2, 1)


def graph_of(constants, *, is_positive=False, given=None, looks_up=True):
    """The graph of a map; `given` are other constants than those of `inputs_of_map`.

    The choice of an older bundle, of format version 13 to 15, does not look tokens up.
    """
    inputs = values_of({"x": FLOAT}, [["N", "I"]])
    arrays = given or inputs_of_map(**constants)
    if "added" in constants:
        arrays |= {"added": constants["added"]}
    for name, array in arrays.items():
        inputs.append(ir.val(name, const_value=ir.tensor(np.ascontiguousarray(array), name=name)))
    is_int8 = constants["scales"].ndim == 1
    attributes = {"least_input": 0.0 if is_positive else -np.inf} | ({} if is_int8 else {"factor": FACTOR})
    family = "Quantized" if is_int8 else "Int4"
    if "added" not in constants:
        return model_of(f"{family}Linear", inputs, attributes, {"output": FLOAT})
    inputs += values_of({"num_candidates": INT64, "places": INT64}, [[1], ["P", 2]])
    outputs = {"logits": FLOAT, "token_ids": INT64, "log_probabilities": FLOAT, "found": FLOAT}
    if looks_up:
        return model_of(f"{family}Choice", inputs, attributes, outputs)
    outputs.pop("found")
    model = onnx.ModelProto.FromString(model_of(f"{family}Choice", inputs[:-1], attributes, outputs))
    (definition,) = model.functions
    definition.input.pop()
    definition.output.pop()
    (branches,) = (node for node in definition.node if node.op_type == "If")
    branches.output.pop()
    for attribute in branches.attribute:
        attribute.g.output.pop()
        attribute.g.node.pop()
    return model.SerializeToString()


def expected_of(x, constants, *, is_positive=False):
    """The outputs in the kernels' arithmetic: the products of levels are exact, and the last sum is fused."""
    counted = np.where(x < 0, np.float32(0), x) if is_positive else x
    if constants["scales"].ndim == 2:
        return int4_expected_of(counted, constants)
    low = np.minimum(counted.min(axis=1, keepdims=True), np.float32(0))
    high = np.maximum(counted.max(axis=1, keepdims=True), np.float32(0))
    span = np.maximum(high - low, np.float32(2.0**-100))
    per_unit = (np.float32(255) / span).astype(np.float64)
    zero_point = -np.rint(low * per_unit)
    levels = np.minimum(np.rint(counted * per_unit) + zero_point, 255)
    sums = (levels - zero_point).astype(np.int64) @ constants["levels"].T
    of_levels = sums.astype(np.float32) * (span / np.float32(255))
    fused = of_levels.astype(np.float64) * constants["scales"] + constants["bias"]
    return fused.astype(np.float32)


def int4_expected_of(counted, constants):
    range_ = np.maximum(np.abs(counted).max(axis=1, keepdims=True), np.float32(2.0**-100))
    levels = np.rint(counted * (np.float32(127) / range_).astype(np.float64)).astype(np.int64)
    totals = np.zeros((len(counted), len(constants["bias"])), np.float32)
    for block, scale in enumerate(constants["scales"].T.astype(np.float64)):
        inputs = slice(32 * block, 32 * (block + 1))
        sums = levels[:, inputs] @ constants["levels"][:, inputs].T
        totals = (sums * scale + totals).astype(np.float32)
    factor = range_ / np.float32(127) * np.float32(FACTOR)
    return (totals.astype(np.float64) * factor + constants["bias"]).astype(np.float32)


def inputs_of(N, width):
    """Rows of many magnitudes, around and beside 0, one of zeros and one of tiny numbers."""
    rng = np.random.default_rng(N)
    x = (rng.standard_normal((N, width)) + rng.integers(-3, 4, (N, 1))) * 10.0 ** rng.integers(-6, 6, (N, 1))
    if N > 3:
        x[N // 2] = 0
        x[N // 3] *= 1e-33
    return x.astype(np.float32)


@BITS
@pytest.mark.parametrize("is_positive", [False, True])
@pytest.mark.parametrize(("N", "width", "num_outputs"), SIZES)
def test_every_kind_of_instructions_gives_the_same_bits(N, width, num_outputs, is_positive, bits, isa):
    model, constants = linear_of(width, num_outputs, bits, is_positive=is_positive)
    x = inputs_of(N, width)
    session = session_of(model, has_kernels=True)
    for _ in ("from memory", "from caches"):
        (output,) = session.run(None, {"x": x})
        np.testing.assert_array_equal(output, expected_of(x, constants, is_positive=is_positive))


@BITS
@pytest.mark.parametrize("is_positive", [False, True])
@pytest.mark.parametrize(("N", "width", "num_outputs"), SIZES)
def test_the_definition_gives_the_same_up_to_rounding(N, width, num_outputs, is_positive, bits):
    model, constants = linear_of(width, num_outputs, bits, is_positive=is_positive)
    x = inputs_of(N, width)
    (output,) = session_of(model, has_kernels=False).run(None, {"x": x})
    expected = expected_of(x, constants, is_positive=is_positive)
    # The definition rounds an input's product with the scale before it rounds to a level.
    largest = np.abs(x).max(axis=1, keepdims=True)
    np.testing.assert_array_less(np.abs(output - expected), 1e-6 * np.abs(expected) + 1e-6 + 1.3e-2 * largest)
    assert np.median(np.abs(output - expected) / (np.abs(expected) + 1e-6)) < 1e-6


@BITS
@pytest.mark.parametrize("is_positive", [False, True])
@pytest.mark.parametrize("extremes", [[0], [1]])
def test_sums_of_extreme_levels_do_not_saturate(extremes, is_positive, bits, isa):
    """ONNX Runtime's products of unsigned by signed levels do, without VNNI."""
    N, width, num_outputs = 3, 2048, 33
    _, constants = linear_of(width, num_outputs, bits)
    rng = np.random.default_rng(0)
    levels = np.array([-127, 127] if bits == 8 else [-8, 7])[extremes]
    constants["levels"][:] = rng.choice(levels, (num_outputs, width))
    model = graph_of(constants, is_positive=is_positive)
    x = np.ones((N, width), np.float32)
    x[1] = -1
    x[2] = rng.choice([-1, 1], width)
    for has_kernels in (True, False):
        (output,) = session_of(model, has_kernels=has_kernels).run(None, {"x": x})
        expected = expected_of(x, constants, is_positive=is_positive)
        # The definition of int4 adds products of floats.
        error = 1e-5 if bits == 8 or has_kernels else 1e-3
        np.testing.assert_allclose(output, expected, rtol=1e-6, atol=error)


@BITS
def test_products_of_many_rows_are_those_of_each_row(bits, isa):
    session = session_of(linear_of(96, 1000, bits)[0], has_kernels=True)
    x = np.random.default_rng(0).standard_normal((201, 96)).astype(np.float32)
    (together,) = session.run(None, {"x": x})
    for row in (0, 5, 77, 200):
        np.testing.assert_array_equal(session.run(None, {"x": x[row : row + 1]})[0][0], together[row])


@pytest.mark.parametrize(
    ("N", "width", "V", "K"),
    [(1, 8, 1, 1), (3, 16, 37, 1), (3, 16, 37, 37), (40, 128, 6000, 10), (5, 64, 20_001, 70)],
)
@BITS
def test_kernel_and_definition_choose_tokens(N, width, V, K, bits):
    rng = np.random.default_rng(V)
    # Of some blocks a tenth is forbidden, of others nearly all.
    share = np.where(np.arange(V) // 512 % 2, 0.97, 0.1)
    added = np.where(rng.random(V) < share, -np.inf, 0).astype(np.float32)
    added[0] = 0
    model, constants = linear_of(width, V, bits, added=added)
    # Whole levels, so that the definition rounds as the kernel does.
    most = 128 if bits == 8 else 127
    x = rng.integers(-127, most + 1, (N, width)).astype(np.float32)
    x[:, :2] = -127, most
    places = np.stack([rng.integers(0, N, 7), rng.integers(0, V, 7)], axis=1)
    feeds = {"x": x, "num_candidates": np.array([K]), "places": places}
    for has_kernels in (True, False):
        session = session_of(model, has_kernels=has_kernels)
        all_logits, *nothing = session.run(None, feeds | {"num_candidates": np.array([0])})
        assert [values.shape for values in nothing] == [(N, 0), (N, 0), (0,)]
        np.testing.assert_allclose(all_logits, expected_of(x, constants), rtol=1e-5, atol=1e-3)
        logits, ids, scores, found = session.run(None, feeds)
        assert len(logits) == (0 if has_kernels else N)
        allowed = all_logits + added
        order = np.argsort(-allowed, axis=1, kind="stable")[:, :K]
        finite = np.isfinite(np.take_along_axis(allowed, order, 1))
        np.testing.assert_array_equal(ids[finite], order[finite])
        assert all(len(set(row)) == K for row in ids.tolist())
        shifted = allowed.astype(np.float64) - allowed.max(axis=1, keepdims=True)
        log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        np.testing.assert_allclose(found, log_probabilities[tuple(places.T)], atol=3e-5, rtol=1e-6)
        nothing_to_find = session.run(None, feeds | {"places": places[:0]})
        for one, other in zip(nothing_to_find, [logits, ids, scores, found[:0]], strict=True):
            np.testing.assert_array_equal(one, other)
        if K > 1:
            expected = np.take_along_axis(log_probabilities, ids, 1)
            np.testing.assert_allclose(scores, expected, atol=3e-5, rtol=1e-6)


@BITS
def test_choices_of_many_rows_are_those_of_each_row(bits, isa):
    session = session_of(linear_of(96, 5000, bits, added=np.zeros(5000, np.float32))[0], has_kernels=True)
    x, number = np.random.default_rng(0).standard_normal((201, 96)).astype(np.float32), np.array([7])
    rows = [0, 5, 77, 200]
    places = np.array([(row, token_id) for row in rows for token_id in (row, 4999)])
    together = session.run(None, {"x": x, "num_candidates": number, "places": places})
    for i, row in enumerate(rows):
        its_places = places[2 * i : 2 * i + 2] * [0, 1]
        alone = session.run(None, {"x": x[row : row + 1], "num_candidates": number, "places": its_places})
        for one, many in zip(alone[1:3], together[1:3], strict=True):
            np.testing.assert_array_equal(one[0], many[row])
        np.testing.assert_array_equal(alone[3], together[3][2 * i : 2 * i + 2])


@BITS
@pytest.mark.parametrize("V", [300, 6001])
def test_tokens_are_chosen_as_from_logits_bit_for_bit(V, bits, isa):
    """A row's numbers must not depend on rows beside it, for which the step computes logits."""
    types = {"logits": FLOAT, "num_candidates": INT64, "places": INT64}
    inputs = values_of(types, [["m", "V"], [1], ["P", 2]])
    outputs = {"token_ids": INT64, "log_probabilities": FLOAT, "found": FLOAT}
    from_logits = session_of(model_of("Candidates", inputs, {}, outputs), has_kernels=True)
    choice = session_of(linear_of(128, V, bits, added=np.zeros(V, np.float32))[0], has_kernels=True)
    x = np.random.default_rng(0).standard_normal((77, 128)).astype(np.float32)
    places = np.stack([np.arange(77), np.arange(77) * 31 % V], axis=1)
    (logits, *_), (_, *chosen) = (
        choice.run(None, {"x": x, "num_candidates": np.array([number]), "places": places})
        for number in (0, 6)
    )
    # A candidate that is looked up has the bits that it has as a candidate.
    places[7:9, 1] = chosen[0][7:9, 3]
    (_, *chosen) = choice.run(None, {"x": x, "num_candidates": np.array([6]), "places": places})
    np.testing.assert_array_equal(chosen[2][7:9], chosen[1][7:9, 3])
    expected = from_logits.run(None, {"logits": logits, "num_candidates": np.array([6]), "places": places})
    for one, other in zip(chosen, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@BITS
def test_a_node_of_an_older_bundle_chooses_the_same_tokens(bits):
    model, constants = linear_of(16, 300, bits, added=np.zeros(300, np.float32))
    x = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)
    feeds = {"x": x, "num_candidates": np.array([4])}
    nowhere = {"places": np.zeros((0, 2), np.int64)}
    older = graph_of(constants, looks_up=False)
    for has_kernels in (True, False):
        *expected, _ = session_of(model, has_kernels=has_kernels).run(None, feeds | nowhere)
        chosen = session_of(older, has_kernels=has_kernels).run(None, feeds)
        for one, other in zip(chosen, expected, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("place", [(2, 0), (-1, 0), (0, 37), (0, -1)])
def test_a_place_outside_of_the_logits_is_refused(place):
    session = session_of(linear_of(8, 37, 8, added=np.zeros(37, np.float32))[0], has_kernels=True)
    feeds = {"x": np.zeros((2, 8), np.float32), "num_candidates": np.array([2]), "places": np.array([place])}
    with pytest.raises(Exception, match="a place is outside"):
        session.run(None, feeds)


@pytest.mark.parametrize("count", [-1, 38])
def test_a_wrong_number_of_chosen_tokens_is_refused(count):
    session = session_of(linear_of(8, 37, 8, added=np.zeros(37, np.float32))[0], has_kernels=True)
    feeds = {"x": np.zeros((2, 8), np.float32), "places": np.zeros((0, 2), np.int64)}
    with pytest.raises(Exception, match="number of candidates"):
        session.run(None, feeds | {"num_candidates": np.array([count])})


def test_weights_that_are_not_constant_are_refused():
    types = {"x": FLOAT, "weight": UINT8, "weight_scale": FLOAT, "weight_sum": INT32, "bias": FLOAT}
    inputs = values_of(types, [["N", 8], [8, 4], [4], [4], [4]])
    attributes = {"least_input": 0.0}
    with pytest.raises(Exception, match="constants"):
        session_of(model_of("QuantizedLinear", inputs, attributes, {"output": FLOAT}), has_kernels=True)


@BITS
@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("count", [None, 0, 1, 3])
def test_no_rows_have_no_products_and_no_candidates(count, has_kernels, bits):
    added = None if count is None else np.zeros(37, np.float32)
    session = session_of(linear_of(8, 37, bits, added=added)[0], has_kernels=has_kernels)
    feeds = {"x": np.zeros((0, 8), np.float32)}
    if count is not None:
        feeds |= {"num_candidates": np.array([count]), "places": np.zeros((0, 2), np.int64)}
    first, *chosen = session.run(None, feeds)
    assert first.shape == (0, 37)
    assert [values.shape[0] for values in chosen] == ([] if count is None else [0, 0, 0])


def packed_of(weights):
    """Weights that are packed where they lie, in memory that was in use before."""
    packed = np.full(kernels.packed_shape(weights.shape, is_int8=True), 0xEE, np.uint8)
    there = packed.reshape(-1)[: weights.size].reshape(weights.shape)
    there[:] = weights
    kernels.pack(there, packed)
    apart = np.zeros_like(packed)
    kernels.pack(weights, apart)
    np.testing.assert_array_equal(packed, apart)
    return packed


@pytest.mark.parametrize(("N", "width", "num_outputs"), SIZES)
def test_packed_weights_give_the_same_bits(N, width, num_outputs, isa):
    model, constants = linear_of(width, num_outputs, 8)
    arrays = inputs_of_map(**constants)
    packed = arrays | {"weight": packed_of(arrays["weight"])}
    x = inputs_of(N, width)
    (expected,) = session_of(model, has_kernels=True).run(None, {"x": x})
    (output,) = session_of(graph_of(constants, given=packed), has_kernels=True).run(None, {"x": x})
    np.testing.assert_array_equal(output, expected)


def test_weights_that_are_packed_for_other_instructions_are_refused():
    _, constants = linear_of(32, 64, 8)
    arrays = inputs_of_map(**constants)
    packed = packed_of(arrays["weight"])
    arrays["weight"] = packed.reshape(packed.shape[0], -1, 32, 1, 1)
    with pytest.raises(Exception, match="packed for other instructions"):
        session_of(graph_of(constants, given=arrays), has_kernels=True)


@pytest.mark.parametrize("depth", [0, 4, 20])
def test_packed_weights_without_their_padding_are_refused(depth, isa):
    """Levels of more inputs were written than there was room for."""
    _, constants = linear_of(32, 32, 8)
    arrays = inputs_of_map(**constants)
    panels, strips, _, strip, group = packed_of(arrays["weight"]).shape
    arrays["weight"] = np.zeros((panels, strips, depth // group, strip, group), np.uint8)
    with pytest.raises(Exception, match="padded to a multiple of 16"):
        session_of(graph_of(constants, given=arrays), has_kernels=True)


@BITS
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_row_with_a_number_that_is_not_finite_has_none_that_is(number, bits, isa):
    model, _ = linear_of(64, 40, bits)
    x = np.random.default_rng(0).standard_normal((9, 64)).astype(np.float32)
    session = session_of(model, has_kernels=True)
    (expected,) = session.run(None, {"x": x})
    x[4, 33] = number
    (output,) = session.run(None, {"x": x})
    assert not np.isfinite(output[4]).any()
    np.testing.assert_array_equal(np.delete(output, 4, 0), np.delete(expected, 4, 0))


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("weight", lambda weight: weight[:, :, :4], "the weights must have the shape"),
        ("weight", lambda weight: weight[:1], "the scales must have the shape"),
        ("weight_scale", lambda scale: scale[:, :, :16], "the scales must have the shape"),
        ("bias", lambda bias: bias[:32], "the outputs differ in number"),
        ("bias", lambda bias: np.tile(bias, 2), "the outputs differ in number"),
    ],
)
def test_int4_weights_of_other_shapes_are_refused(name, change, problem):
    _, constants = linear_of(64, 64, 4)
    arrays = inputs_of_map(**constants)
    with pytest.raises(Exception, match=problem):
        session_of(graph_of(constants, given=arrays | {name: change(arrays[name])}), has_kernels=True)


@pytest.mark.parametrize("width", [31, 32, 65])
def test_int4_rows_of_another_width_are_refused(width):
    session = session_of(linear_of(64, 64, 4)[0], has_kernels=True)
    with pytest.raises(Exception, match="x has another width"):
        session.run(None, {"x": np.zeros((2, width), np.float32)})


def embedding_of(constants, *, given=None):
    arrays = given or inputs_of_map(**constants)
    inputs = values_of({"ids": INT64}, [["B", "T"]])
    for name in ("weight", "weight_scale"):
        array = np.ascontiguousarray(arrays[name])
        inputs.append(ir.val(name, const_value=ir.tensor(array, name=name)))
    family = "Quantized" if constants["scales"].ndim == 1 else "Int4"
    return model_of(f"{family}Embedding", inputs, {}, {"embedded": FLOAT})


@BITS
@pytest.mark.parametrize(("width", "V"), [(32, 1), (64, 70), (1024, 333)])
def test_tokens_are_looked_up_in_the_weights_of_a_map(width, V, bits, isa):
    _, constants = linear_of(width, V, bits)
    scales = constants["scales"].astype(np.float32).reshape(V, -1)
    table = constants["levels"].astype(np.float32) * np.repeat(scales, width // scales.shape[1], axis=1)
    ids = np.random.default_rng(0).integers(0, V, (3, 5))
    models = [embedding_of(constants)]
    if bits == 8:
        arrays = inputs_of_map(**constants)
        models.append(embedding_of(constants, given=arrays | {"weight": packed_of(arrays["weight"])}))
    for model, has_kernels in ((models[0], False), *((model, True) for model in models)):
        (embedded,) = session_of(model, has_kernels=has_kernels).run(None, {"ids": ids})
        np.testing.assert_array_equal(embedded, table[ids])


@BITS
@pytest.mark.parametrize("has_kernels", [True, False])
def test_no_tokens_have_no_rows(has_kernels, bits):
    session = session_of(embedding_of(linear_of(32, 96, bits)[1]), has_kernels=has_kernels)
    assert session.run(None, {"ids": np.zeros((3, 0), np.int64)})[0].shape == (3, 0, 32)


@BITS
@pytest.mark.parametrize("token", [-1, 96])
def test_tokens_outside_of_the_weights_are_refused(token, bits):
    session = session_of(embedding_of(linear_of(32, 96, bits)[1]), has_kernels=True)
    with pytest.raises(Exception, match="a token is outside of the table"):
        session.run(None, {"ids": np.array([[0, token]])})


def test_instructions_that_the_processor_lacks_are_an_error(monkeypatch):
    """The error named others that the processor lacks."""
    monkeypatch.setenv("SEQ2SEQ_ISA", "mmx")
    with pytest.raises(ValueError, match=r"SEQ2SEQ_ISA is 'mmx'") as caught:
        kernels.instructions()
    named = str(caught.value).partition("give one of ")[2].split(", ")
    assert named == kernels.available_instructions()
    for name in kernels.INSTRUCTIONS:
        monkeypatch.setenv("SEQ2SEQ_ISA", name)
        if name in named:
            assert kernels.instructions() == name
        else:
            with pytest.raises(ValueError, match=f"SEQ2SEQ_ISA is '{name}'"):
                kernels.instructions()


def test_a_processor_without_any_of_the_instructions_runs_the_definitions(monkeypatch):
    """Its graphs run by their definitions, as ONNX Runtime's refusal of the library says in the log."""
    monkeypatch.delenv("SEQ2SEQ_ISA", raising=False)
    monkeypatch.setattr(kernels, "_function", lambda *_: lambda: None)
    assert kernels.instructions() == ""
