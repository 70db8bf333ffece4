from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from grpc_health.v1 import health_pb2

from seq2seq_serve.protos import open_inference_pb2 as oi
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.service.wire import (
    MAX_FIELDS,
    MAX_ITEMS,
    MAX_NUMBERS,
    TooManyElements,
    check_elements,
)

BOMB_BYTES = 8 * MAX_NUMBERS + 100
MAX_DEPTH = 4


def repeated_fields(
    message: Descriptor, outer: tuple[FieldDescriptor, ...] = ()
) -> Iterator[tuple[FieldDescriptor, ...]]:
    """Yields the path of fields to every repeated field of a message type and of its nested types."""
    for field in message.fields:
        if field.is_repeated:
            yield (*outer, field)
        if field.message_type is not None and len(outer) < MAX_DEPTH:
            yield from repeated_fields(field.message_type, (*outer, field))


def varint(number: int) -> bytes:
    return bytes([number & 127 | 128]) + varint(number >> 7) if number > 127 else bytes([number])


def nested(fields: tuple[FieldDescriptor, ...], content: bytes) -> bytes:
    """Returns the bytes of length-delimited fields, the outermost first, around a content."""
    for field in reversed(fields):
        content = varint(field.number << 3 | 2) + varint(len(content)) + content
    return content


def all_bombs() -> Iterator[tuple[str, tuple[Descriptor, bytes]]]:
    """Yields names, and messages of every RPC whose repeated fields have very many empty elements."""
    services = [
        service for file in (pb, oi, health_pb2) for service in file.DESCRIPTOR.services_by_name.values()
    ]
    for method in (method for service in services for method in service.methods):
        for fields in repeated_fields(method.input_type):
            name, empty = ".".join((method.name, *(field.name for field in fields))), nested(fields[-1:], b"")
            yield name, (method.input_type, nested(fields[:-1], empty * (BOMB_BYTES // len(empty))))
            if fields[-1].is_packed:
                yield f"{name}, packed", (method.input_type, nested(fields, bytes(BOMB_BYTES)))


BOMBS = dict(all_bombs())


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_in_any_repeated_field_is_found(name):
    message_type, raw = BOMBS[name]
    most = f"({MAX_FIELDS} fields|{MAX_FIELDS + 8} fields|{MAX_NUMBERS} numbers|{MAX_ITEMS} items)"
    with pytest.raises(TooManyElements, match=f"more than {most}$"):
        check_elements(raw, message_type)


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


def batch_of(num_items: int, num_sources: int = 2) -> bytes:
    sources = [pb.Source(name="story", text="x")] * num_sources
    options = pb.GenerateOptions(terms=[pb.Term(source="a", target="b")] * 1000)
    items = [pb.BatchItem(tag=f"tag {number}", sources=sources) for number in range(num_items)]
    return pb.GenerateBatchRequest(model="m", items=items, options=options).SerializeToString()


def test_as_many_items_of_a_batch_as_are_documented_pass_with_tags_names_and_options():
    """A tag and a name count as fields: 2,700 items with tags were refused."""
    batch = pb.GenerateBatchRequest.DESCRIPTOR
    check_elements(batch_of(MAX_ITEMS), batch)
    with pytest.raises(TooManyElements, match=f"more than {MAX_ITEMS} items"):
        check_elements(batch_of(MAX_ITEMS + 1, 1), batch)
    with pytest.raises(TooManyElements, match=f"more than {MAX_FIELDS + 8 * MAX_ITEMS} fields"):
        check_elements(batch_of(MAX_ITEMS, 4), batch)
    with pytest.raises(TooManyElements, match=f"more than {MAX_FIELDS + 8} fields"):
        check_elements(batch_of(1, MAX_FIELDS // 3), batch)


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


def test_options_are_counted_with_what_is_beside_them():
    """Those of some kilobytes are counted once for messages with equal ones."""
    terms = [pb.Term(source="a", target="b")] * (MAX_FIELDS // 3 - 10)
    options = pb.GenerateOptions(terms=terms).SerializeToString()
    raw = pb.GenerateRequest(options=pb.GenerateOptions(terms=terms)).SerializeToString()
    for _ in range(2):
        check_elements(raw, pb.GenerateRequest.DESCRIPTOR)
    with pytest.raises(TooManyElements, match=f"more than {MAX_FIELDS} fields"):
        check_elements(raw + b"\x12\x00" * 40, pb.GenerateRequest.DESCRIPTOR)
    with pytest.raises(TooManyElements, match=f"more than {MAX_FIELDS} fields"):
        check_elements(raw + raw, pb.GenerateRequest.DESCRIPTOR)
    assert len(options) > 2**11
