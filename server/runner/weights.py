"""Finds a graph's weights in its bundle's file of weights, as ONNX's format defines."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from seq2seq_serve.protos.onnx_weights_pb2 import Model, Tensor
from seq2seq_serve.server.engine.request import Array

_LOCATION, _OFFSET, _LENGTH = "location", "offset", "length"


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


def _weight(tensor: Tensor, content: memoryview) -> Weight:
    place = {entry.key: entry.value for entry in tensor.external_data}
    start, length = int(place[_OFFSET]), int(place[_LENGTH])
    end, num_elements = start + length, math.prod(tensor.dims)
    if not (num_elements > 0 and 0 <= start < end <= len(content)) or length % num_elements:
        raise ValueError(
            f"the weight {tensor.name} is bytes {start} to {end} of a file of {len(content)}, "
            f"and has {num_elements} values"
        )
    bits = np.frombuffer(content[start:end], f"u{length // num_elements}").reshape(tensor.dims)
    return Weight(tensor.name, tensor.data_type, bits)
