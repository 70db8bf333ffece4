"""The rows that live as long as the server, on the host and on a device."""

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.manifest import TensorSpec
from seq2seq_serve.bundle.names import Axis, Role
from seq2seq_serve.server.engine.plan import Move
from seq2seq_serve.server.engine.request import Request
from seq2seq_serve.server.engine.state import Search, Sequence
from seq2seq_serve.server.runner.buffers import COLUMNS, Buffers, Columns, independent_batches
from seq2seq_serve.server.runner.device import OnnxDevice
from tests.server.runner.test_runner import FarDevice

HOST, FAR_DEVICE = (kind("cpu", num_threads=2) for kind in (OnnxDevice, FarDevice))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("device", [HOST, FAR_DEVICE])
def test_a_graph_reads_and_writes_rows_in_place_whatever_their_element_type(dtype, device):
    """bfloat16 too, which numpy lacks: it is bound by ONNX's number over the bits."""
    specs = [TensorSpec(name, dtype, (Axis.BATCH, 8), Role.CACHE) for name in ("a", "b")]
    buffers = Buffers(specs, (4, 8), device)
    number = helper.np_dtype_to_tensor_dtype(np.dtype(dtype)) if dtype != "bfloat16" else 16
    tensors = [helper.make_tensor_value_info(name, number, ["batch", 8]) for name in ("b", names.out("a"))]
    node = helper.make_node("Identity", ["b"], [names.out("a")])
    graph = helper.make_graph([node], "copy", tensors[:1], tensors[1:])
    opset = [helper.make_opsetid("", 21)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    ones = np.full((2, 4, 8), 1, np.uint16 if dtype == "bfloat16" else dtype)
    ones[0] = 0
    write(buffers, ones)
    binding = session.io_binding()
    buffers.bind_input(binding, "b", 1, 2)
    buffers.bind_output(binding, names.out("a"), 2, 2)
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(read(buffers)[0, :, 0], [0, 0, 1, 1])


def write(buffers: Buffers, array: np.ndarray) -> None:
    if buffers._device.is_host:
        buffers._host[:] = array
    else:
        buffers._value.update_inplace(array)


def read(buffers: Buffers) -> np.ndarray:
    return buffers._host if buffers._device.is_host else buffers._value.numpy()


def moves_between(num_rows: int) -> st.SearchStrategy[list[Move]]:
    rows, lengths = st.integers(0, num_rows - 1), st.integers(0, 4)
    moves = st.builds(Move, rows, rows, lengths, lengths, num_shared=st.just(0))
    return st.lists(moves, max_size=12)


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        ([], []),
        ([(3, 0), (4, 1)], [2]),
        ([(3, 0), (3, 1)], [2]),  # one parent, two children
        ([(3, 0), (0, 1)], [1, 1]),  # what was written is read
        ([(3, 0), (4, 0)], [1, 1]),  # written twice
        ([(3, 4), (2, 3), (1, 0)], [1, 2]),  # what was read is written
    ],
)
def test_only_dependent_moves_are_put_into_separate_batches(rows, sizes):
    batches = independent_batches(Move(*pair, cache_length=1, memory_length=1) for pair in rows)
    assert list(map(len, batches)) == sizes


KINDS = {
    "cache": (Role.CACHE, (Axis.BATCH, 2, Axis.CACHE_CAPACITY, 4), (2, 4, 4)),
    "memory": (Role.MEMORY, (Axis.BATCH, 2, Axis.MEMORY_CAPACITY, 4), (2, 4, 4)),
    "last position": (Role.MEMORY, (Axis.BATCH, 1, 8), (1, 8)),
}


@pytest.mark.parametrize("kind", KINDS)
@given(moves=moves_between(5))
def test_moves_end_alike_on_the_host_and_on_a_device(kind, moves):
    """In what is live: a device copies whole rows. A move of length 0 leaves rows as they are."""
    role, axes, row_shape = KINDS[kind]
    specs = [TensorSpec(name, "float32", axes, role) for name in "abc"]
    before = np.arange(3 * 5 * np.prod(row_shape), dtype=np.float32).reshape(3, 5, *row_shape)
    expected = before.copy()
    for move in moves:
        if move.cache_length if role is Role.CACHE else move.memory_length:
            expected[:, move.to_row] = expected[:, move.from_row]
    far = Buffers(specs, (5, *row_shape), FAR_DEVICE)
    write(far, before)
    num_bytes = far.move_all(moves)
    np.testing.assert_array_equal(read(far), expected)
    near = Buffers(specs, (5, *row_shape), HOST)
    write(near, before)
    whole = [
        Move(move.from_row, move.to_row, 4 * (move.cache_length > 0), 4 * (move.memory_length > 0))
        for move in moves
    ]
    assert near.move_all(whole) == num_bytes
    np.testing.assert_array_equal(read(near), expected)


