"""Turns tensors of the Open Inference Protocol, with typed or raw contents, into numpy arrays and back."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from seq2seq_serve.protos import open_inference_pb2 as pb
from seq2seq_serve.server.engine.request import Array
from seq2seq_serve.server.errors import InvalidRequest

BYTES, INT64, INT32, UINT8, FP32 = "BYTES", "INT64", "INT32", "UINT8", "FP32"

_RAW_DTYPES = {INT64: "<i8", INT32: "<i4", UINT8: "u1", FP32: "<f4"}
TYPED_FIELDS = {
    INT64: "int64_contents",
    INT32: "int_contents",
    UINT8: "uint_contents",
    FP32: "fp32_contents",
    BYTES: "bytes_contents",
}
_LENGTH = struct.Struct("<I")  # precedes every element of BYTES in raw contents
_MAX_AXES = 8
_MAX_RAW, _MAX_TYPED = 2**22, 2**20  # elements of a tensor; each typed one becomes an object
MAX_ROWS = 256  # rows of a request, and elements of a BYTES tensor


@dataclass(frozen=True)
class Tensor:
    """A named array. A tensor of BYTES is an array of `bytes` objects."""

    name: str
    datatype: str
    array: Array


def read_tensors(message: pb.ModelInferRequest) -> dict[str, Tensor]:
    """Returns the inputs of a request by name.

    Raises:
        InvalidRequest: The shape, datatype and contents of an input do not fit each other.
    """
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise InvalidRequest(
            f"there are {len(message.inputs)} inputs and {len(raw)} raw_input_contents: send one for each",
            field="raw_input_contents",
        )
    tensors: dict[str, Tensor] = {}
    for index, spec in enumerate(message.inputs):
        field = f"inputs[{index}]"
        if spec.name in tensors:
            raise InvalidRequest(f"two inputs are named {spec.name[:100]!r}", field=f"{field}.name")
        if spec.datatype not in TYPED_FIELDS:
            raise InvalidRequest(
                f"datatype is {spec.datatype[:100]!r}, and must be one of {', '.join(TYPED_FIELDS)}",
                field=f"{field}.datatype",
            )
        if len(spec.shape) > _MAX_AXES or any(size < 0 for size in spec.shape):
            raise InvalidRequest(
                f"the shape must have at most {_MAX_AXES} axes, and each at least 0", field=f"{field}.shape"
            )
        if raw and spec.HasField("contents"):
            raise InvalidRequest(
                "contents and raw_input_contents are both set: leave one out", field=f"{field}.contents"
            )
        size = math.prod(spec.shape)
        most = MAX_ROWS if spec.datatype == BYTES else _MAX_RAW if raw else _MAX_TYPED
        if size > most or any(axis > most for axis in spec.shape):
            raise InvalidRequest(
                f"shape {list(spec.shape)} is too large: send at most {most} elements of {spec.datatype}",
                field=f"{field}.shape",
            )
        array = _from_raw(raw[index], spec.datatype, size, field) if raw else _from_typed(spec, size, field)
        tensors[spec.name] = Tensor(spec.name, spec.datatype, array.reshape(tuple(spec.shape)))
    return tensors


def _check_count(count: int, size: int, field: str) -> None:
    if count != size:
        raise InvalidRequest(f"the shape has {size} elements, and {count} were sent", field=f"{field}.shape")


def raw_contents(tensor: Tensor) -> bytes:
    """Returns the elements, little-endian; an element of BYTES follows its length."""
    elements = tensor.array.ravel()
    if tensor.datatype == BYTES:
        return b"".join(_LENGTH.pack(len(element)) + element for element in elements)
    raw: bytes = elements.astype(_RAW_DTYPES[tensor.datatype]).tobytes()
    return raw


def bytes_array(texts: Sequence[str], shape: tuple[int, ...]) -> Array:
    """Returns texts as elements of BYTES."""
    return _objects([text.encode() for text in texts]).reshape(shape)


def _from_typed(spec: pb.ModelInferRequest.InferInputTensor, size: int, field: str) -> Array:
    name = TYPED_FIELDS[spec.datatype]
    for other, _ in spec.contents.ListFields():
        if other.name != name:
            raise InvalidRequest(
                f"the elements of {spec.datatype} belong in {name}, and {other.name} is set",
                field=f"{field}.contents",
            )
    elements = getattr(spec.contents, name)
    _check_count(len(elements), size, field)
    if spec.datatype == BYTES:
        return _objects(elements)
    try:
        return np.array(elements, _RAW_DTYPES[spec.datatype])
    except OverflowError as error:
        raise InvalidRequest(
            f"an element of {spec.datatype} is too large", field=f"{field}.contents"
        ) from error


def _from_raw(raw: bytes, datatype: str, size: int, field: str) -> Array:
    if datatype == BYTES:
        elements = list(itertools.islice(_elements(raw, field), size + 1))  # one too many is an error
        _check_count(len(elements), size, field)
        return _objects(elements)
    dtype = np.dtype(_RAW_DTYPES[datatype])
    if len(raw) % dtype.itemsize:
        raise InvalidRequest(
            f"an element of {datatype} has {dtype.itemsize} bytes, and {len(raw)} bytes were sent",
            field=field,
        )
    _check_count(len(raw) // dtype.itemsize, size, field)
    return np.frombuffer(raw, dtype)


def _elements(raw: bytes, field: str) -> Iterator[bytes]:
    place = 0
    while place < len(raw):
        start = place + _LENGTH.size
        length = _LENGTH.unpack_from(raw, place)[0] if start <= len(raw) else 0
        place = start + length
        if place > len(raw):
            raise InvalidRequest(
                "raw BYTES end inside an element: send each as its length in four bytes, little-endian, and "
                "then its bytes",
                field=field,
            )
        yield raw[start:place]


def _objects(elements: Sequence[bytes]) -> Array:
    array = np.empty(len(elements), object)
    array[:] = elements
    return array
