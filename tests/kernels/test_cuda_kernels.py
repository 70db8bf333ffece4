"""The CUDA kernels, compiled for the host; their PTX; and what they compute, by the definition."""

import ctypes
import shutil
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from seq2seq_serve import kernels
from tests.kernels.test_operators import FLOAT16, INT32, INT64, model_of, session_of, values_of

HERE = Path(__file__).parent
SOURCE = Path(kernels.__file__).parent / "cuda_kernels.cu"
LOG2_E = 1.4426950408889634
DTYPES = [torch.float16, torch.bfloat16]


class Attention(ctypes.Structure):
    """The argument of the kernel."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("queries", "added", "keys", "values", "last", "outputs", "bias")
        ),
        *(
            (name, ctypes.c_int)
            for name in (
                "query_stride",
                "num_heads",
                "num_groups",
                "num_positions",
                "d_head",
                "num_distances",
            )
        ),
        *((name, ctypes.c_float) for name in ("scale", "cap")),
    )


class Embedding(ctypes.Structure):
    """The argument of the kernel."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("ids", "previous", "table", "positions", "outputs", "lengths")
        ),
        *((name, ctypes.c_int) for name in ("vocab_size", "num_positions", "width")),
    )


class Gated(ctypes.Structure):
    """The argument of the kernel."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "outputs")),
        *((name, ctypes.c_int) for name in ("width", "activation")),
    )


class NormLinear(ctypes.Structure):
    """The argument of the kernels of a norm and a map of it."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("x", "residual", "x_bias", "scale", "shift", "weights", "bias")
        ),
        *((name, ctypes.c_void_p) for name in ("totals", "normalized", "outputs")),
        *((name, ctypes.c_int) for name in ("num_rows", "num_inputs", "num_outputs", "activation")),
        ("epsilon", ctypes.c_float),
    )


class Terms(ctypes.Structure):
    """The argument of the kernel."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "y", "weights", "ranks", "ids", "outputs")),
        ("distance", ctypes.c_int64),
        *(
            (name, ctypes.c_int)
            for name in ("num_inputs", "num_outputs", "most_rank", "num_adapters", "distance_of_ranks")
        ),
        ("ends", ctypes.c_int * 256),
    )


class MostProbable(ctypes.Structure):
    """The argument of the kernel."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("scores", "added", "logits", "ids")),
        ("vocab_size", ctypes.c_int),
    )


class Moves(ctypes.Structure):
    """The argument of the kernel."""

    _fields_ = (
        ("first", ctypes.c_void_p),
        *((f"{axis}_stride", ctypes.c_int64) for axis in ("tensor", "row", "outer")),
        *((name, ctypes.c_int) for name in ("num_outer", "position_size")),
        ("moves", ctypes.c_int32 * 4 * 64),
    )


@pytest.fixture(scope="module")
def host(tmp_path_factory) -> ctypes.CDLL:
    if not shutil.which("g++"):
        pytest.skip("there is no g++")
    path = tmp_path_factory.mktemp("host") / "kernels.so"
    command = ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", "-pthread", "-Wno-psabi", "-o", str(path)]
    subprocess.run([*command, str(HERE / "cuda_on_host.cpp")], check=True)
    return ctypes.CDLL(str(path))


