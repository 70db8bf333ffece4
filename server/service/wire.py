"""Bounds the elements of a message by a walk over its bytes, before protobuf builds an object for each.

A few kilobytes of compressed bytes expand to millions of empty messages, and protobuf takes 50 times their
bytes for them. The walk keeps nothing and ends at the bound (https://protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor

# A map entry counts three times: itself, its key and its value. Sound requests have at most 1024 biases.
MAX_FIELDS = 2**13
# Numbers in packed fields: as many as one input tensor may have.
MAX_NUMBERS = 2**20

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
    """A message has more elements than any sound one."""


@dataclass(frozen=True)
class _Layout:
    """The fields of a message type whose bytes hold several elements, by number.

    Attributes:
        messages: The types of the fields that are messages.
        widths: The bytes of a number, for each field that may be packed; None where it is a varint.
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
    """Refuse a message of too many fields, in it and all messages within, or too many packed numbers.

    Raises:
        TooManyElements: There are more.
        ValueError, IndexError: The bytes are not a message.
    """
    num_fields = num_numbers = 0
    octets = np.frombuffer(raw, np.uint8)
    unread = [(0, len(raw), descriptor)]
    while unread:
        place, end, descriptor = unread.pop()
        layout = _layout(descriptor)
        while place < end:
            num_fields += 1
            if num_fields > MAX_FIELDS:
                raise TooManyElements(f"the message has more than {MAX_FIELDS} fields")
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
                if number in layout.messages:
                    unread.append((start, place, layout.messages[number]))
                elif number in layout.widths:
                    num_numbers += _num_packed(octets[start:place], layout.widths[number])
                    if num_numbers > MAX_NUMBERS:
                        raise TooManyElements(f"the message has more than {MAX_NUMBERS} numbers")
            elif kind not in (_GROUP_START, _GROUP_END):  # a group's fields are counted like its message's
                raise ValueError(f"{kind} is not a wire type")


def _num_packed(octets: np.ndarray[tuple[int], np.dtype[np.uint8]], width: int | None) -> int:
    return len(octets) // width if width else int(np.count_nonzero(octets < _CONTINUES))


def _varint(raw: bytes, place: int) -> tuple[int, int]:
    """A number, and the place after it."""
    first = raw[place]
    if first < _CONTINUES:
        return first, place + 1
    value = 0
    for shift, octet in enumerate(raw[place : place + _MAX_VARINT_BYTES]):
        value |= (octet & ~_CONTINUES) << 7 * shift
        if octet < _CONTINUES:
            return value, place + shift + 1
    raise ValueError("a number does not end")
