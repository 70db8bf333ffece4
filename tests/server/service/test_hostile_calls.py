"""Calls that no proper client makes: random bytes, damaged messages, and messages with extreme values."""

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc import aio
from grpc_health.v1 import health_pb2

from seq2seq_serve.client import AsyncClient
from seq2seq_serve.protos import open_inference_pb2, seq2seq_v1_pb2
from tests.server.service.harness import serving_bundles

# The first never ends by itself; the others would unload the model.
NOT_CALLED = "Watch", "RepositoryModelUnload", "UnloadModel"
METHODS: list[MethodDescriptor] = [
    method
    for file in (seq2seq_v1_pb2, open_inference_pb2, health_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.name not in NOT_CALLED
]
GENERATING = [method for method in METHODS if method.name in ("Generate", "GenerateStream")]
BUGS = "INTERNAL", "UNKNOWN"
# What gRPC's client itself says if the server has ended a stream to which it still sends.
CLOSED_WHILE_SENDING = "Internal error from Core"
SECONDS, AT_ONCE = 20.0, 50
MAX_DEPTH, MAX_ELEMENTS = 4, 40

INTEGERS = 0, 1, -1, 2, 7, 255, 2**31 - 1, -(2**31), 2**31, 2**63 - 1, -(2**63), 2**64 - 1
FLOATS = 0.0, -0.0, 1.0, -1.0, 1e-45, 1e38, float("inf"), float("-inf"), float("nan")
SHORT_TEXTS = "", "a", "random", "\0", "../..", "\u202e", "😀", "text_input", "BYTES", "INT64"
TEXTS = (*SHORT_TEXTS, "가" * 50, "x" * 5000)
RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


class Hostile:
    """Draws calls."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def draw(self) -> tuple[MethodDescriptor, bytes]:
        method, kind = self.chance.choice(METHODS), self.chance.random()
        if kind < 0.2:
            return method, self.chance.randbytes(self.chance.randrange(300))
        if kind < 0.5:  # a good call but for one option, which reaches the engine more often
            request = seq2seq_v1_pb2.GenerateRequest(sources=[seq2seq_v1_pb2.Source(text="a")])
            self.fill_field(request.options, self.chance.choice(request.options.DESCRIPTOR.fields), 1)
            return self.chance.choice(GENERATING), request.SerializeToString()
        message = GetMessageClass(method.input_type)()
        self.fill(message, 0)
        raw = message.SerializeToString()
        return method, self.damaged(raw) if kind < 0.7 else raw

    def damaged(self, raw: bytes) -> bytes:
        chance, damaged = self.chance, bytearray(raw)
        for _ in range(chance.randint(1, 5)):
            place = chance.randrange(len(damaged) + 1)
            if chance.random() < 0.3:
                del damaged[place:]
            elif chance.random() < 0.5:
                damaged[place:place] = chance.randbytes(chance.randint(1, 8))
            elif place < len(damaged):
                damaged[place] = chance.randrange(256)
        return bytes(damaged)

    def fill(self, message: Message, depth: int) -> None:
        for field in message.DESCRIPTOR.fields:
            if self.chance.random() >= 0.5 and depth <= MAX_DEPTH:
                self.fill_field(message, field, depth)

    def fill_field(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            self.fill_map(value, field.message_type)
        elif field.is_repeated:
            for _ in range(self.chance.choice((1, 2, MAX_ELEMENTS))):
                if field.message_type is None:
                    value.append(self.value(field))
                else:
                    self.fill(value.add(), depth + 1)
        elif field.message_type is not None:
            value.SetInParent()
            self.fill(value, depth + 1)
        else:
            setattr(message, field.name, self.value(field))

    def fill_map(self, entries: Any, entry: Any) -> None:
        key, value = (entry.fields_by_name[name] for name in ("key", "value"))
        for _ in range(self.chance.choice((1, 3, 2000))):
            if value.message_type is None:
                entries[self.value(key)] = self.value(value)
            else:
                self.fill(entries[self.value(key)], MAX_DEPTH)

    def value(self, field: FieldDescriptor) -> Any:
        chance = self.chance
        if field.cpp_type in RANGES:
            least, most = RANGES[field.cpp_type]
            value = chance.choice(INTEGERS) if chance.random() < 0.7 else chance.randrange(-10, 300)
            return min(max(value, least), most)
        if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
            return chance.choice(FLOATS) if chance.random() < 0.5 else chance.uniform(-3, 3)
        if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            return chance.random() < 0.5
        if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
            return chance.randrange(-1, 6)
        text = chance.choice(TEXTS)
        return (
            text if field.type == FieldDescriptor.TYPE_STRING else chance.choice((text.encode(), b"\xff\xfe"))
        )


async def code_of(channel: aio.Channel, method: MethodDescriptor, raw: bytes) -> str:
    """The status of a call; for one of a bug, with the method and the details."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    try:
        if method.client_streaming:
            stream = channel.stream_stream(path)(iter([raw, raw]), timeout=SECONDS)
        else:
            stream = channel.unary_stream(path)(raw, timeout=SECONDS)
        async for _ in stream:
            pass
    except aio.AioRpcError as error:
        if error.details() == CLOSED_WHILE_SENDING:
            return "CLOSED"
        code = error.code().name
        return f"{code} {path}: {error.details()}" if code in BUGS else code
    return "OK"


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 21))])
async def test_no_call_is_a_bug_and_good_calls_are_answered_meanwhile(seed, bundle_path):
    hostile, codes = Hostile(seed), Counter[str]()
    async with (
        serving_bundles(bundle_path, is_repository_open=True) as served,
        AsyncClient(served.address, timeout_seconds=SECONDS) as client,
    ):
        for _ in range(10):
            drawn = [hostile.draw() for _ in range(AT_ONCE)]
            codes.update(await asyncio.gather(*(code_of(served.channel, *one) for one in drawn)))
            assert (await client.generate("a")).hypotheses
    assert not [code for code in codes if code.startswith(BUGS)]
    assert codes["OK"] > 50
    assert codes["INVALID_ARGUMENT"] > 100
