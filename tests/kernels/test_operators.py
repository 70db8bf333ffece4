"""The operators in C++ compute what their definitions in ONNX Runtime's own operators compute, and numpy."""

import shutil

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from seq2seq_serve import kernels
from seq2seq_serve.bundle import names
from seq2seq_serve.export.convert import OPSET
from seq2seq_serve.export.graphs.functions import DOMAIN, define

# B rows   H heads   G heads of keys and values   K d_head   C capacity

pytestmark = pytest.mark.skipif(
    kernels.library() is None and shutil.which("c++") is None, reason="there is no C++ compiler"
)


def test_a_library_that_cannot_be_loaded_is_not_used_and_the_reason_is_returned(tmp_path, monkeypatch):
    broken = tmp_path / "_operators.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(kernels, "library", lambda _: broken)
    assert not kernels.register(ort.SessionOptions())
    problem = kernels.add(ort.SessionOptions())
    assert str(broken) in problem
    assert problem.endswith(
        "install this package again here; `pip install -v` shows the errors of the compiler"
    )


def test_a_library_that_is_missing_or_for_another_python_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "library", lambda _: None)
    monkeypatch.setattr(kernels, "_FOLDER", tmp_path)
    assert f"{tmp_path} lacks them, as after" in kernels.add(ort.SessionOptions())
    assert f"{tmp_path} lacks them, as after" in kernels.add(ort.SessionOptions(), is_cuda=True)
    (tmp_path / "_operators.cpython-27-other.so").touch()
    assert "_operators.cpython-27-other.so is for another Python" in kernels.add(ort.SessionOptions())


SIZES = [(4, 4, 32), (8, 8, 64), (2, 2, 8), (6, 2, 24), (4, 1, 128), (1, 1, 256)]  # H, G, K
C = 21
LAST_POSITIONS = np.array([0, 7, 8, 20, 15], np.int32)
B = len(LAST_POSITIONS)
FLOAT, FLOAT16, UINT8, INT32, INT64 = (
    getattr(ir.DataType, name) for name in ("FLOAT", "FLOAT16", "UINT8", "INT32", "INT64")
)
ATTENTIONS = ["CacheAttention", "HalfCacheAttention", "MemoryAttention", "HalfMemoryAttention"]


def attention_of(name, H, G, K, scale, cap):
    """One attention as a graph with its definition."""
    writes, element_type = name.endswith("CacheAttention"), FLOAT16 if name.startswith("Half") else FLOAT
    width = (H + 2 * G) * K if writes else H * K
    types = {"query": FLOAT, "key": element_type, "value": element_type}
    types |= {"last_positions": INT32, "owners": INT64}
    shapes = [["B", width], ["N", G, "C", K], ["N", G, "C", K], ["B"], ["B"]]
    inputs = values_of(types | {"capacity": INT32}, [*shapes, []])
    attributes = {"num_heads": H, "kv_num_heads": G, "scale": scale, "softcap": cap}
    written = {"key_out": element_type, "value_out": element_type} if writes else {}
    return model_of(name, inputs, attributes, {"attended": FLOAT} | written)


def model_of(name, inputs, attributes, outputs, *, unread=()):
    """A graph of one operator with its definition; outputs are types by name."""
    node = ir.node(name, inputs, attributes, domain=DOMAIN, num_outputs=len(outputs))
    for output, (key, dtype) in zip(node.outputs, outputs.items(), strict=True):
        output.name, output.type = key, ir.TensorType(dtype)
    read = [output for output in node.outputs if output.name not in unread]
    opsets = {"": OPSET, "com.microsoft": 1, DOMAIN: 1}
    values = [value for value in inputs if value is not None]
    constants = [value for value in values if value.const_value is not None]
    given = [value for value in values if value.const_value is None]
    graph = ir.Graph(given, read, nodes=[node], initializers=constants, opset_imports=opsets, name="one")
    model = ir.Model(graph, ir_version=10)
    define(model)
    return ir.to_proto(model).SerializeToString()