def test_on_the_host_only_live_positions_are_copied():
    role, axes, row_shape = KINDS["memory"]
    buffers = Buffers([TensorSpec("a", "float32", axes, role)], (5, *row_shape), HOST)
    write(buffers, np.arange(5 * np.prod(row_shape), dtype=np.float32).reshape(1, 5, *row_shape))
    before = read(buffers)[0].copy()
    num_bytes = buffers.move_all([Move(4, 0, cache_length=1, memory_length=3)])
    assert num_bytes == 2 * 3 * 4 * 4
    np.testing.assert_array_equal(read(buffers)[0, 0, :, :3], before[4, :, :3])
    np.testing.assert_array_equal(read(buffers)[0, 0, :, 3:], before[0, :, 3:])


@given(st.lists(st.tuples(st.integers(1, 7), st.integers(0, 5)), max_size=6))
def test_rows_keep_their_content_when_the_capacity_changes(history):
    role, axes, _ = KINDS["memory"]
    buffers = Buffers([TensorSpec(name, "float32", axes, role) for name in "ab"], (5, 2, 7, 4), HOST)
    chance = np.random.default_rng(0)
    write(buffers, chance.random((2, 5, 2, 7, 4), np.float32))
    for capacity, num_rows in history:
        before = read(buffers)[:, :num_rows].copy()
        buffers.fit(capacity, num_rows)
        after = read(buffers)
        assert after.shape == (2, 5, 2, capacity, 4)
        both = min(capacity, before.shape[3])
        np.testing.assert_array_equal(after[:, :num_rows, :, :both], before[:, :, :, :both])
        assert buffers._pointer("b", 3, copy=0) == after[1, 3].ctypes.data
        write(buffers, chance.random(after.shape, np.float32))


def test_a_move_leaves_out_what_both_rows_share():
    role, axes, row_shape = KINDS["cache"]
    buffers = Buffers([TensorSpec("a", "float32", axes, role)], (5, *row_shape), HOST)
    write(buffers, np.arange(5 * np.prod(row_shape), dtype=np.float32).reshape(1, 5, *row_shape))
    before = read(buffers)[0].copy()
    num_bytes = buffers.move_all([Move(4, 0, cache_length=3, memory_length=0, num_shared=2)])
    assert num_bytes == 2 * 1 * 4 * 4
    np.testing.assert_array_equal(read(buffers)[0, 0, :, 2], before[4, :, 2])
    np.testing.assert_array_equal(read(buffers)[0, 0, :, :2], before[0, :, :2])


def test_the_owner_of_a_row_is_the_keeper_of_its_request():
    one, other, third = (Search(Request("r", {}, 3, 5, arrival=0.0), (1,)) for _ in range(3))
    rows = tuple(Sequence(search, 1, row=row) for row, search in enumerate((one, other, one, third, other)))
    one.memory_owner, other.memory_owner, third.memory_owner = rows[2], rows[1], rows[3]
    assert COLUMNS[names.OWNERS].of_rows(rows) == [2, 1, 2, 3, 1]


@pytest.mark.parametrize("device", [HOST, FAR_DEVICE])
def test_columns_know_rows_that_have_grown_whoever_comes_and_leaves(device):
    """A step adds one to the previous lengths itself, on a device beside the copy of the host."""
    columns = Columns(COLUMNS, 8, 97, device)

    def arrays() -> dict[str, np.ndarray]:
        return {
            name: array if device.is_host else columns._values[name].numpy().copy()
            for name, array in columns._host.items()
        }

    def new_row(number: int) -> Sequence:
        search = Search(Request("r", {}, 3 + number, 20, arrival=0.0), (1,))
        return Sequence(search, 1, token_ids=[7] * number, num_simple=9)

    first = tuple(map(new_row, range(4)))
    others = (*first, new_row(5)), (*first[:1], new_row(2), *first[2:]), first[2:]
    for turn, rows in enumerate([first, first, *others]):
        for slot, row in enumerate(rows):
            row.row = slot
        columns.fill(rows, have_grown=turn > 0)
        for name, values in arrays().items():
            assert values[: len(rows)].tolist() == COLUMNS[name].of_rows(rows), (turn, name)
        stepped = arrays()
        stepped[names.PREVIOUS_LENGTHS][: len(rows)] += 1
        stepped[names.TOKEN_IDS][: len(rows)] = [10 * turn + slot for slot in range(len(rows))]
        if not device.is_host:
            for name in (names.PREVIOUS_LENGTHS, names.TOKEN_IDS):
                columns._values[name].update_inplace(stepped[name])
        for row, token_id in zip(rows, columns.read_token_ids(len(rows)), strict=True):
            row.token_ids.append(token_id)
            row.next_token_id = token_id
