"""Products of floats: one result on every processor, bit for bit, whatever rows are beside."""

import numpy as np
import onnx_ir as ir
import pytest

from seq2seq_serve import kernels
from tests.kernels.test_operators import FLOAT, INT64, model_of, pytestmark, session_of, values_of
from tests.kernels.test_products import isa

__all__ = ["isa", "pytestmark"]

# N rows   I inputs   O outputs; more than a tile of rows, a group of outputs, and a block of either
SIZES = [
    (1, 1, 1),
    (1, 40, 70),
    (2, 3, 32),
    (4, 64, 31),
    (5, 128, 96),
    (13, 513, 100),
    (8, 7, 64),
    (9, 33, 64),
    (300, 256, 512),
    (90, 2048, 48),
    (3, 4200, 70),
]


def linear_of(weight, bias, *, factor=1.0, name="Linear"):
    inputs = values_of({"x": FLOAT}, [["N", "I"]])
    for key, array in (("weight", weight), ("bias", bias)):
        inputs.append(ir.val(key, const_value=ir.tensor(array, name=key)))
    return model_of(name, inputs, {"factor": factor}, {"output": FLOAT})


def embedding_of(table):
    inputs = [*values_of({"ids": INT64}, [["B", "S"]])]
    inputs.append(ir.val("table", const_value=ir.tensor(table, name="table")))
    return model_of("Embedding", inputs, {}, {"embedded": FLOAT})