def source_attention_of(H, K, scale):
    types = {"packed": FLOAT, "lengths": INT64, "row_numbers": INT64, "indices": INT64}
    shapes = [["N", 3 * H * K], ["B"], ["B", "S"], ["N", 2]]
    inputs = values_of(types, shapes)
    attributes = {"num_heads": H, "scale": scale, "softcap": 0.0}
    return model_of("SourceAttention", inputs, attributes, {"attended": FLOAT})


def values_of(types, shapes):
    """The inputs of a graph."""
    return [
        ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        for (name, dtype), shape in zip(types.items(), shapes, strict=True)
    ]


def session_of(model, *, has_kernels):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 2
    if has_kernels:
        assert kernels.register(options)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run(session, feeds):
    """Run with keys and values in place, as the server does; returns the output and the keys and values."""
    values = {name: ort.OrtValue.ortvalue_from_numpy(array.copy()) for name, array in feeds.items()}
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for output in session.get_outputs():
        if output.name == "attended":
            binding.bind_output(output.name)
        else:
            binding.bind_ortvalue_output(output.name, values[output.name.removesuffix("_out")])
    session.run_with_iobinding(binding)
    written = (binding.get_outputs()[0], values["key"], values["value"])
    return [np.array(value.numpy()) for value in written]  # a view does not keep the memory alive


def feeds_of(name, H, G, K, rows=B, spread=1.0):
    rng = np.random.default_rng(H * K)
    width = (H + 2 * G) * K if name.endswith("CacheAttention") else H * K
    dtype = np.float16 if name.startswith("Half") else np.float32
    return {
        "query": spread * rng.standard_normal((rows, width), np.float32),
        "key": rng.standard_normal((rows, G, C, K), np.float32).astype(dtype),
        "value": rng.standard_normal((rows, G, C, K), np.float32).astype(dtype),
        "last_positions": np.resize(LAST_POSITIONS, rows),
        "owners": np.arange(rows),
        "capacity": np.array(C, np.int32),
    }


def expected(feeds, H, scale, cap):
    """Attention by its definition, in float64 (Vaswani et al. 2017, equation 1)."""
    key, value = (feeds[name].astype(np.float64) for name in ("key", "value"))
    (rows, width), (_, G, _, K) = feeds["query"].shape, key.shape
    query = feeds["query"][:, : H * K].reshape(rows, H, K).astype(np.float64)
    attended = np.empty((rows, H, K))
    places = list(zip(feeds["owners"], feeds["last_positions"], strict=True))
    for row, (owner, last) in enumerate(places):
        if width > H * K:
            new = feeds["query"][row, H * K :].reshape(2, G, K)
            key[owner, :, last], value[owner, :, last] = new.astype(feeds["key"].dtype)
    for row, (owner, last) in enumerate(places):
        for head in range(H):
            group = head * G // H
            scores = key[owner, group, : last + 1] @ query[row, head] * scale
            if cap:
                scores = cap * np.tanh(scores / cap)
            weights = np.exp(scores - scores.max())
            attended[row, head] = weights / weights.sum() @ value[owner, group, : last + 1]
    return attended.reshape(rows, -1), key, value


@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize(("H", "G", "K"), SIZES)
@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("has_kernels", [True, False])
def test_kernel_and_definition_compute_attention(has_kernels, name, H, G, K, cap):
    """The definitions round queries to half precision, too, where keys have it."""
    scale = 1 / np.sqrt(K)
    tolerance = 3e-6 if has_kernels or not name.startswith("Half") else 2e-2
    feeds = feeds_of(name, H, G, K, spread=3.0)
    session = session_of(attention_of(name, H, G, K, scale, cap), has_kernels=has_kernels)
    for ours, theirs in zip(run(session, feeds), expected(feeds, H, scale, cap), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=tolerance)


