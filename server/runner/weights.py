"""Finds a graph's weights in its bundle's file of weights, as ONNX's format defines."""

from __future__ import annotations

import math
import mmap
from bisect import bisect_left
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from seq2seq_serve import kernels
from seq2seq_serve.bundle.files import new_memory
from seq2seq_serve.bundle.manifest import VariantFiles
from seq2seq_serve.protos.onnx_weights_pb2 import Graph, Model, Tensor
from seq2seq_serve.server.engine.request import Array
from seq2seq_serve.server.system.machine import usable_cpus

_LOCATION, _OFFSET, _LENGTH = "location", "offset", "length"
_DOMAIN = "seq2seq_serve"
_FLOAT, _UINT8 = 1, 2  # ONNX's numbers of types
_ELEMENT_BYTES = {_FLOAT: 4, _UINT8: 1, 3: 1, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 16: 2}
# The type of the weights, which are the second input, by the operator of `kernels` that multiplies by them
_MAPS = {
    "QuantizedLinear": _UINT8,
    "QuantizedChoice": _UINT8,
    "QuantizedEmbedding": _UINT8,
    "Linear": _FLOAT,
    "LinearRelu": _FLOAT,
}
_EMBEDDING = "Embedding"  # reads its second input in either form
_MOST_TIMES, _MOST_MORE_BYTES = 2, 2**24  # packed weights take at most twice the file and 16 MiB
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


def pack_maps(files: VariantFiles, wait: Callable[[int], object] = lambda _: None) -> VariantFiles:
    """Lay out the weights of maps as this processor multiplies them, once for all sessions and processes.

    Args:
        files: The files. If anything is packed, their weights must not be read afterwards: memory is given
            back as soon as its content is copied.
        wait: Waits until that many bytes of the weights are there.

    Returns:
        Graphs and weights that only this processor can run; the files themselves if nothing would be packed.

    Raises:
        ValueError: A weight lies outside of the file's content, or packed weights would take far more memory.
    """
    models = {verb: Model.FromString(graph) for verb, graph in files.graphs.items()}
    # By their places and shapes, since equal bytes, such as zeros, are stored once: graphs share both.
    stored: dict[_Key, Weight] = {}
    maps: set[_Key] = set()
    others: set[_Key] = set()  # that some node reads as they are
    for model in models.values():
        readers: dict[str, set[str]] = {}
        for name, reader in _reads(model.graph):
            readers.setdefault(name, set()).add(reader)
        for tensor in filter(_is_external, model.graph.initializer):
            key, its_readers = _key(tensor), readers.get(tensor.name, set())
            stored[key] = _weight(tensor, files.weights)
            if its_maps := its_readers - {_EMBEDDING}:
                types = {_MAPS.get(reader) for reader in its_maps}
                is_map = len(tensor.dims) == 2 and types == {tensor.data_type}
                (maps if is_map else others).add(key)
    shapes = {key: shape for key in maps - others if (shape := kernels.packed_shape(stored[key].values))}
    if not shapes:
        return files
    sizes = {
        key: math.prod(shapes[key]) * weight.bits.itemsize if key in shapes else weight.bits.nbytes
        for key, weight in stored.items()
    }
    ends = list(accumulate(-(-size // _LINE_BYTES) * _LINE_BYTES for size in sizes.values()))
    if ends[-1] > _MOST_TIMES * len(files.weights) + _MOST_MORE_BYTES:
        raise ValueError(f"weights of {len(files.weights)} bytes would take {ends[-1]} bytes of memory")
    places = dict(zip(sizes, [0, *ends], strict=False))
    content = new_memory(ends[-1])
    starts = sorted(start for start, _, _ in stored)

    def write(key: _Key) -> None:
        weight, (start, _, _) = stored[key], key
        wait(start + weight.bits.nbytes)
        to = np.frombuffer(content[places[key] :][: sizes[key]], np.uint8)
        if key in shapes:
            kernels.pack(weight.values, to)
        else:
            to[:] = weight.bits.reshape(-1).view(np.uint8)
        num_readers = bisect_left(starts, start + weight.bits.nbytes) - bisect_left(starts, start)
        whole = weight.bits.nbytes // mmap.PAGESIZE * mmap.PAGESIZE  # another one may begin in the last page
        given = files.weights.obj
        if isinstance(given, mmap.mmap) and start % mmap.PAGESIZE == 0 and whole and num_readers == 1:
            given.madvise(mmap.MADV_DONTNEED, start, whole)

    with ThreadPoolExecutor(usable_cpus()) as pool:  # Python's lock is free while one is written
        list(pool.map(write, sorted(stored)))
    for model in models.values():
        for tensor in filter(_is_external, model.graph.initializer):
            key = _key(tensor)
            now = {_OFFSET: places[key], _LENGTH: sizes[key]}
            for entry in tensor.external_data:
                entry.value = str(now.get(entry.key, entry.value))
            tensor.dims[:] = shapes.get(key, tensor.dims)
    return VariantFiles({verb: model.SerializeToString() for verb, model in models.items()}, content)


def _reads(graph: Graph) -> Iterator[tuple[str, str]]:
    """Yields the name of each value that a node reads, and the operator if it may read packed weights so."""
    for node in graph.node:
        for place, name in enumerate(node.input):
            is_packable = place == 1 and node.domain == _DOMAIN
            yield name, node.op_type if is_packable else ""
        for attribute in node.attribute:  # a branch reads the values of its graph, too
            yield from ((name, "") for name, _ in _reads(attribute.g))


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
    element_bytes = _ELEMENT_BYTES.get(tensor.data_type, 0)
    is_inside = min(tensor.dims, default=1) > 0 and 0 <= start < end <= len(content)
    if not is_inside or length != num_elements * element_bytes or not element_bytes:
        raise ValueError(
            f"the weight {tensor.name} is bytes {start} to {end} of a file of {len(content)}, "
            f"and has {num_elements} values of ONNX's type {tensor.data_type}"
        )
    bits = np.frombuffer(content[start:end], f"u{element_bytes}").reshape(tensor.dims)
    return Weight(tensor.name, tensor.data_type, bits)