def packed_of(weight):
    """Weights that are packed where they lie, in memory that was in use before."""
    packed = np.full(kernels.packed_shape(weight.shape, is_int8=False), np.nan, np.float32)
    there = packed.reshape(-1)[: weight.size].reshape(weight.shape)
    there[:] = weight
    if not kernels.pack(there, packed):
        return packed
    panels, width, columns = packed.shape
    return packed.reshape(-1)[: packed.size // 2].reshape(panels, width, columns // 2)


def run(model, **feeds):
    (output,) = session_of(model, has_kernels=True).run(None, feeds)
    return output


def numbers(*shape):
    return np.random.default_rng(len(shape) + sum(shape)).standard_normal(shape).astype(np.float32)


def expected_of(x, weight, bias, factor):
    """The sums in the order of the inputs; each product is rounded once, with its addition."""
    total = np.zeros((len(x), len(weight)), np.float32)
    for i in range(x.shape[1]):
        # float64 holds a product exactly; its sum with a float32 is rounded twice, which changes few of them.
        total = (x[:, i, None].astype(np.float64) * weight[:, i] + total).astype(np.float32)
    return total.astype(np.float64) * factor + bias


@pytest.mark.parametrize(("N", "width", "num_outputs"), SIZES)
def test_outputs_are_those_of_numpy(N, width, num_outputs, isa):
    """A factor of 1 is that of every other test."""
    x, weight, bias, factor = numbers(N, width), numbers(num_outputs, width), numbers(num_outputs), 0.125
    output = run(linear_of(weight, bias, factor=factor), x=x)
    np.testing.assert_allclose(
        output, expected_of(x, weight, bias, factor), rtol=1e-5, atol=1e-6 * width**0.5
    )
    relu = run(linear_of(weight, bias, factor=factor, name="LinearRelu"), x=x)
    np.testing.assert_array_equal(relu, np.maximum(output, 0))


@pytest.mark.parametrize(("N", "width", "num_outputs"), SIZES)
def test_a_row_has_the_same_bits_alone_and_on_every_processor(N, width, num_outputs, isa, monkeypatch):
    x, weight, bias = numbers(N, width), numbers(num_outputs, width), numbers(num_outputs)
    model = linear_of(weight, bias)
    output = run(model, x=x)
    for row in {0, N // 2, N - 1}:
        np.testing.assert_array_equal(run(model, x=x[row : row + 1])[0], output[row])
    monkeypatch.delenv("SEQ2SEQ_ISA")
    np.testing.assert_array_equal(run(model, x=x), output)


@pytest.mark.parametrize("precision", [np.float32, np.float16])
@pytest.mark.parametrize(("N", "width", "num_outputs"), SIZES)
def test_packed_weights_give_the_same_bits(N, width, num_outputs, precision, isa):
    """Also those that half precision has, too, which take half of the memory."""
    x, weight, bias = numbers(N, width), numbers(num_outputs, width), numbers(num_outputs)
    weight = weight.astype(precision).astype(np.float32)
    packed = packed_of(weight)
    assert packed.shape[2] == 4 * np.dtype(precision).itemsize
    expected = run(linear_of(weight, bias), x=x)
    np.testing.assert_array_equal(run(linear_of(packed, bias), x=x), expected)


@pytest.mark.parametrize("is_half", [True, False])
def test_weights_are_packed_in_half_precision_only_if_that_changes_no_bit(is_half):
    for odd in (65504.0, -0.0, 2.0**-24, np.inf) if is_half else (65536.0, 1 + 2.0**-11, 2.0**-25, 3e38):
        weight = numbers(33, 40).astype(np.float16).astype(np.float32)
        weight[32, 39] = odd  # the last one
        assert packed_of(weight).shape == (4, 40, 8 if is_half else 16)
        looked_up = run(embedding_of(packed_of(weight)), ids=np.arange(33)[None])[0]
        assert looked_up.tobytes() == weight.tobytes()


def test_the_definition_gives_the_same_up_to_rounding():
    x, weight, bias = numbers(7, 40), numbers(70, 40), numbers(70)
    for name in ("Linear", "LinearRelu"):
        model = linear_of(weight, bias, factor=0.5, name=name)
        (expected,) = session_of(model, has_kernels=False).run(None, {"x": x})
        np.testing.assert_allclose(run(model, x=x), expected, rtol=1e-5, atol=1e-5)


def test_nan_stays_in_its_row():
    x, weight, bias = numbers(5, 40), numbers(33, 40), numbers(33)
    x[2, 7] = np.nan
    for name in ("Linear", "LinearRelu"):
        isnan = np.isnan(run(linear_of(weight, bias, name=name), x=x))
        assert isnan[2].all()
        assert isnan.sum() == 33


def test_weights_that_do_not_fit_are_refused():
    weight, bias = numbers(33, 40), numbers(33)
    with pytest.raises(Exception, match="x has another width"):
        run(linear_of(weight, bias), x=numbers(2, 39))
    with pytest.raises(Exception, match="the outputs differ in number"):
        session_of(linear_of(weight, numbers(32)), has_kernels=True)
    with pytest.raises(Exception, match="another number of outputs"):
        session_of(linear_of(packed_of(weight), numbers(99)), has_kernels=True)


def test_no_rows_give_no_outputs():
    assert run(linear_of(numbers(33, 40), numbers(33)), x=numbers(0, 40)).shape == (0, 33)


@pytest.mark.parametrize("has_kernels", [True, False])
def test_tokens_are_looked_up(has_kernels):
    table, ids = numbers(70, 24), np.array([[0, 69, 3], [16, 15, 0]])
    (output,) = session_of(embedding_of(table), has_kernels=has_kernels).run(None, {"ids": ids})
    np.testing.assert_array_equal(output, table[ids])
    if has_kernels:
        np.testing.assert_array_equal(run(embedding_of(packed_of(table)), ids=ids), table[ids])
        halves = table.astype(np.float16).astype(np.float32)
        np.testing.assert_array_equal(run(embedding_of(packed_of(halves)), ids=ids), halves[ids])


@pytest.mark.parametrize("token_id", [-1, 70])
def test_a_token_outside_of_the_table_is_refused(token_id):
    with pytest.raises(Exception, match="outside of the table"):
        run(embedding_of(numbers(70, 24)), ids=np.array([[token_id]]))


def test_shapes_that_no_bundle_should_have_are_refused():
    with pytest.raises(Exception, match="3 if it is packed"):
        session_of(embedding_of(numbers(4, 24, 1)), has_kernels=True)
    with pytest.raises(Exception, match="there must be an input"):
        session_of(linear_of(numbers(33, 0), numbers(33)), has_kernels=True)
