"""Calls that no proper client makes: random bytes, damaged messages, and messages with extreme values."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc import aio
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]

from reliability.place import TINY, Bar, Figures, Place, at_most
from seq2seq_serve.client import AsyncClient
from seq2seq_serve.protos import open_inference_pb2, seq2seq_v1_pb2

_TIMEOUT_SECONDS = 20.0
_AT_ONCE = 50
_MAX_DEPTH, _MAX_ELEMENTS = 4, 40
_FILES = (seq2seq_v1_pb2, open_inference_pb2, health_pb2)
# The details that gRPC's client itself sets if the server has ended a stream to which it still sends.
_CLOSED_WHILE_SENDING = "Internal error from Core"
_BUGS = ("INTERNAL", "UNKNOWN")  # a working server never answers with these
# The first never ends by itself; the others would unload the model.
_NOT_CALLED = ("Watch", "RepositoryModelUnload", "UnloadModel")

_INTEGERS = (0, 1, -1, 2, 7, 255, 2**31 - 1, -(2**31), 2**31, 2**63 - 1, -(2**63), 2**64 - 1)
_NUMBERS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e38, float("inf"), float("-inf"), float("nan"))
_TEXTS = (
    "",
    "a",
    "echo",
    "demo",
    "tiny",  # the served model
    "\0",
    "../..",
    "가" * 50,
    "\u202e",
    "😀",
    "x" * 5000,
    "text_input",
    "BYTES",
    "INT64",
)
_UNSIGNED = (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64)
_BITS = {
    FieldDescriptor.CPPTYPE_INT32: 31,
    FieldDescriptor.CPPTYPE_INT64: 63,
    FieldDescriptor.CPPTYPE_UINT32: 32,
    FieldDescriptor.CPPTYPE_UINT64: 64,
}


@dataclass(frozen=True)
class _Method:
    path: str
    message: type[Message]
    is_stream_in: bool
    is_stream_out: bool


def _methods() -> list[_Method]:
    return [
        _Method(
            f"/{service.full_name}/{method.name}",
            GetMessageClass(method.input_type),
            method.client_streaming,
            method.server_streaming,
        )
        for file in _FILES
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if method.name not in _NOT_CALLED
    ]


class Hostile:
    """Draws random calls from a seed."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._methods = _methods()

    def draw(self) -> tuple[_Method, bytes]:
        """Returns a method and the bytes of its request."""
        chance = self._chance
        method = chance.choice(self._methods)
        kind = chance.random()
        if kind < 0.2:
            return method, chance.randbytes(chance.randrange(300))
        message = method.message()
        self._fill(message, method.message.DESCRIPTOR, 0)
        raw = message.SerializeToString()
        return method, self._damaged(raw) if kind < 0.5 else raw

    def _damaged(self, raw: bytes) -> bytes:
        chance, damaged = self._chance, bytearray(raw)
        for _ in range(chance.randint(1, 5)):
            place = chance.randrange(len(damaged) + 1)
            if chance.random() < 0.3:
                del damaged[place:]
            elif chance.random() < 0.5:
                damaged[place:place] = chance.randbytes(chance.randint(1, 8))
            elif place < len(damaged):
                damaged[place] = chance.randrange(256)
        return bytes(damaged)

    def _fill(self, message: Message, descriptor: Any, depth: int) -> None:
        for field in descriptor.fields:
            if self._chance.random() < 0.5 or depth > _MAX_DEPTH:
                continue
            is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
            if is_map:
                self._fill_map(getattr(message, field.name), field)
            elif field.is_repeated:
                for _ in range(self._chance.choice((1, 2, _MAX_ELEMENTS))):
                    self._add(getattr(message, field.name), field, depth)
            elif field.message_type is not None:
                child = getattr(message, field.name)
                child.SetInParent()
                self._fill(child, field.message_type, depth + 1)
            else:
                setattr(message, field.name, self._value(field))

    def _fill_map(self, entries: Any, field: Any) -> None:
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        for _ in range(self._chance.choice((1, 3, 2000))):
            if value.message_type is None:
                entries[self._value(key)] = self._value(value)
            else:
                self._fill(entries[self._value(key)], value.message_type, _MAX_DEPTH)

    def _add(self, elements: Any, field: FieldDescriptor, depth: int) -> None:
        if field.message_type is None:
            elements.append(self._value(field))
        else:
            self._fill(elements.add(), field.message_type, depth + 1)

    def _value(self, field: FieldDescriptor) -> Any:
        chance, kind = self._chance, field.cpp_type
        if kind in _BITS:
            bound = 2 ** _BITS[kind]
            least = 0 if kind in _UNSIGNED else -bound
            value = chance.choice(_INTEGERS) if chance.random() < 0.7 else chance.randrange(-10, 300)
            return min(max(value, least), bound - 1)
        if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
            return chance.choice(_NUMBERS) if chance.random() < 0.5 else chance.uniform(-3, 3)
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return chance.random() < 0.5
        if kind == FieldDescriptor.CPPTYPE_ENUM:
            return chance.randrange(-1, 6)
        text = chance.choice(_TEXTS)
        return (
            text if field.type == FieldDescriptor.TYPE_STRING else chance.choice((text.encode(), b"\xff\xfe"))
        )


