"""Finds a graph's weights in its bundle's file of weights, as ONNX's format defines."""

from __future__ import annotations

import math
import mmap
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from seq2seq_serve import kernels
from seq2seq_serve.bundle.manifest import VariantFiles
from seq2seq_serve.protos.onnx_weights_pb2 import Model, Tensor
from seq2seq_serve.server.engine.request import Array

_LOCATION, _OFFSET, _LENGTH = "location", "offset", "length"
# Operators of `kernels` that multiply by their second input, and those that read it in either form
_MAPS = ("QuantizedLinear", "QuantizedChoice", "Linear", "LinearRelu")
_READERS = (*_MAPS, "Embedding")
_FLOAT = 1  # ONNX's number of float32
_LINE_BYTES = 64
_Key = tuple[int, int, tuple[int, ...]]  # where a weight begins in the file, its type and its shape


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

    @property
    def values(self) -> Array:
        """The values of float32 weights, or the bits of others."""
        return self.bits.view(np.float32) if self.element_type == _FLOAT else self.bits


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


def pack_maps(files: VariantFiles) -> VariantFiles:
    """Lay out the weights of maps as this processor multiplies them, once for all sessions and processes.

    Args:
        files: The files. If anything is packed, their weights must not be read afterwards: memory is given
            back as soon as its content is copied, so that loading takes little more than the weights.

    Returns:
        Graphs and weights that only this processor can run; the files themselves if nothing would be packed.

    Raises:
        ValueError: A weight lies outside of the file's content.
    """
    models = {verb: Model.FromString(graph) for verb, graph in files.graphs.items()}
    # By their places and shapes, since equal bytes, such as zeros, are stored once: graphs share both.
    stored: dict[_Key, Weight] = {}
    maps: set[_Key] = set()
    others: set[_Key] = set()  # that some node reads as they are
    for model in models.values():
        uses: dict[str, set[str]] = {}
        for node in model.graph.node:
            for place, name in enumerate(node.input):
                uses.setdefault(name, set()).add(node.op_type if place == 1 else "")
        for tensor in filter(_is_external, model.graph.initializer):
            key = _key(tensor)
            stored[key] = _weight(tensor, files.weights)
            readers = uses.get(tensor.name, set())
            if len(tensor.dims) == 2 and readers.intersection(_MAPS):
                maps.add(key)
            if not readers.issubset(_READERS):
                others.add(key)
    shapes = {key: shape for key in maps - others if (shape := kernels.packed_shape(stored[key].values))}
    if not shapes:
        return files
    sizes = {
        key: math.prod(shapes[key]) * weight.bits.itemsize if key in shapes else weight.bits.nbytes
        for key, weight in stored.items()
    }
    ends = list(accumulate(-(-size // _LINE_BYTES) * _LINE_BYTES for size in sizes.values()))
    places = dict(zip(sizes, [0, *ends], strict=False))
    content = memoryview(mmap.mmap(-1, ends[-1], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    num_readers = Counter(start for start, _, _ in stored)
    given = files.weights.obj

    def write(key: _Key) -> None:
        weight, (start, _, _) = stored[key], key
        to = np.frombuffer(content[places[key] :][: sizes[key]], np.uint8)
        if key in shapes:
            kernels.pack(weight.values, to)
        else:
            to[:] = weight.bits.reshape(-1).view(np.uint8)
        is_page = start % mmap.PAGESIZE == 0
        if isinstance(given, mmap.mmap) and is_page and num_readers[start] == 1:
            given.madvise(mmap.MADV_DONTNEED, start, weight.bits.nbytes)

    with ThreadPoolExecutor() as pool:  # Python's lock is free while one is written
        list(pool.map(write, stored))
    for model in models.values():
        for tensor in filter(_is_external, model.graph.initializer):
            key = _key(tensor)
            now = {_OFFSET: places[key], _LENGTH: sizes[key]}
            for entry in tensor.external_data:
                entry.value = str(now.get(entry.key, entry.value))
            tensor.dims[:] = shapes.get(key, tensor.dims)
    return VariantFiles({verb: model.SerializeToString() for verb, model in models.items()}, content)


def _key(tensor: Tensor) -> _Key:
    return _place(tensor)[0], tensor.data_type, tuple(tensor.dims)


def _is_external(tensor: Tensor) -> bool:
    return bool(tensor.external_data)


def _place(tensor: Tensor) -> tuple[int, int]:
    """Returns where a weight begins in the file, and the number of its bytes."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    try:
        return int(entries[_OFFSET]), int(entries[_LENGTH])
    except (KeyError, ValueError):
        raise ValueError(f"the weight {tensor.name} has no place in the file of weights") from None


def _weight(tensor: Tensor, content: memoryview) -> Weight:
    start, length = _place(tensor)
    end, num_elements = start + length, math.prod(tensor.dims)
    is_inside = min(tensor.dims, default=1) > 0 and 0 <= start < end <= len(content)
    if not is_inside or length % num_elements or length // num_elements not in (1, 2, 4, 8):
        raise ValueError(
            f"the weight {tensor.name} is bytes {start} to {end} of a file of {len(content)}, "
            f"and has {num_elements} values"
        )
    bits = np.frombuffer(content[start:end], f"u{length // num_elements}").reshape(tensor.dims)
    return Weight(tensor.name, tensor.data_type, bits)
