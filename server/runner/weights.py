"""Finds a graph's weights in its bundle's file of weights, as ONNX's format defines."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from seq2seq_serve import kernels
from seq2seq_serve.bundle.manifest import VariantFiles
from seq2seq_serve.protos.onnx_weights_pb2 import Model, Tensor
from seq2seq_serve.server.engine.request import Array

_LOCATION, _OFFSET, _LENGTH = "location", "offset", "length"
_INT8_MAPS = (
    "QuantizedLinear",
    "QuantizedChoice",
)  # operators of `kernels`, whose second input are int8 weights
_LINE_BYTES = 64


@dataclass(frozen=True, eq=False)
class Weight:
    """One weight of a graph.

    Attributes:
        element_type: ONNX's number of the type.
        bits: The values as unsigned integers of the elements' size; a view into the file's content.
    """

    name: str
    element_type: int
    bits: Array


def take_weights(graph: bytes, content: memoryview, nowhere: str) -> tuple[bytes, list[Weight]]:
    """Find a graph's weights in memory, and remove the graph's reference to their file.

    Args:
        graph: An ONNX model.
        content: The content of its file of weights.
        nowhere: The file that the graph names instead.

    Returns:
        The graph, and its weights without the small ones, which the graph itself contains.

    Raises:
        ValueError: A weight lies outside the content.
    """
    model = Model.FromString(graph)
    weights = []
    for tensor in model.graph.initializer:
        if tensor.external_data:
            weights.append(_weight(tensor, content))
            for entry in tensor.external_data:
                if entry.key == _LOCATION:
                    entry.value = nowhere
    return model.SerializeToString(), weights


def pack_int8_maps(files: VariantFiles) -> VariantFiles:
    """Lay out int8 weights as this processor multiplies them, once for all sessions and processes.

    Returns:
        Graphs and weights that only this processor can run; the files themselves if nothing would be packed.

    Raises:
        ValueError: A weight lies outside of the file's content.
    """
    models = {verb: Model.FromString(graph) for verb, graph in files.graphs.items()}
    # A name is that of one weight in each graph: a draft's int8 maps are named as the model's own in fp32.
    maps = {
        (verb, node.input[1])
        for verb, model in models.items()
        for node in model.graph.node
        if node.op_type in _INT8_MAPS
    }
    tensors = [
        tensor for model in models.values() for tensor in model.graph.initializer if tensor.external_data
    ]
    # By the place in the file, which graphs share
    shapes = {
        _place(tensor)[0]: shape
        for verb, model in models.items()
        for tensor in model.graph.initializer
        if tensor.external_data
        and (verb, tensor.name) in maps
        and (shape := kernels.packed_shape((tensor.dims[0], tensor.dims[1])))
    }
    if not shapes:
        return files
    sizes = {
        start: math.prod(shapes[start]) if start in shapes else length
        for start, length in map(_place, tensors)
    }
    ends = list(accumulate(-(-size // _LINE_BYTES) * _LINE_BYTES for size in sizes.values()))
    places = dict(zip(sizes, [0, *ends], strict=False))
    content = memoryview(mmap.mmap(-1, ends[-1], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    for start, tensor in {_place(tensor)[0]: tensor for tensor in tensors}.items():
        bits = _weight(tensor, files.weights).bits
        to = np.frombuffer(content[places[start] :][: sizes[start]], np.uint8)
        if start in shapes:
            kernels.pack(bits, to)
        else:
            to[:] = bits.reshape(-1).view(np.uint8)
    for tensor in tensors:
        start, _ = _place(tensor)
        now = {_OFFSET: places[start], _LENGTH: sizes[start]}
        for entry in tensor.external_data:
            entry.value = str(now.get(entry.key, entry.value))
        tensor.dims[:] = shapes.get(start, tensor.dims)
    return VariantFiles({verb: model.SerializeToString() for verb, model in models.items()}, content)


def _place(tensor: Tensor) -> tuple[int, int]:
    """Returns where a weight begins in the file, and the number of its bytes."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return int(entries[_OFFSET]), int(entries[_LENGTH])


def _weight(tensor: Tensor, content: memoryview) -> Weight:
    start, length = _place(tensor)
    end, num_elements = start + length, math.prod(tensor.dims)
    if not (num_elements > 0 and 0 <= start < end <= len(content)) or length % num_elements:
        raise ValueError(
            f"the weight {tensor.name} is bytes {start} to {end} of a file of {len(content)}, "
            f"and has {num_elements} values"
        )
    bits = np.frombuffer(content[start:end], f"u{length // num_elements}").reshape(tensor.dims)
    return Weight(tensor.name, tensor.data_type, bits)
