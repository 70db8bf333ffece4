"""Builds the messages of sources from the values of a program."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from seq2seq_serve.protos.seq2seq_v1_pb2 import Source, Target, Tensor, TokenIds

_DATATYPES = {("B", 1): "UINT8", ("l", 8): "INT64", ("q", 8): "INT64", ("f", 4): "FP32"}


class HasArray(Protocol):
    """An array of a library such as NumPy or PyTorch."""

    def __array__(self) -> Any: ...


TextOrIds = str | Sequence[int]
# A text, token ids, the bytes of a file, an array, or a message; by name where a model has several inputs
Value = TextOrIds | bytes | bytearray | memoryview | HasArray | Source
Sources = Value | Mapping[str, Value]


def check_texts(texts: object) -> None:
    """Refuses a single source, because its letters or names would be translated one by one.

    Raises:
        TypeError: `texts` is a text, bytes or a mapping.
    """
    if isinstance(texts, str | bytes | Mapping):
        raise TypeError(f"the texts must be several, such as a list, and this is one: {reprlib.repr(texts)}")


def sources_of(given: Sources) -> list[Source]:
    """Returns the sources of a request.

    Raises:
        TypeError: The source, or one of them, is not of a type that can be sent.
        ValueError: The text is not valid Unicode, a token id is not a 64-bit integer, or an array has numbers
            of another type than uint8, int64 and float32.
    """
    if isinstance(given, Mapping):
        return [_source(value, name) for name, value in given.items()]
    return [_source(given)]


def target_of(given: TextOrIds) -> Target:
    """Returns a target to score; raises TypeError and ValueError as `sources_of`."""
    if isinstance(given, str):
        return Target(text=given)
    return Target(token_ids=_token_ids(given, "a target must be a text or a list of token ids"))


def _source(value: Value, name: str = "") -> Source:
    if isinstance(value, str):
        return Source(name=name, text=value)
    if isinstance(value, Source):
        source = Source(name=name)
        source.MergeFrom(value)
        return source
    view = _view(value)
    if view is not None and view.ndim == 1 and view.format == "B":
        return Source(name=name, file=view.tobytes())
    if view is not None and view.ndim > 1:
        return Source(name=name, tensor=_tensor(view, name))
    what = f"the source {name}" if name else "a source"
    token_ids = _token_ids(
        value, f"{what} must be a text, a list of token ids, the bytes of a file, or an array"
    )
    return Source(name=name, token_ids=token_ids)


def _view(value: Any) -> memoryview | None:
    """Returns the elements of an array or of bytes, whatever library it is from; None for other values."""
    array = value.__array__() if hasattr(value, "__array__") else value
    try:
        return memoryview(array)
    except TypeError:
        return None


def _tensor(view: memoryview, name: str) -> Tensor:
    datatype = _DATATYPES.get((view.format, view.itemsize))
    if datatype is None:
        raise ValueError(
            f"the array{name and f' {name}'} must be of uint8, int64 or float32, and has elements of the "
            f"format {view.format!r}: convert it, for example with astype('float32')"
        )
    return Tensor(datatype=datatype, shape=view.shape, data=view.tobytes())


def _token_ids(given: Any, expected: str) -> TokenIds:
    try:
        if given is None or isinstance(given, bytes):  # protobuf takes None for no ids, and bytes for numbers
            raise TypeError
        return TokenIds(values=given)
    except TypeError:
        raise TypeError(f"{expected}, and this is {reprlib.repr(given)}") from None
