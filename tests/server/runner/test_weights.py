"""A graph's weights are found in memory, and the graph forgets its file."""

import pytest

from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.protos.onnx_weights_pb2 import ExternalData, Graph, Model, Tensor
from seq2seq_serve.server.runner.weights import take_weights


def graph_of(*, start: int, length: int, dims: list[int]) -> bytes:
    entries = {"location": "weights.bin", "offset": str(start), "length": str(length)}
    data = [ExternalData(key=key, value=value) for key, value in entries.items()]
    tensor = Tensor(name="w", data_type=1, dims=dims, external_data=data)
    return Model(graph=Graph(initializer=[tensor])).SerializeToString()


def test_only_the_name_of_the_file_changes(random_bundle):
    files = random_bundle.read_variant(Precision.FP32)
    for verb in files.graphs:
        graph, weights = take_weights(files.graphs[verb], files.weights, "wherever.it")
        assert weights
        assert b"weights.bin" not in graph
        assert (
            take_weights(graph, files.weights, "weights.bin")[0]
            == take_weights(files.graphs[verb], files.weights, "weights.bin")[0]
        )


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
