"""Finds the weights of a graph in its bundle's file of weights, by the rules of ONNX's format."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from protos.onnx_weights_pb2 import Model, Tensor
from server.records import Array

_LOCATION, _OFFSET, _LENGTH = "location", "offset", "length"


@dataclass(frozen=True, eq=False)
class Weight:
    """One weight of a graph.

    Attributes:
        element_type: ONNX's number.
        bits: The values, as unsigned integers of the elements' size, in the memory that they were found in.
    """

    name: str
    element_type: int
    bits: Array


def take_weights(graph: bytes, content: memoryview, nowhere: str) -> tuple[bytes, list[Weight]]:
    """Find a graph's weights in memory, and make it forget the file that they came from.

    Args:
        graph: An ONNX model.
        content: Of its file of weights.
        nowhere: The file that the graph names instead.

    Returns:
        The graph and its weights, all but the small ones that stand in the graph itself.

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