def test_many_rows_are_shared_among_threads():
    """Rows that several threads compute get the same bits as each row alone."""
    H, G, K = 8, 8, 64
    feeds = feeds_of("CacheAttention", H, G, K, rows=300)
    session = session_of(attention_of("CacheAttention", H, G, K, 0.125, 0.0), has_kernels=True)
    together, _, _ = run(session, feeds)
    for row in (0, 3, 151, 299):
        alone = {key: array[row : row + 1] if array.shape else array for key, array in feeds.items()}
        alone["owners"] = np.zeros(1, np.int64)
        np.testing.assert_array_equal(run(session, alone)[0][0], together[row])


def test_a_row_reads_the_memory_of_its_owner():
    H, G, K = 4, 4, 32
    session = session_of(attention_of("MemoryAttention", H, G, K, 0.2, 0.0), has_kernels=True)
    feeds = feeds_of("MemoryAttention", H, G, K)
    feeds["last_positions"][:] = 12
    separate, _, _ = run(session, feeds)
    feeds["owners"] = np.array([0, 3, 2, 3, 3])
    shared, _, _ = run(session, feeds)
    np.testing.assert_allclose(shared, expected(feeds, H, 0.2, 0.0)[0], atol=3e-6)
    np.testing.assert_array_equal(shared[[0, 2, 3]], separate[[0, 2, 3]])
    assert np.abs(shared[[1, 4]] - separate[[1, 4]]).max(axis=1).min() > 0.01


@pytest.mark.parametrize("name", ["CacheAttention", "HalfCacheAttention"])
@pytest.mark.parametrize(("H", "G", "K"), [(4, 4, 32), (6, 2, 24)])
def test_positions_of_one_cache_together_are_those_one_after_the_other(H, G, K, name):
    """In any order, beside positions of other caches, and over what an earlier draft has left there."""
    session = session_of(attention_of(name, H, G, K, 0.2, 0.0), has_kernels=True)
    feeds = feeds_of(name, H, G, K)
    feeds["owners"], feeds["last_positions"] = np.array([2, 0, 2, 2, 4]), np.array([7, 20, 9, 8, 0], np.int32)
    attended, key, value = run(session, feeds)
    np.testing.assert_allclose(attended, expected(feeds, H, 0.2, 0.0)[0], atol=3e-6)
    caches = feeds["key"], feeds["value"]
    for row in np.argsort(feeds["last_positions"]):
        one = {name: feeds[name][row : row + 1] for name in ("query", "last_positions", "owners")}
        alone, *caches = run(session, feeds | one | dict(zip(("key", "value"), caches, strict=True)))
        np.testing.assert_array_equal(alone[0], attended[row])
    np.testing.assert_array_equal(caches, (key, value))


@pytest.mark.parametrize("name", ["MemoryAttention", "HalfMemoryAttention"])
def test_positions_after_the_last_one_are_not_read(name):
    H, G, K = 4, 4, 32
    session = session_of(attention_of(name, H, G, K, 0.2, 0.0), has_kernels=True)
    feeds = feeds_of(name, H, G, K)
    clean, _, _ = run(session, feeds)
    for row, last in enumerate(LAST_POSITIONS):
        feeds["key"][row, :, last + 1 :] = feeds["value"][row, :, last + 1 :] = np.nan
    np.testing.assert_array_equal(run(session, feeds)[0], clean)


@pytest.mark.parametrize("name", ["CacheAttention", "HalfCacheAttention"])
def test_keys_and_values_may_be_written_to_other_memory(name):
    H, G, K = 2, 2, 8
    session = session_of(attention_of(name, H, G, K, 0.2, 0.0), has_kernels=True)
    feeds = feeds_of(name, H, G, K)
    for apart, in_place in zip(session.run(None, feeds), run(session, feeds), strict=True):
        np.testing.assert_array_equal(apart, in_place)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"last_positions": np.full(B, C, np.int32)}, "last position is outside"),
        ({"last_positions": np.full(B, -1, np.int32)}, "last position is outside"),
        ({"last_positions": np.zeros(B + 1, np.int32)}, "number of rows"),
        ({"owners": np.full(B, B)}, "owner is not a row"),
        ({"owners": np.full(B, -1)}, "owner is not a row"),
        ({"owners": np.zeros(B - 1, np.int64)}, "number of rows"),
    ],
)
def test_wrong_inputs_are_refused_before_memory_is_read(changed, message):
    H, G, K = 2, 2, 8
    session = session_of(attention_of("MemoryAttention", H, G, K, 0.2, 0.0), has_kernels=True)
    with pytest.raises(Exception, match=message):
        session.run(None, feeds_of("MemoryAttention", H, G, K) | changed)


