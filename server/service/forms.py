"""Reads the bodies of forms: `multipart/form-data` (RFC 7578) and `application/x-www-form-urlencoded`."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from urllib.parse import unquote_to_bytes

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from seq2seq_serve.server.errors import InvalidRequest

ENCODED = "application/x-www-form-urlencoded"
MAX_ENCODED_BYTES = 2**18  # of such a form: each takes up to a hundred while it is read
_MAX_FIELDS = 64
_MAX_HEADERS, _MAX_HEADER_BYTES = 16, 4096  # of one field, and of one of its headers
_LONG_PADDING = rb"[ \t]{256}"

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # callers can cause its warnings

Form = dict[str, list[bytes]]


def read_form(body: bytes, content_type: str) -> Form:
    """Returns the values of each field, in order.

    Raises:
        InvalidRequest: The body is not a whole form, or has more than `_MAX_FIELDS` fields.
    """
    kind, parameters = parse_options_header(content_type)
    boundary = parameters.get(b"boundary")
    if kind.decode() == ENCODED:
        pairs = _encoded(body)
    elif kind == b"multipart/form-data" and boundary:
        pairs = _parts(body, boundary)
    else:
        raise InvalidRequest(
            f"the body is {content_type[:100]!r}: send multipart/form-data with its boundary", field=""
        )
    form: Form = {}
    for name, value in pairs:
        form.setdefault(text_of(name, "the name of a field"), []).append(value)
    return form


def text_of(value: bytes, name: str) -> str:
    """Returns the text of a field; raises InvalidRequest if it is not UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{name[:100]} is not UTF-8", field=name[:100]) from None


def _encoded(body: bytes) -> list[tuple[bytes, bytes]]:
    _check_count(body.count(b"&"))
    pairs = [part.replace(b"+", b" ").partition(b"=") for part in body.split(b"&") if part]
    return [(unquote_to_bytes(name), unquote_to_bytes(value)) for name, _, value in pairs]


def _parts(body: bytes, boundary: bytes) -> list[tuple[bytes, bytes]]:
    # The parser takes a microsecond for each boundary, and for each space after it; for others it takes none.
    _check_count(body.count(b"--" + boundary) - 1)  # the last one ends the form
    if re.search(b"--" + re.escape(boundary) + _LONG_PADDING, body):
        raise InvalidRequest("a boundary of the form has too much space after it", field="")
    parts: list[list[bytes]] = []  # the name and value of each
    header = [b"", b""]
    has_ended = False

    def add_to(place: int) -> Callable[[bytes, int, int], None]:
        def add(data: bytes, start: int, end: int) -> None:
            header[place] += data[start:end]

        return add

    def end_header() -> None:
        if header[0].lower() == b"content-disposition":
            parts[-1][0] = parse_options_header(header[1])[1].get(b"name", b"")
        header[:] = b"", b""

    def add_data(data: bytes, start: int, end: int) -> None:
        parts[-1][1] += data[start:end]

    def end_form() -> None:
        nonlocal has_ended
        has_ended = True

    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": lambda: parts.append([b"", b""]),
                "on_header_field": add_to(0),
                "on_header_value": add_to(1),
                "on_header_end": end_header,
                "on_part_data": add_data,
                "on_end": end_form,
            },
            max_header_count=_MAX_HEADERS,
            max_header_size=_MAX_HEADER_BYTES,
        )
        # A preamble (RFC 2046) is read as the content of a part before the first one.
        parser.write(b"--" + boundary + b"\r\n\r\n\r\n")
        parser.write(body)
    except FormParserError as error:
        raise InvalidRequest(f"the form is not valid: {error}", field="") from None
    if not has_ended:
        raise InvalidRequest("the form does not end with its boundary", field="")
    if not all(name for name, _ in parts[1:]):
        raise InvalidRequest("a field of the form does not have a name", field="")
    return [(name, value) for name, value in parts[1:]]


def _check_count(count: int) -> None:
    if count > _MAX_FIELDS:
        raise InvalidRequest(f"the form has more than {_MAX_FIELDS} fields: send fewer", field="")
