"""Counts the elements of a message in its bytes, before protobuf builds an object for each.

A few compressed kilobytes expand to millions of empty messages, for which protobuf takes 50 times the memory
of their bytes. The count stores nothing and ends at a bound (https://protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from seq2seq_serve.protos.seq2seq_v1_pb2 import BatchItem, GenerateOptions

# A map entry counts three times: itself, its key and its value. Valid requests have at most 1024 biases.
MAX_FIELDS = 2**13
# The numbers in packed fields; one input tensor may have this many.
MAX_NUMBERS = 2**20
# The items of a batch, each of which may have a tag and two named sources beside the fields of the message.
MAX_ITEMS = 2700
_FIELDS_PER_ITEM = 8

_OPTIONS: Any = GenerateOptions.DESCRIPTOR
_ITEM: Any = BatchItem.DESCRIPTOR
_LEAST_KEPT, _MOST_KEPT = 2**11, 2**17  # bytes of options

_VARINT, _FIXED64, _LENGTH, _GROUP_START, _GROUP_END, _FIXED32 = range(6)
_MAX_VARINT_BYTES = 10
_CONTINUES = 0x80  # set in every byte of a varint but the last
_WIDTHS = {
    FieldDescriptor.TYPE_DOUBLE: 8,
    FieldDescriptor.TYPE_FIXED64: 8,
    FieldDescriptor.TYPE_SFIXED64: 8,
    FieldDescriptor.TYPE_FLOAT: 4,
    FieldDescriptor.TYPE_FIXED32: 4,
    FieldDescriptor.TYPE_SFIXED32: 4,
}
_NO_NUMBERS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


class TooManyElements(ValueError):
    """A message has more elements than any valid one."""


@dataclass(frozen=True)
class _Layout:
    """The fields of a message type that may hold several elements, by field number.

    Attributes:
        messages: The types of the fields that are messages.
        widths: For each field that may be packed, the bytes of a number; None for varints.
    """

    messages: dict[int, Descriptor] = field(default_factory=dict)
    widths: dict[int, int | None] = field(default_factory=dict)


@cache
def _layout(descriptor: Descriptor) -> _Layout:
    layout = _Layout()
    for one in descriptor.fields:
        if one.message_type is not None:
            layout.messages[one.number] = one.message_type
        elif one.is_repeated and one.type not in _NO_NUMBERS:
            layout.widths[one.number] = _WIDTHS.get(one.type)
    return layout


def check_elements(raw: bytes, descriptor: Descriptor) -> None:
    """Refuses a message with too many fields, nested ones included, too many packed numbers, or batch items.

    Raises:
        TooManyElements: The message has more than `MAX_ITEMS`, `MAX_NUMBERS`, or `MAX_FIELDS` and
            `_FIELDS_PER_ITEM` for each item.
        ValueError, IndexError: The bytes are not a message.
    """
    _count(raw, descriptor)


def _count(raw: bytes, descriptor: Descriptor) -> tuple[int, int]:
    """Returns the numbers of fields and of packed numbers of a message; raises as `check_elements`."""
    num_fields = num_numbers = num_items = 0
    most_fields = MAX_FIELDS
    octets = np.frombuffer(raw, np.uint8)
    unread = [(0, len(raw), descriptor)]
    while unread:
        place, end, descriptor = unread.pop()
        layout = _layout(descriptor)
        while place < end:
            num_fields += 1
            tag, place = _varint(raw, place)
            number, kind = tag >> 3, tag & 7
            if kind == _VARINT:
                _, place = _varint(raw, place)
            elif kind == _FIXED64:
                place += 8
            elif kind == _FIXED32:
                place += 4
            elif kind == _LENGTH:
                length, start = _varint(raw, place)
                place = start + length
                if place > end:
                    raise ValueError("a field ends after its message")
                inner = layout.messages.get(number)
                if inner is _OPTIONS and _LEAST_KEPT < length <= _MOST_KEPT:
                    its_fields, its_numbers = _kept_count(raw[start:place])
                    num_fields, num_numbers = num_fields + its_fields, num_numbers + its_numbers
                elif inner is not None:
                    unread.append((start, place, inner))
                    if inner is _ITEM:
                        num_items += 1
                        most_fields += _FIELDS_PER_ITEM
                        if num_items > MAX_ITEMS:
                            raise TooManyElements(f"the message has more than {MAX_ITEMS} items")
                elif number in layout.widths:
                    num_numbers += _num_packed(octets[start:place], layout.widths[number])
            elif kind not in (_GROUP_START, _GROUP_END):  # a group's fields are counted like its message's
                raise ValueError(f"{kind} is not a wire type")
            if num_fields > most_fields:
                raise TooManyElements(f"the message has more than {most_fields} fields")
            if num_numbers > MAX_NUMBERS:
                raise TooManyElements(f"the message has more than {MAX_NUMBERS} numbers")
    return num_fields, num_numbers


@lru_cache(maxsize=16)
def _kept_count(raw: bytes) -> tuple[int, int]:
    """Counts the elements of options, which have the same many terms in one message after the other."""
    return _count(raw, _OPTIONS)


def _num_packed(octets: np.ndarray[tuple[int], np.dtype[np.uint8]], width: int | None) -> int:
    return len(octets) // width if width else int(np.count_nonzero(octets < _CONTINUES))


def _varint(raw: bytes, place: int) -> tuple[int, int]:
    """Returns a number and the place after it."""
    first = raw[place]
    if first < _CONTINUES:
        return first, place + 1
    value = 0
    for shift, octet in enumerate(raw[place : place + _MAX_VARINT_BYTES]):
        value |= (octet & ~_CONTINUES) << 7 * shift
        if octet < _CONTINUES:
            return value, place + shift + 1
    raise ValueError("a number does not end")
