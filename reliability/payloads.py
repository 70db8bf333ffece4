"""Small compressed calls that expand to millions of elements, one for every repeated field of every RPC."""

from __future__ import annotations

import asyncio
import gzip
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]

from seq2seq_serve.protos import open_inference_pb2, seq2seq_v1_pb2

_FILES = (seq2seq_v1_pb2, open_inference_pb2, health_pb2)
_MAX_DEPTH = 4

# The part of HTTP/2 (RFC 9113) that one call needs. gRPC's client would compress again for every call.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS = 1, 4
_FRAME_HEAD, _MAX_FRAME = 9, 16_384


@dataclass(frozen=True)
class Bomb:
    """A call with a small compressed message that expands to a large one."""

    name: str
    path: str
    raw: bytes
    message_type: Descriptor


def all_bombs(num_bytes: int) -> Iterator[Bomb]:
    """Yields bombs for every repeated field of every RPC; they fill `num_bytes` with empty elements."""
    for file in _FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                for fields in repeated_fields(method.input_type):
                    *outer, last = fields
                    path = f"/{service.full_name}/{method.name}"
                    name = ".".join((method.name, *(field.name for field in fields)))
                    empty = element(last, b"")
                    yield Bomb(
                        name, path, nested(outer, empty * (num_bytes // len(empty))), method.input_type
                    )
                    if last.is_packed:
                        numbers = nested(fields, bytes(num_bytes))
                        yield Bomb(f"{name}, packed", path, numbers, method.input_type)


def repeated_fields(
    descriptor: Descriptor, outer: tuple[FieldDescriptor, ...] = ()
) -> Iterator[tuple[FieldDescriptor, ...]]:
    """Yields the path of fields to every repeated field of a message type and of its nested types."""
    for field in descriptor.fields:
        if field.is_repeated:
            yield (*outer, field)
        if field.message_type is not None and len(outer) < _MAX_DEPTH:
            yield from repeated_fields(field.message_type, (*outer, field))


def element(field: FieldDescriptor, content: bytes) -> bytes:
    """Returns a length-delimited field with these bytes, as on the wire."""
    return varint(field.number << 3 | 2) + varint(len(content)) + content


def nested(fields: Sequence[FieldDescriptor], content: bytes) -> bytes:
    """Returns the bytes wrapped into the nested fields, the outermost first."""
    for field in reversed(fields):
        content = element(field, content)
    return content


def varint(number: int) -> bytes:
    """Returns a number as on the wire."""
    return bytes([number & 127 | 128]) + varint(number >> 7) if number > 127 else bytes([number])


def connection(bomb: Bomb) -> bytes:
    """Returns all bytes of a client's connection for one call with one compressed message."""
    headers: dict[str, str] = {
        ":method": "POST",
        ":scheme": "http",
        ":path": bomb.path,
        ":authority": "bombs",
        "te": "trailers",
        "content-type": "application/grpc",
        "grpc-encoding": "gzip",
    }
    block = b"".join(b"\0" + _text(name) + _text(value) for name, value in headers.items())
    compressed = gzip.compress(bomb.raw)
    body = struct.pack(">BI", 1, len(compressed)) + compressed
    frames = [_PREFACE, _frame(_SETTINGS, 0, b"", stream=0), _frame(_HEADERS, _END_HEADERS, block)]
    for start in range(0, len(body), _MAX_FRAME):
        is_last = start + _MAX_FRAME >= len(body)
        frames.append(_frame(_DATA, _END_STREAM * is_last, body[start : start + _MAX_FRAME]))
    return b"".join(frames)


def _text(text: str) -> bytes:
    """Returns a header's text in HPACK (RFC 7541): its length, then its bytes, not compressed."""
    assert len(text) < 127
    return bytes([len(text)]) + text.encode()


def _frame(kind: int, flags: int, payload: bytes, stream: int = 1) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


async def until_end(reader: asyncio.StreamReader) -> None:
    """Read the server's frames up to the end of the call."""
    while True:
        head = await reader.readexactly(_FRAME_HEAD)
        await reader.readexactly(int.from_bytes(head[:3], "big"))
        if head[3] == _HEADERS and head[4] & _END_STREAM:
            return