def attend(query, keys, values, *, scale, cap, bias=None):
    """Attention of each head `(H, K)` over positions `(H, n, K)`, in float64."""
    scores = torch.einsum("hk,hnk->hn", query.double(), keys.double()) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if bias is not None:
        distances = torch.arange(scores.shape[1]).flip(0).clamp(max=bias.shape[1] - 1)
        scores += bias[:, distances].double()
    return torch.einsum("hn,hnk->hk", scores.softmax(-1), values.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("d_head", "num_heads", "num_groups", "num_threads", "cap", "appends", "num_distances"),
    [
        (64, 2, 2, 128, 0.0, True, 0),
        (64, 2, 2, 256, 0.0, False, 0),
        (8, 2, 1, 64, 3.0, True, 0),
        (128, 4, 2, 128, 0.0, True, 19),
        (64, 2, 2, 64, 0.0, True, 60),
        (256, 1, 1, 128, 0.0, False, 0),
    ],
)
def test_attention_is_that_of_float64_up_to_rounding(
    host, d_head, num_heads, num_groups, num_threads, cap, appends, num_distances, dtype
):
    chance = torch.Generator().manual_seed(0)
    B, H, G, C, K = 3, num_heads, num_groups, 37, d_head
    random = lambda *shape: torch.randn(*shape, generator=chance).to(dtype)  # noqa: E731
    packed = random(B, (H + 2 * G) * K) if appends else random(B, H * K)
    keys, values = random(B, G, C, K), random(B, G, C, K)
    before = keys.clone(), values.clone()
    last = torch.tensor([0, 17, 36], dtype=torch.int32)
    outputs = torch.full((B, H * K), torch.nan, dtype=dtype)
    scale = K**-0.5
    bias = random(H, num_distances) if num_distances else None
    work = Attention(
        packed.data_ptr(),
        packed.data_ptr() + 2 * H * K if appends else None,
        keys.data_ptr(),
        values.data_ptr(),
        last.data_ptr(),
        outputs.data_ptr(),
        None if bias is None else bias.data_ptr(),
        packed.shape[1],
        H,
        G,
        C,
        K,
        num_distances,
        scale * LOG2_E,
        cap,
    )
    host.run_attention(ctypes.byref(work), B, num_threads, dtype is torch.bfloat16)
    for row, position in enumerate(last.tolist()):
        for buffer, old, first in ((keys, before[0], H), (values, before[1], H + G)):
            if appends:
                old[row, :, position] = packed[row, first * K : (first + G) * K].view(G, K)
            assert torch.equal(buffer[row], old[row]), "another position was written"
        live = [one[row, :, : position + 1].repeat_interleave(H // G, dim=0) for one in (keys, values)]
        expected = attend(packed[row, : H * K].view(H, K), *live, scale=scale, cap=cap, bias=bias)
        given = outputs[row].view(H, K).double()
        torch.testing.assert_close(given, expected, rtol=0, atol=0.02 if dtype is torch.bfloat16 else 0.003)


def test_the_definition_of_attention_with_a_bias_is_the_same():
    chance = torch.Generator().manual_seed(0)
    B, H, G, C, K, D = 2, 4, 2, 24, 16, 9
    shapes = {
        "packed": (B, (H + 2 * G) * K),
        "past_key": (B, G, C, K),
        "past_value": (B, G, C, K),
        "bias": (H, D),
    }
    given = {name: torch.randn(*shape, generator=chance).half() for name, shape in shapes.items()}
    last = torch.tensor([3, 20], dtype=torch.int32)
    feeds = {name: tensor.numpy() for name, tensor in given.items()}
    feeds |= {"last_positions": last.numpy(), "capacity": np.array(C, np.int32)}
    order = ("packed", "past_key", "past_value", "last_positions", "bias", "capacity")
    types = {name: FLOAT16 if name in given else INT32 for name in order}
    inputs = values_of(types, [feeds[name].shape for name in order])
    attributes = {"num_heads": H, "kv_num_heads": G, "scale": 0.5, "softcap": 0.0, "max_distance": D - 1}
    outputs = dict.fromkeys(("attended", "key", "value"), FLOAT16)
    model = model_of("CudaBiasedCacheAttention", inputs, attributes, outputs)
    attended, *written = session_of(model, has_kernels=False).run(None, feeds)
    for row, position in enumerate(last.tolist()):
        query, *new = given["packed"][row].view(-1, K).split([H, G, G])
        for buffer, rows in zip(written, new, strict=True):
            assert np.array_equal(buffer[row, :, position], rows)
        live = [
            torch.from_numpy(buffer[row, :, : position + 1]).repeat_interleave(H // G, 0)
            for buffer in written
        ]
        expected = attend(query, *live, scale=0.5, cap=0, bias=given["bias"])
        np.testing.assert_allclose(attended[row].reshape(H, K), expected, atol=0.003)


def embeddings(width, dtype):
    """Ids, the positions before theirs, and tables; the definition cannot take the last two rows."""
    chance = torch.Generator().manual_seed(0)
    tables = [torch.randn(size, width, generator=chance).to(dtype) for size in (13, 7)]
    return torch.tensor([12, 0, 5, 13, -1]), torch.tensor([-1, 5, 2, 6, 0], dtype=torch.int32), *tables


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 520])
def test_embeddings_are_added_and_lengths_written_in_place(host, width, dtype):
    ids, lengths, table, positions = embeddings(width, dtype)
    outputs = torch.full((len(ids), width), torch.nan, dtype=dtype)
    before = lengths.clone()
    pointers = (tensor.data_ptr() for tensor in (ids, lengths, table, positions, outputs, lengths))
    work = Embedding(*pointers, len(table), len(positions), width)
    host.run_embedding(ctypes.byref(work), len(ids), dtype is torch.bfloat16)
    assert torch.equal(lengths, before + 1)
    assert torch.equal(outputs[:3], table[ids[:3]] + positions[lengths[:3]])
    assert torch.equal(outputs[3], torch.zeros(width, dtype=dtype))
    assert torch.equal(outputs[4], positions[1])


def test_the_definition_of_embeddings_is_the_same():
    names, width = ("ids", "previous", "table", "positions"), 8
    ids, lengths, table, positions = embeddings(width, torch.float16)
    feeds = dict(zip(names, (ids[:3], lengths[:3], table, positions), strict=True))
    types = dict(zip(names, (INT64, INT32, FLOAT16, FLOAT16), strict=True))
    inputs = values_of(types, [tensor.shape for tensor in feeds.values()])
    model = model_of("CudaEmbedding", inputs, {}, {"embedded": FLOAT16, "lengths": INT32})
    session = session_of(model, has_kernels=False)
    embedded, following = session.run(None, {name: tensor.numpy() for name, tensor in feeds.items()})
    assert np.array_equal(following, lengths[:3] + 1)
    assert np.array_equal(embedded, table[ids[:3]] + positions[following])


GATES = {"Relu": torch.relu, "Gelu": F.gelu, "FastGelu": partial(F.gelu, approximate="tanh"), "Silu": F.silu}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [24, 1032])
@pytest.mark.parametrize("name", GATES)
def test_gates_are_those_of_float64_up_to_rounding(host, name, width, dtype):
    x = 3 * torch.randn(3, 2 * width, generator=torch.Generator().manual_seed(0)).to(dtype)
    outputs = torch.full((3, width), torch.nan, dtype=dtype)
    work = Gated(x.data_ptr(), outputs.data_ptr(), width, 1 + list(GATES).index(name))
    host.run_gated(ctypes.byref(work), 3, dtype is torch.bfloat16)
    gates, numbers = x.double().chunk(2, dim=1)
    tolerance = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-11
    torch.testing.assert_close(outputs.double(), GATES[name](gates) * numbers, rtol=tolerance, atol=1e-6)
    if dtype is torch.float16:
        inputs = values_of({"x": FLOAT16}, [x.shape])
        session = session_of(model_of(f"CudaGated{name}", inputs, {}, {"output": FLOAT16}), has_kernels=False)
        [defined] = session.run(None, {"x": x.numpy()})
        np.testing.assert_allclose(defined, outputs, rtol=4e-3, atol=1e-3)


