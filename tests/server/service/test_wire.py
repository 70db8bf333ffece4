import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from protos import open_inference_pb2 as oi
from protos import seq2seq_v1_pb2 as pb
from server.service.wire import MAX_FIELDS, MAX_NUMBERS, TooManyElements, check_elements

REQUESTS = {
    method.input_type.full_name: GetMessageClass(method.input_type)
    for file in (pb, oi, health_pb2, reflection_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


def repeated_fields(descriptor, path=()):
    """Every repeated field of a message type and those within, with the fields that lead to it."""
    for field in descriptor.fields:
        if field.is_repeated:
            yield (*path, field)
        if field.message_type is not None and len(path) < 4:
            yield from repeated_fields(field.message_type, (*path, field))


def varint(number: int) -> bytes:
    return bytes([number & 127 | 128]) + varint(number >> 7) if number > 127 else bytes([number])


def element(field: FieldDescriptor, content: bytes) -> bytes:
    return varint(field.number << 3 | 2) + varint(len(content)) + content


def nested(path, content: bytes) -> bytes:
    for field in reversed(path):
        content = element(field, content)
    return content


BOMBS = {
    ".".join((name, *(field.name for field in path))): (message_class, path)
    for name, message_class in REQUESTS.items()
    for path in repeated_fields(message_class.DESCRIPTOR)
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_in_any_repeated_field_is_found(name):
    message_class, path = BOMBS[name]
    *outer, last = path
    check_elements(nested(outer, element(last, b"") * 100), message_class.DESCRIPTOR)
    with pytest.raises(TooManyElements, match=f"more than {MAX_FIELDS} fields"):
        check_elements(nested(outer, element(last, b"") * MAX_FIELDS * 2), message_class.DESCRIPTOR)


@pytest.mark.parametrize("field", ["int64_contents", "uint_contents", "fp32_contents", "fp64_contents"])
def test_packed_numbers_are_counted_by_their_width(field):
    def infer(count: int) -> bytes:
        contents = oi.InferTensorContents(**{field: [300] * count})
        inputs = [oi.ModelInferRequest.InferInputTensor(contents=contents)]
        return oi.ModelInferRequest(inputs=inputs).SerializeToString()

    check_elements(infer(MAX_NUMBERS), oi.ModelInferRequest.DESCRIPTOR)
    with pytest.raises(TooManyElements, match=f"more than {MAX_NUMBERS} numbers"):
        check_elements(infer(MAX_NUMBERS + 1), oi.ModelInferRequest.DESCRIPTOR)


def test_the_largest_sound_request_passes():
    options = pb.GenerateOptions(
        suppressed_token_ids=range(1024), logit_bias={-i: 1.5 for i in range(1024)}, stop_sequences=["s"] * 16
    )
    request = pb.GenerateRequest(sources=[pb.Source(text="x" * 2**20)], options=options)
    check_elements(request.SerializeToString(), pb.GenerateRequest.DESCRIPTOR)


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff",
        b"\xff" * 11,
        b"\x0f",
        b"\x12\x05ab",
        b"\x12\x02\x12\x05",
    ],
)
def test_bytes_that_are_not_a_message_are_found_or_left_to_protobuf(raw):
    with pytest.raises((ValueError, IndexError)):
        check_elements(raw, pb.GenerateRequest.DESCRIPTOR)


def test_a_group_hides_nothing():
    bomb = b"\x4b" + b"\x12\x00" * MAX_FIELDS + b"\x4c"  # group 9, whose fields protobuf keeps as unknown
    with pytest.raises(TooManyElements, match="fields"):
        check_elements(bomb, pb.GenerateRequest.DESCRIPTOR)