def hostile(place: Place) -> tuple[Figures, list[Bar]]:
    """Make hostile calls, and good ones between them."""
    num_calls = place.count(20_000, 100)
    task = place.progress.add_task("hostile calls", total=num_calls)
    with place.serving(TINY, ["--open-repository"]) as server:
        codes = asyncio.run(
            attack(server.address, num_calls, 0, lambda count: place.progress.advance(task, count))
        )
    bugs = sum(count for name, count in codes.items() if name.startswith(_BUGS))
    return {"codes": codes}, [at_most("calls that ended with INTERNAL or UNKNOWN", bugs, 0)]


async def attack(address: str, num_calls: int, seed: int, on_progress: Any) -> Counter[str]:
    """Make hostile calls; after each hundred, a good one must be answered.

    Returns:
        The number of calls by status; for bugs, the status is followed by the method and the error's details.

    Raises:
        ClientError: A good call failed.
    """
    hostile = Hostile(seed)
    codes: Counter[str] = Counter()
    async with aio.insecure_channel(address) as channel, AsyncClient(address) as client:
        for batch in _batches(num_calls):
            drawn = [hostile.draw() for _ in batch]
            for group in (drawn[:_AT_ONCE], drawn[_AT_ONCE:]):
                codes.update(await asyncio.gather(*(_call(channel, *one) for one in group)))
            await client.generate("a", timeout_seconds=_TIMEOUT_SECONDS)
            on_progress(len(batch))
    return codes


def _batches(count: int) -> Iterator[Sequence[int]]:
    for start in range(0, count, 2 * _AT_ONCE):
        yield range(start, min(start + 2 * _AT_ONCE, count))


async def _call(channel: Any, method: _Method, raw: bytes) -> str:
    try:
        if method.is_stream_in:
            await _drain(channel.stream_stream(method.path)(iter([raw, raw]), timeout=_TIMEOUT_SECONDS))
        elif method.is_stream_out:
            await _drain(channel.unary_stream(method.path)(raw, timeout=_TIMEOUT_SECONDS))
        else:
            await channel.unary_unary(method.path)(raw, timeout=_TIMEOUT_SECONDS)
    except aio.AioRpcError as error:
        if error.details() == _CLOSED_WHILE_SENDING:
            return "CLOSED"
        name = str(error.code().name)
        return f"{name} {method.path}: {error.details()}" if name in _BUGS else name
    return str(grpc.StatusCode.OK.name)


async def _drain(stream: Any) -> None:
    async for _ in stream:
        pass