@dataclass
class NormCase:
    """Random inputs of a norm and a map of it, and outputs that are NaN.

    Attributes:
        activation: As the kernels number it.
    """

    num_rows: int
    num_inputs: int
    num_outputs: int
    dtype: torch.dtype
    is_rms: bool = False
    has_biases: bool = True
    activation: int = 0

    def __post_init__(self) -> None:
        chance = torch.Generator().manual_seed(0)
        B, I, O = self.num_rows, self.num_inputs, self.num_outputs  # noqa: E741
        random = lambda *shape: torch.randn(*shape, generator=chance).to(self.dtype)  # noqa: E731
        self.x, self.residual, self.scale = random(B, I) + 1, random(B, I), random(I)
        self.shift = None if self.is_rms else random(I)
        self.weights = random(I, O) / I**0.5
        self.x_bias, self.bias = (random(I), random(O)) if self.has_biases else (None, None)
        self.totals, self.normalized, self.outputs = (
            torch.full((B, width), torch.nan, dtype=self.dtype) for width in (I, I, O)
        )

    def work(self) -> ctypes.c_void_p:
        tensors = [getattr(self, name) for name, _ in NormLinear._fields_[:10]]
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        sizes = self.num_rows, self.num_inputs, self.num_outputs
        return ctypes.byref(NormLinear(*pointers, *sizes, self.activation, 1e-5))

    def expected(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Totals, their norm and its map, in float64 from inputs as they are rounded before each."""
        nothing = torch.zeros(1)
        total = self.x.double() + self.residual.double()
        total += (nothing if self.x_bias is None else self.x_bias).double()
        rounded, width = total.to(self.dtype).double(), (self.num_inputs,)
        if self.shift is None:
            normalized = F.rms_norm(rounded, width, self.scale.double(), 1e-5)
        else:
            both = self.scale.double(), self.shift.double()
            normalized = F.layer_norm(rounded, width, *both, 1e-5)
        return total, normalized, self.mapped(normalized.to(self.dtype).double() @ self.weights.double())

    def mapped(self, products: torch.Tensor) -> torch.Tensor:
        """Outputs, of products without the bias."""
        activations = lambda x: x, torch.relu, F.gelu
        return activations[self.activation](products + (0 if self.bias is None else self.bias.double()))

    def compare(self, *pairs: tuple[torch.Tensor, torch.Tensor], num_roundings: int = 1) -> None:
        tolerance = num_roundings * (2.0**-8 if self.dtype is torch.bfloat16 else 2.0**-11)
        for found, expected in pairs:
            torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((11, 512, 72), {"activation": 1}),
        ((1, 264, 32), {"has_biases": False}),
        ((8, 520, 40), {"activation": 2}),
        ((3, 128, 32), {"is_rms": True, "activation": 1}),
        ((2, 136, 64), {"is_rms": True, "has_biases": False}),
    ],
)
def test_a_norm_and_a_map_of_it_are_those_of_float64_up_to_rounding(host, sizes, options, dtype):
    case = NormCase(*sizes, dtype, **options)
    host.run_norm_linear(case.work(), dtype is torch.bfloat16)
    total, normalized, outputs = case.expected()
    case.compare((case.totals, total), (case.normalized, normalized), (case.outputs, outputs))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("CudaNormLinear", {}),
        ("CudaNormLinearGelu", {"has_biases": False, "activation": 2}),
        ("CudaRmsNormLinearRelu", {"is_rms": True, "activation": 1}),
    ],
)
def test_the_definition_of_a_norm_and_a_map_of_it_is_the_same(name, options):
    case = NormCase(3, 128, 32, torch.float16, **options)
    names = ("x", "residual", "weights", "scale", "shift", "x_bias", "bias")
    given = {name: tensor for name in names if (tensor := getattr(case, name)) is not None}
    values = values_of(dict.fromkeys(given, FLOAT16), [tensor.shape for tensor in given.values()])
    inputs = dict(zip(given, values, strict=True))
    outputs = dict.fromkeys(("output", "normalized", "total"), FLOAT16)
    model = model_of(name, [inputs.get(name) for name in names], {"epsilon": 1e-5}, outputs)
    found = session_of(model, has_kernels=False).run(None, {n: t.numpy() for n, t in given.items()})
    # ONNX Runtime also rounds between the steps of a sum, a norm, and an end of a map.
    case.compare(*zip(map(torch.from_numpy, found), reversed(case.expected()), strict=True), num_roundings=4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_map_of_its_norm_beside_any_others(host, dtype):
    together, alone = NormCase(9, 256, 32, dtype), NormCase(9, 256, 32, dtype)
    host.run_norm_linear(together.work(), dtype is torch.bfloat16)
    alone.x, alone.residual, alone.num_rows = together.x[5:6], together.residual[5:6], 1
    host.run_norm_linear(alone.work(), dtype is torch.bfloat16)
    assert torch.equal(together.outputs[5], alone.outputs[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("is_rms", "activation"), [(False, 0), (True, 1), (False, 2)])
def test_norms_of_many_rows_and_ends_of_their_maps_are_those_of_float64(host, is_rms, activation, dtype):
    case = NormCase(5, 264, 300, dtype, is_rms=is_rms, activation=activation)
    host.run_norm(case.work(), dtype is torch.bfloat16)
    products = torch.randn(5, 300, generator=torch.Generator().manual_seed(1)).to(dtype)
    case.outputs[:] = products
    host.run_finish(case.work(), dtype is torch.bfloat16)
    total, normalized, _ = case.expected()
    finished = case.mapped(products.double())
    case.compare((case.totals, total), (case.normalized, normalized), (case.outputs, finished))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_inputs", "widths", "R"), [(512, (64, 128, 64), 16), (13, (3, 70), 5), (300, (9,), 1)]
)
@pytest.mark.parametrize("is_in_place", [True, False])
def test_terms_of_adapters_are_those_of_float64_up_to_rounding(
    host, num_inputs, widths, R, is_in_place, dtype
):
    chance = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(*shape, generator=chance)  # noqa: E731
    K, I, O, P = 3, num_inputs, sum(widths), len(widths)  # noqa: E741
    ids = torch.tensor([2, -1, 0, 2, 1, K])
    N = len(ids)
    x, y = random(N, I).to(dtype), random(N, O).to(dtype)
    y[1, 0], x[1, 0], y[5] = torch.nan, torch.nan, -0.0
    weights = random(K, R * (P * I + O)).to(torch.float16) / 4
    ranks = torch.randint(1, R + 1, (K, P + 1), generator=chance, dtype=torch.int32)
    ranks[0], ranks[1, 0], ranks[2, 0] = R, 0, R + 9  # the last one counts as R
    outputs = y.clone() if is_in_place else torch.full((N, O), torch.nan, dtype=dtype)
    work = Terms(
        x.data_ptr(),
        (outputs if is_in_place else y).data_ptr(),
        weights.data_ptr(),
        ranks.data_ptr(),
        ids.data_ptr(),
        outputs.data_ptr(),
        weights.shape[1],
        I,
        O,
        R,
        K,
        P + 1,
    )
    work.ends[:P] = np.cumsum(widths).tolist()
    host.run_low_rank(ctypes.byref(work), N, P, 64, dtype is torch.bfloat16)
    expected = y.double()
    for row, adapter in enumerate(ids.tolist()):
        if 0 <= adapter < K:
            a, b = weights[adapter].double().split([R * P * I, R * O])
            reduced = a.view(P, R, I) @ x[row].double()
            reduced *= torch.arange(R) < ranks[adapter, :P, None]
            parts = torch.arange(P).repeat_interleave(torch.tensor(widths))
            expected[row] += (reduced[parts].T * b.view(R, O)).sum(0)
    tolerance = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-10
    torch.testing.assert_close(
        outputs.double(), expected, rtol=tolerance, atol=tolerance / 10, equal_nan=True
    )
    untouched = [1, 5]
    assert torch.equal(outputs[untouched].view(torch.int16), y[untouched].view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [4 * 261, 1001])
def test_the_most_probable_token_is_the_first_of_equal_ones(host, vocab_size, dtype):
    scores = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    scores[0] = 0
    scores[1, [7, 600]] = 9
    scores[2] = torch.nan
    added = torch.zeros(vocab_size, dtype=dtype)
    added[scores[3].argmax()] = -torch.inf
    logits = torch.full(scores.shape, torch.nan)
    ids = torch.full((4,), -2)
    work = MostProbable(scores.data_ptr(), added.data_ptr(), logits.data_ptr(), ids.data_ptr(), vocab_size)
    host.run_most_probable(ctypes.byref(work), 4, 128, dtype is torch.bfloat16)
    assert torch.equal(logits.nan_to_num(5), scores.float().nan_to_num(5))
    assert ids.tolist() == [0, 7, -1, int((logits[3] + added).argmax())]


def test_moves_copy_live_positions_and_nothing_more(host):
    G, N, H, C, K = 2, 5, 3, 7, 16
    rng = np.random.default_rng(0)
    buffer = rng.integers(0, 1 << 16, (G, N, H, C, K), np.uint16)
    expected = buffer.copy()
    moves = [(4, 0, 0, 7), (3, 1, 2, 3)]
    strides = [stride // 16 for stride in buffer.strides]
    work = Moves(buffer.ctypes.data, *strides[:3], H, strides[3])
    for place, move in zip(work.moves, moves, strict=False):
        place[:] = move
    for from_row, to_row, start, count in moves:
        live = slice(start, start + count)
        expected[:, to_row, :, live] = expected[:, from_row, :, live]
    host.run_move(ctypes.byref(work), G * H, len(moves))
    assert np.array_equal(buffer, expected)


def test_the_ptx_is_that_of_the_source(tmp_path):
    compiler = shutil.which("nvcc")
    committed = SOURCE.with_suffix(".ptx").read_text()
    if not compiler:
        pytest.skip("there is no nvcc")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    if committed.splitlines()[4].removeprefix("// ").split(", V")[1] not in version:
        pytest.skip("it was compiled by another version of nvcc")
    made = tmp_path / "made.ptx"
    subprocess.run([compiler, *kernels.PTX_FLAGS, "-o", str(made), str(SOURCE)], check=True)
    assert made.read_text() == committed, "run `make ptx`"