@pytest.mark.parametrize("unread", [(), ("total",)])
@pytest.mark.parametrize(("N", "D"), [(1, 8), (5, 128), (700, 512)])
def test_kernel_and_definition_add_and_normalize(N, D, unread):
    shapes = {"x": ["N", D], "residual": ["N", D], "weight": [D], "bias": [D]}
    inputs = values_of(dict.fromkeys(shapes, FLOAT), shapes.values())
    outputs = {"total": FLOAT, "normalized": FLOAT}
    model = model_of("AddNorm", inputs, {"epsilon": 1e-5}, outputs, unread=unread)
    rng = np.random.default_rng(N)
    feeds = {
        name: rng.standard_normal((N, D) if shape[:1] == ["N"] else shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    ours, theirs = (
        session_of(model, has_kernels=has_kernels).run(None, feeds) for has_kernels in (True, False)
    )
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("H", "K"), [(4, 32), (8, 64), (2, 8), (3, 24)])
@pytest.mark.parametrize("lengths", [(1,), (9, 1, 8, 23), (40,) * 30])
def test_tokens_attend_to_their_source(lengths, H, K):
    N, lengths = sum(lengths), np.array(lengths)
    row_numbers, indices = places_of(lengths)
    rng = np.random.default_rng(N)
    packed = rng.standard_normal((N, 3 * H * K), np.float32)
    model = source_attention_of(H, K, 0.3)
    feeds = {"packed": packed, "lengths": lengths, "row_numbers": row_numbers, "indices": indices}
    expected = np.empty((N, H, K))
    query, key, value = packed.astype(np.float64).reshape(N, 3, H, K).swapaxes(0, 1)
    for source in np.split(np.arange(N), np.cumsum(lengths)[:-1]):
        scores = np.einsum("qhk,shk->hqs", query[source], key[source]) * 0.3
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        expected[source] = np.einsum("hqs,shk->qhk", weights, value[source])
    for has_kernels in (True, False):
        (attended,) = session_of(model, has_kernels=has_kernels).run(None, feeds)
        np.testing.assert_allclose(attended, expected.reshape(N, -1), atol=6e-6)


def places_of(lengths):
    """The row of each place of the padded sources, and the place of each row."""
    starts, longest = np.cumsum(lengths) - lengths, max(lengths)
    row_numbers = starts[:, None] + np.minimum(np.arange(longest), lengths[:, None] - 1)
    return row_numbers, np.argwhere(np.arange(longest) < lengths[:, None])


@pytest.mark.parametrize("has_kernels", [True, False])
def test_caches_round_to_half_precision_as_numpy_does(has_kernels):
    """Numbers between two neighbours, beyond the range and below it, and what is not a number."""
    H, G, K = 1, 1, 8
    session = session_of(attention_of("HalfCacheAttention", H, G, K, 0.2, 0.0), has_kernels=has_kernels)
    feeds = feeds_of("HalfCacheAttention", H, G, K, rows=1)
    given = [1 + 2**-11, 1 + 3 * 2**-11, 65519.0, -65520.0, 2.9e-8, 3e-8, -0.0, np.nan]
    feeds["query"][0, K:] = np.array(given * 2, np.float32)
    _, keys, values = run(session, feeds)
    with np.errstate(over="ignore"):
        rounded = np.array(given, np.float32).astype(np.float16)
    for written in (keys, values):
        np.testing.assert_array_equal(written[0, 0, LAST_POSITIONS[0]], rounded)


def candidates_model():
    types = {"logits": FLOAT, "num_candidates": INT64, "places": INT64}
    outputs = {"token_ids": INT64, "log_probabilities": FLOAT, "found": FLOAT}
    return model_of("Candidates", values_of(types, [["m", "V"], [1], ["P", 2]]), {}, outputs)


@pytest.mark.parametrize("count", [0, 10])
def test_a_wrong_number_of_candidates_is_refused(count):
    model = candidates_model()
    feeds = {"logits": np.zeros((2, 9), np.float32), "num_candidates": np.array([count])}
    feeds["places"] = np.zeros((0, 2), np.int64)
    with pytest.raises(Exception, match="number of candidates"):
        session_of(model, has_kernels=True).run(None, feeds)


def test_candidates_of_many_rows_are_those_of_each_row():
    model = candidates_model()
    session = session_of(model, has_kernels=True)
    logits = np.random.default_rng(0).standard_normal((200, 3001)).astype(np.float32)
    number = np.array([5])
    rows = [0, 77, 199]
    places = np.array([(row, 3000 - row) for row in rows])
    together = session.run(None, {"logits": logits, "num_candidates": number, "places": places})
    for i, row in enumerate(rows):
        feeds = {"logits": logits[row : row + 1], "places": places[i : i + 1] * [0, 1]}
        alone = session.run(None, feeds | {"num_candidates": number})
        for one, many in zip(alone[:2], together[:2], strict=True):
            np.testing.assert_array_equal(one[0], many[row])
        assert alone[2] == together[2][i]


def time_rules_model():
    inputs = values_of(
        {"logits": FLOAT} | dict.fromkeys(names.TIME_COLUMNS, INT64), [["m", "V"], *[["m", 1]] * 6]
    )
    return model_of("TimeRules", inputs, {}, {"allowed": FLOAT})


def columns_of(bounds):
    columns = np.array(bounds, np.int64).T[:, :, None]
    return dict(zip(names.TIME_COLUMNS, columns, strict=True))


@pytest.mark.parametrize("V", [40, 301, 6000])
def test_kernel_and_definition_apply_the_rules_of_times(V):
    rng = np.random.default_rng(V)
    first, last, end = V - 25, V - 3, V - 1
    bounds = [
        (first, last, 0, end, first + 3, last),
        (first, last, V, V, first, first + 9),  # only times
        (first, last, 7, first - 1, V, last),  # only texts
        (first, end, 0, V, 0, V),
        (first, last, 0, last + 1, first + 8, first + 8),
        (first, last, V, V, V, last),  # nothing
        (V, 0, 0, V, 0, 0),  # without times
        (V, 0, 0, end, 0, V),
    ]
    logits = 4 * rng.standard_normal((60, len(bounds), V)).astype(np.float32)
    logits[::2, :, first:] += rng.uniform(-4, 14, (30, len(bounds), 1)).astype(np.float32)
    logits[3, :, ::3], logits[5, :, first:], logits[7, :, :first] = -np.inf, -np.inf, -np.inf
    logits[8, :, first:] += 300  # the power of a difference is not finite
    feeds = {"logits": logits.reshape(-1, V)} | columns_of(bounds * 60)
    kernel, defined = (
        session_of(time_rules_model(), has_kernels=has_kernels).run(None, feeds)[0]
        for has_kernels in (True, False)
    )
    np.testing.assert_array_equal(kernel, defined)
    has_texts = np.isfinite(kernel[:, :first]).any(axis=1).reshape(60, -1)
    assert 5 < has_texts[::2, 0].sum() < 25  # both ways were taken


@pytest.mark.parametrize("num_bounds", [1, 3])
def test_bounds_of_another_number_of_rows_are_refused(num_bounds):
    feeds = {"logits": np.zeros((2, 9), np.float32)} | columns_of([(5, 8, 0, 9, 5, 8)] * num_bounds)
    with pytest.raises(Exception, match="bounds must have the shape"):
        session_of(time_rules_model(), has_kernels=True).run(None, feeds)


def test_tokens_of_many_sources_are_those_of_each_source():
    H, K, lengths = 8, 64, np.array([100, 3, 250, 61])
    session = session_of(source_attention_of(H, K, 0.125), has_kernels=True)
    packed = np.random.default_rng(0).standard_normal((lengths.sum(), 3 * H * K), np.float32)

    def attended(packed, lengths):
        row_numbers, indices = places_of(lengths)
        feeds = {"packed": packed, "lengths": lengths, "row_numbers": row_numbers, "indices": indices}
        return session.run(None, feeds)[0]

    together = np.split(attended(packed, lengths), np.cumsum(lengths)[:-1])
    for tokens, length, source in zip(
        together, lengths, np.split(packed, np.cumsum(lengths)[:-1]), strict=True
    ):
        np.testing.assert_array_equal(attended(source, np.array([length])), tokens)


@pytest.mark.parametrize("lengths", [(3, 4), (3, 1), (9, -1), (-2, 10)])
def test_sources_that_do_not_fit_the_tokens_are_refused(lengths):
    model = source_attention_of(2, 8, 0.3)
    feeds = {
        "packed": np.zeros((8 if lengths != (3, 4) else 6, 48), np.float32),
        "lengths": np.array(lengths),
        "row_numbers": np.zeros((2, 4), np.int64),
        "indices": np.zeros((8, 2), np.int64),
    }
    with pytest.raises(Exception, match="tokens than there are"):
        session_of(model, has_kernels=True).run(None, feeds)


@pytest.mark.parametrize(
    ("m", "V", "K"), [(1, 1, 1), (3, 37, 1), (3, 37, 37), (80, 6000, 10), (2, 50_001, 70)]
)
def test_kernel_and_definition_find_the_candidates(m, V, K):
    model = candidates_model()
    rng = np.random.default_rng(V)
    logits = rng.standard_normal((m, V)).astype(np.float32) * 4
    logits[:, V // 2 :] = logits[:, V // 2 :].round()  # many are equal
    logits[0, 1::5] = -np.inf
    places = np.stack([np.arange(m), np.arange(m) * 7 % V], axis=1)
    feeds = {"logits": logits, "num_candidates": np.array([K]), "places": places}
    (ids, scores, found), (expected_ids, expected_scores, expected_found) = (
        session_of(model, has_kernels=has_kernels).run(None, feeds) for has_kernels in (True, False)
    )
    np.testing.assert_array_equal(
        np.take_along_axis(logits, ids, 1), np.take_along_axis(logits, expected_ids, 1)
    )
    finite = np.isfinite(expected_scores)
    np.testing.assert_array_equal(ids[finite], expected_ids[finite])
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    exact = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(scores, np.take_along_axis(exact, ids, 1), atol=5e-6)
    np.testing.assert_allclose(expected_scores, scores, atol=3e-5)  # ONNX Runtime's is less exact
    np.testing.assert_allclose(found, exact[tuple(places.T)], atol=5e-6)
    np.testing.assert_allclose(expected_found, found, atol=3e-5)
    assert all(len(set(row)) == K for row in ids.tolist())


@pytest.mark.parametrize("name", ATTENTIONS)
def test_queries_of_another_width_are_refused_before_memory_is_read(name):
    G, K = 2, 8
    session = session_of(attention_of(name, 4, G, K, 0.2, 0.0), has_kernels=True)
    feeds = feeds_of(name, 4, G, K)
    for width in (16, 2):  # of keys and values
        wrong = np.zeros((B, G, C, width), feeds["key"].dtype)
        with pytest.raises(Exception, match=r"another width|d_head must be|INVALID_ARGUMENT"):
            session.run(None, feeds | {"key": wrong, "value": wrong})
