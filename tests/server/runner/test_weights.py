"""A graph's weights are found in memory, and the graph forgets its file."""

import math

import numpy as np
import pytest

from seq2seq_serve import kernels
from seq2seq_serve.bundle.manifest import VariantFiles
from seq2seq_serve.bundle.names import Verb
from seq2seq_serve.protos.onnx_weights_pb2 import Attribute, ExternalData, Graph, Model, Node, Tensor
from seq2seq_serve.server.runner import weights
from seq2seq_serve.server.runner.weights import PackedMaps, take_weights

DOMAIN = "seq2seq_serve"


def graph_of(*, start: int, length: int, dims: list[int]) -> bytes:
    entries = {"location": "weights.bin", "offset": str(start), "length": str(length)}
    data = [ExternalData(key=key, value=value) for key, value in entries.items()]
    tensor = Tensor(name="w", data_type=1, dims=dims, external_data=data)
    return Model(graph=Graph(initializer=[tensor])).SerializeToString()


def test_a_weight_is_a_view_of_its_bytes():
    content = memoryview(bytes(range(64)))
    _, [weight] = take_weights(graph_of(start=16, length=24, dims=[2, 3]), content, "")
    assert (weight.name, weight.element_type, weight.bits.shape) == ("w", 1, (2, 3))
    assert weight.bits.tobytes() == content[16:40]
    assert not weight.bits.flags.owndata


@pytest.mark.parametrize(
    ("start", "length", "dims"), [(60, 8, [2]), (-4, 8, [2]), (0, 8, [3]), (0, 0, [0]), (0, 10**12, [5])]
)
def test_a_weight_outside_of_its_file_is_refused(start, length, dims):
    with pytest.raises(ValueError, match=r"the weight w is bytes .* of a file of 64, and has . values"):
        take_weights(graph_of(start=start, length=length, dims=dims), memoryview(bytes(64)), "")


def graph_of_maps(*places: tuple[int, list[int]]) -> bytes:
    """A graph of int8 maps, whose weights (I, O) begin at these places."""
    model = Model()
    for number, (start, dims) in enumerate(places):
        entries = {"location": "weights.bin", "offset": str(start), "length": str(math.prod(dims))}
        data = [ExternalData(key=key, value=value) for key, value in entries.items()]
        model.graph.initializer.append(Tensor(name=f"w{number}", data_type=2, dims=dims, external_data=data))
        model.graph.node.append(Node(domain=DOMAIN, op_type="QuantizedLinear", input=["x", f"w{number}"]))
    return model.SerializeToString()


def packed_files(graphs: dict[Verb, bytes], content: bytes, asked: list[int] | None = None) -> VariantFiles:
    """The files as the server packs them; each byte is read when it is first asked for."""
    layout = PackedMaps(graphs, len(content))
    assert layout.num_bytes % 64 == 0
    assert sum(extent.num_bytes for extent in layout.extents) == len(content)
    memory = memoryview(bytearray(layout.num_bytes))
    num_read = 0

    def come(num_bytes: int) -> None:
        nonlocal num_read
        if asked is not None:
            asked.append(num_bytes)
        start = 0
        for extent in layout.extents:
            first, last = max(start, num_read), min(start + extent.num_bytes, num_bytes)
            if first < last:
                memory[extent.place + first - start : extent.place + last - start] = content[first:last]
            start += extent.num_bytes
        num_read = max(num_read, num_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "usable_cpus", lambda: 1)  # one is packed after the other
        files = layout.finish(memory, come)
    come(len(content))
    return files


def test_weights_are_packed_as_they_come():
    content = bytes(range(256)) * 16
    graphs = {Verb.STEP: graph_of_maps((2048, [64, 32]), (64, [16, 32]), (600, [40, 33]))}
    asked: list[int] = []
    packed = packed_files(graphs, content, asked)
    ends = [600, 2048, 4096] if kernels.instructions() else []
    assert asked == [*ends, 4096], "with the bytes between a weight and the next one"
    _, found = take_weights(packed.graphs[Verb.STEP], packed.weights, "")
    for weight, (start, dims) in zip(found, ((2048, [64, 32]), (64, [16, 32]), (600, [40, 33])), strict=True):
        np.testing.assert_array_equal(weight.bits, packed_here(content, start, dims))
        assert (weight.bits.ctypes.data - np.frombuffer(packed.weights, np.uint8).ctypes.data) % 64 == 0


