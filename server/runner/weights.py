"""Finds a graph's weights in its bundle's file of weights, as ONNX's format defines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from seq2seq_serve import kernels
from seq2seq_serve.bundle.files import give_back
from seq2seq_serve.bundle.manifest import Extent, VariantFiles, WeightsLayout
from seq2seq_serve.bundle.names import Verb
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


class _Key(NamedTuple):
    """Names a weight by its beginning in the file, its type and its shape.

    Equal bytes, such as zeros, are stored once, for weights of any shape.
    """

    start: int
    element_type: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """Where it ends in the file."""
        return self.start + math.prod(self.shape) * _ELEMENT_BYTES.get(self.element_type, 0)


class _Packing(NamedTuple):
    """A weight to pack.

    Attributes:
        end: The number of bytes of the file after which nothing is read to its place any more.
        place: Where it is read to.
    """

    key: _Key
    end: int
    place: int


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
            key = _key(tensor, len(content))
            weights.append(Weight(tensor.name, tensor.data_type, _bits(key, content)))
            for entry in tensor.external_data:
                if entry.key == _LOCATION:
                    entry.value = nowhere
    return model.SerializeToString(), weights


class PackedMaps(WeightsLayout):
    """The weights of maps as this processor multiplies them, once for all sessions and processes.

    They are read to the places at which they are packed, so that the system has to clear no memory twice.
    Those in float32 are packed in half precision if it has the same numbers, as in checkpoints that came
    so: few rows take as long as reading the weights. The system gets back the rest of the memory.

    Args:
        graphs: ONNX models.
        num_file_bytes: The size of their file of weights.

    Raises:
        ValueError: A weight lies outside of the file, or packed weights would take far more memory.
    """

    def __init__(self, graphs: Mapping[Verb, bytes], num_file_bytes: int) -> None:
        self._num_file_bytes = num_file_bytes
        self._models = {verb: Model.FromString(graph) for verb, graph in graphs.items()}
        keys: set[_Key] = set()
        maps: set[_Key] = set()
        others: set[_Key] = set()  # that some node reads as they are
        for model in self._models.values():
            readers: dict[str, set[str]] = {}
            for name, reader in _reads(model.graph):
                readers.setdefault(name, set()).add(reader)
            for tensor in filter(_is_external, model.graph.initializer):
                key, its_readers = _key(tensor, num_file_bytes), readers.get(tensor.name, set())
                keys.add(key)
                if its_maps := its_readers - {_EMBEDDING}:
                    types = {_MAPS.get(reader) for reader in its_maps}
                    is_map = len(tensor.dims) == 2 and types == {tensor.data_type}
                    (maps if is_map else others).add(key)
        self._shapes: dict[_Key, tuple[int, ...]] = {}
        for key in sorted(maps - others):
            if shape := kernels.packed_shape(key.shape, is_int8=key.element_type == _UINT8):
                self._shapes[key] = shape
        self._place(sorted(keys))
        if self.num_bytes > _MOST_TIMES * num_file_bytes + _MOST_MORE_BYTES:
            raise ValueError(f"weights of {num_file_bytes} bytes would take {self.num_bytes} bytes of memory")

    def _place(self, keys: list[_Key]) -> None:
        """Give every weight a place; one that is stored for itself is packed where it is read."""
        end, parts = 0, {0: list[_Key]()}  # of the file; weights that share bytes are in one
        for key in keys:
            if key.start >= end:
                parts[start := key.start] = []
            parts[start].append(key)
            end = max(end, key.end)
        self.extents: list[Extent] = []
        self._places: dict[_Key, int] = {}
        self._packings: list[_Packing] = []
        self.num_bytes = 0
        for start, end in pairwise((*parts, self._num_file_bytes)):
            part, place = parts[start], self.num_bytes
            self.extents.append(Extent(end - start, place))
            self._places |= {key: place + key.start - start for key in part}
            self.num_bytes += _rounded(end - start)
            for key in part:
                if key not in self._shapes:
                    continue
                self._packings.append(_Packing(key, end, self._places[key]))
                if len(part) > 1:
                    self._places[key] = self.num_bytes
                self.num_bytes = max(self.num_bytes, self._places[key] + _rounded(self._packed_bytes(key)))

    def _packed_bytes(self, key: _Key) -> int:
        """Returns the size of a packed weight."""
        return math.prod(self._shapes[key]) * _ELEMENT_BYTES[key.element_type]

    def finish(self, content: memoryview, wait: Callable[[int], None]) -> VariantFiles:
        """Pack the weights as they come; returns graphs and weights that only this processor can run."""

        def pack(packing: _Packing) -> None:
            wait(packing.end)
            key, to = packing.key, content[self._places[packing.key] :]
            bits = _bits(key._replace(start=packing.place), content)
            values = bits.view(np.float32) if key.element_type == _FLOAT else bits
            num_bytes = self._packed_bytes(key)
            if kernels.pack(values, np.frombuffer(to[:num_bytes], np.uint8)):
                *others, width = self._shapes[key]
                self._shapes[key] = *others, width // 2
                place = self._places[key]
                give_back(content, place + self._packed_bytes(key), place + num_bytes)

        with ThreadPoolExecutor(usable_cpus()) as pool:  # Python's lock is free while one is packed
            list(pool.map(pack, self._packings))
        for model in self._models.values():
            for tensor in filter(_is_external, model.graph.initializer):
                key = _key(tensor, self._num_file_bytes)
                entries = {_OFFSET: self._places[key]}
                if key in self._shapes:
                    entries[_LENGTH] = self._packed_bytes(key)
                    tensor.dims[:] = self._shapes[key]
                for entry in tensor.external_data:
                    entry.value = str(entries.get(entry.key, entry.value))
        graphs = {verb: model.SerializeToString() for verb, model in self._models.items()}
        return VariantFiles(graphs, content)


def _reads(graph: Graph) -> Iterator[tuple[str, str]]:
    """Yields the name of each value that a node reads, and the operator if it may read packed weights so."""
    for node in graph.node:
        for place, name in enumerate(node.input):
            is_packable = place == 1 and node.domain == _DOMAIN
            yield name, node.op_type if is_packable else ""
        for attribute in node.attribute:  # a branch reads the values of its graph, too
            yield from ((name, "") for name, _ in _reads(attribute.g))


def _rounded(num_bytes: int) -> int:
    """Returns a size in whole lines, for a place at whose end another one begins."""
    return -(-num_bytes // _LINE_BYTES) * _LINE_BYTES


def _is_external(tensor: Tensor) -> bool:
    return bool(tensor.external_data)


def _key(tensor: Tensor, num_file_bytes: int) -> _Key:
    """Returns where a weight lies in a file of that size.

    Raises:
        ValueError: It does not lie there.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    try:
        start, length = int(entries[_OFFSET]), int(entries[_LENGTH])
    except (KeyError, ValueError):
        raise ValueError(f"the weight {tensor.name} has no place in the file of weights") from None
    key = _Key(start, tensor.data_type, tuple(tensor.dims))
    is_inside = min(key.shape, default=1) > 0 and 0 <= start < key.end <= num_file_bytes
    if not is_inside or start + length != key.end:
        raise ValueError(
            f"the weight {tensor.name} is bytes {start} to {start + length} of a file of {num_file_bytes}, "
            f"and has {math.prod(key.shape)} values of ONNX's type {tensor.data_type}"
        )
    return key


def _bits(key: _Key, content: memoryview) -> Array:
    """Returns the values of a weight as unsigned integers of the elements' size: a view into the content."""
    bits = np.frombuffer(content[key.start : key.end], f"u{_ELEMENT_BYTES[key.element_type]}")
    return bits.reshape(key.shape)
