"""Values that an enum of the contract does not have."""

import asyncio
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from seq2seq_serve.protos import details_pb2, open_inference_pb2, seq2seq_v1_pb2
from tests.server.service.harness import serving

FILES = [module.DESCRIPTOR for module in (seq2seq_v1_pb2, open_inference_pb2, details_pb2)]
METHODS = [
    method for file in FILES for service in file.services_by_name.values() for method in service.methods
]
Path = tuple[FieldDescriptor, ...]


def enums_of(descriptor: Descriptor, above: tuple[Descriptor, ...] = ()) -> Iterator[Path]:
    """The fields that lead to each enum inside a message."""
    for field in descriptor.fields:
        if field.enum_type is not None:
            yield (field,)
        elif field.message_type is not None and field.message_type not in above:
            for rest in enums_of(field.message_type, (*above, descriptor)):
                yield (field, *rest)


def nested(descriptors) -> Iterator[Descriptor]:
    for descriptor in descriptors:
        yield descriptor
        yield from nested(descriptor.nested_types)


INPUTS = [(method, path) for method in METHODS for path in enums_of(method.input_type)]


def test_all_other_enums_are_in_answers_only():
    fields = {
        field.full_name
        for file in FILES
        for descriptor in nested(file.message_types_by_name.values())
        for field in descriptor.fields
        if field.enum_type is not None
    }
    of_callers = {path[-1].full_name for _, path in INPUTS}
    of_answers = {path[-1].full_name for method in METHODS for path in enums_of(method.output_type)}
    assert of_callers == {
        "seq2seq.v1.GenerateOptions.long_source",
        "seq2seq.v1.GenerateOptions.length_penalty_formula",
    }
    assert {"seq2seq.v1.Hypothesis.finish_reason", "seq2seq.v1.Version.state"} <= of_answers
    # details.proto describes answers of gRPC's own services.
    assert fields - of_callers <= of_answers | {"seq2seq.details.v1.HealthCheckResponse.status"}


def request(method: MethodDescriptor, path: Path, value: int, beam_size: int) -> Message:
    """A request that would be answered if the enum had the value."""
    message = message_factory.GetMessageClass(method.input_type)()
    options = message.options
    options.beam_size = beam_size
    source = message.items.add().sources if method.name == "GenerateBatch" else message.sources
    source.add(text="ab")
    inner = message
    for field in path[:-1]:
        inner = getattr(inner, field.name)
    setattr(inner, path[-1].name, value)
    return message


async def answered(channel: grpc.aio.Channel, method: MethodDescriptor, message: Message) -> None:
    way = channel.unary_stream if method.server_streaming else channel.unary_unary
    call = way(
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=type(message).SerializeToString,
    )(message)
    if method.server_streaming:
        async for _ in call:
            pass
    else:
        await call


@pytest.mark.parametrize("value", [99, -1, 2**31 - 1])
def test_an_unknown_value_is_refused_with_its_field(value, caplog):
    """An unknown formula of the length penalty was INTERNAL, with a traceback in the log."""

    async def run():
        async with serving() as served:
            for method, path in INPUTS:
                name = ".".join(field.name for field in path)
                for beam_size in (0, 2):
                    known = request(method, path, 1, max(beam_size, 2))
                    await answered(served.channel, method, known)
                    unknown = request(method, path, value, beam_size)
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await answered(served.channel, method, unknown)
                    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (method.name, name)
                    status, violations = status_pb2.Status(), error_details_pb2.BadRequest()
                    trailers = dict(caught.value.trailing_metadata())
                    status.ParseFromString(trailers["grpc-status-details-bin"])
                    assert any(detail.Unpack(violations) for detail in status.details)
                    assert [one.field for one in violations.field_violations] == [name]
                    assert path[-1].name in caught.value.details()

    asyncio.run(run())
    assert not [record for record in caplog.records if record.exc_info]
    assert len(INPUTS) == 6  # two enums in three methods