def packed_here(content: bytes, start: int, dims: list[int]) -> np.ndarray:
    """The weights (I, O) that begin there as they lie in memory: packed, if anything packs them."""
    raw = np.frombuffer(content[start : start + math.prod(dims)], np.uint8).reshape(dims)
    shape = kernels.packed_shape(raw.shape, is_int8=True)
    if shape is None:
        return raw
    expected = np.zeros(shape, np.uint8)
    kernels.pack(raw, expected)
    return expected


def test_weights_that_share_bytes_with_packed_ones_stay_as_they_are():
    """Equal bytes, such as zeros, are stored once."""
    content = bytes(range(256)) * 4
    model = Model.FromString(graph_of_maps((0, [16, 32]), (0, [32, 16]), (256, [16, 16])))
    model.graph.node[1].op_type = model.graph.node[2].op_type = "Gather"
    packed = packed_files({Verb.STEP: model.SerializeToString()}, content)
    one, *others = take_weights(packed.graphs[Verb.STEP], packed.weights, "")[1]
    np.testing.assert_array_equal(one.bits, packed_here(content, 0, [16, 32]))
    assert [other.bits.tobytes() for other in others] == [content[:512], content[256:512]]


def test_packed_weights_lie_apart_and_once_for_all_graphs():
    """Also those of other shapes whose equal bytes are stored once, such as zeros."""
    content = bytes(range(256)) * 64
    graphs = {
        Verb.ENCODE: graph_of_maps((0, [16, 32])),
        Verb.STEP: graph_of_maps((0, [16, 32]), (4096, [80, 60]), (0, [32, 16]), (8960, [16, 16])),
    }
    packed = packed_files(graphs, content)
    found = {verb: take_weights(graph, packed.weights, "")[1] for verb, graph in packed.graphs.items()}
    one, other, equal_bytes, neighbour = found[Verb.STEP]
    assert (one.bits == found[Verb.ENCODE][0].bits).all()
    assert one.bits.ctypes.data == found[Verb.ENCODE][0].bits.ctypes.data
    for weight, dims, start in (
        (one, [16, 32], 0),
        (other, [80, 60], 4096),
        (equal_bytes, [32, 16], 0),
        (neighbour, [16, 16], 8960),
    ):
        np.testing.assert_array_equal(weight.bits, packed_here(content, start, dims))


@pytest.mark.skipif(not kernels.instructions(), reason="nothing packs weights here")
@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([(0, [64, 64])], "bytes 0 to 4096 of a file of 2048"),
        ([(0, [-16, -32])], "has 512 values"),
    ],
)
def test_weights_outside_of_their_file_are_not_packed(places, message):
    with pytest.raises(ValueError, match=message):
        PackedMaps({Verb.STEP: graph_of_maps(*places)}, 2048)


def float_graph(*nodes: Node, is_int8: bool = False) -> bytes:
    """A graph whose nodes read one matrix (40, 24) of float32, at the beginning of the file of weights."""
    entries = {"location": "weights.bin", "offset": "0", "length": str(40 * 24 * (1 if is_int8 else 4))}
    data = [ExternalData(key=key, value=value) for key, value in entries.items()]
    tensor = Tensor(name="w", data_type=2 if is_int8 else 1, dims=[40, 24], external_data=data)
    return Model(graph=Graph(initializer=[tensor], node=nodes)).SerializeToString()


@pytest.mark.skipif(not kernels.instructions(), reason="nothing packs weights here")
def test_a_matrix_that_other_operators_read_is_not_packed():
    """A table of embeddings is shared with the output projection, if both operators are the project's own."""
    content = np.linspace(0, 1, 40 * 24, dtype=np.float32).tobytes()
    linear, look_up, int8, int8_look_up, choice = (
        Node(domain=DOMAIN, op_type=name, input=["x", "w"])
        for name in ("Linear", "Embedding", "QuantizedLinear", "QuantizedEmbedding", "Choice")
    )
    gather = Node(op_type="Gather", input=["w", "ids"])
    foreign = Node(domain="other", op_type="Linear", input=["x", "w"])
    branching = Node(op_type="If", input=["x"], attribute=[Attribute(g=Graph(node=[linear]))])

    def shapes(*graphs: bytes) -> list[tuple[int, ...]]:
        packed = packed_files(dict(zip(Verb, graphs, strict=False)), content)
        found = [take_weights(graph, packed.weights, "")[1] for graph in packed.graphs.values()]
        return [weight.bits.shape for [weight] in found]

    assert shapes(float_graph(linear, look_up), float_graph(look_up)) == [(4, 24, 16)] * 2
    assert shapes(float_graph(linear), float_graph(gather)) == [(40, 24)] * 2
    assert shapes(float_graph(linear, gather)) == [(40, 24)]
    assert shapes(float_graph(look_up)) == [(40, 24)]
    packed = kernels.packed_shape((40, 24), is_int8=True)
    for nodes in ([int8, int8_look_up], [int8_look_up]):
        assert shapes(float_graph(*nodes, is_int8=True)) == [packed]
    assert shapes(float_graph(int8, gather, is_int8=True)) == [(40, 24)]
    for other in (int8, choice, foreign, branching):
        assert shapes(float_graph(linear, other)) == shapes(float_graph(other)) == [(40, 24)]


@pytest.mark.skipif(not kernels.instructions(), reason="nothing packs weights here")
def test_weights_that_half_precision_has_take_half_of_their_memory():
    halves = np.linspace(0, 1, 40 * 24, dtype=np.float16).reshape(40, 24)
    nodes = [Node(domain=DOMAIN, op_type=name, input=["x", "w"]) for name in ("Linear", "Embedding")]
    given = packed_files({Verb.STEP: float_graph(*nodes)}, halves.astype(np.float32).tobytes())
    [weight] = take_weights(given.graphs[Verb.STEP], given.weights, "")[1]
    assert weight.bits.shape == (4, 24, 8)
    panels = weight.bits.view(np.float16).reshape(4, 24, 16).transpose(0, 2, 1).reshape(64, 24)
    np.testing.assert_array_equal(panels, np.pad(halves, ((0, 24), (0, 0))))


@pytest.mark.parametrize("data_type", [10, 0, 2])
def test_a_weight_whose_type_has_another_size_is_refused(data_type):
    """Before anything is packed, which would write beyond its memory."""
    model = Model.FromString(float_graph(Node(domain=DOMAIN, op_type="Linear", input=["x", "w"])))
    model.graph.initializer[0].data_type = data_type
    with pytest.raises(ValueError, match=f"960 values of ONNX's type {data_type}"):
        PackedMaps({Verb.STEP: model.SerializeToString()}, 40 * 24 * 4)


@pytest.mark.skipif(not kernels.instructions(), reason="nothing packs weights here")
def test_weights_that_would_take_far_more_memory_than_their_file_are_refused():
    model = Model()
    for number in range(300):  # rows of one output are padded to 32
        entries = {"location": "weights.bin", "offset": str(4 * number), "length": str(4 * 4000)}
        data = [ExternalData(key=key, value=value) for key, value in entries.items()]
        model.graph.initializer.append(
            Tensor(name=f"w{number}", data_type=1, dims=[1, 4000], external_data=data)
        )
        model.graph.node.append(Node(domain=DOMAIN, op_type="Linear", input=["x", f"w{number}"]))
    with pytest.raises(ValueError, match="weights of 32768 bytes would take"):
        PackedMaps({Verb.STEP: model.SerializeToString()}, 2**15)
