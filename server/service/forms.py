"""Reads the bodies of forms: `multipart/form-data` (RFC 7578) and `application/x-www-form-urlencoded`."""

from __future__ import annotations

import logging
import math
import re
from typing import Any
from urllib.parse import unquote_to_bytes

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import FormParser, parse_options_header

from seq2seq_serve.server.errors import InvalidRequest

ENCODED = "application/x-www-form-urlencoded"
MAX_ENCODED_BYTES = 2**18  # of such a form: each takes up to a hundred while it is read
_MAX_FIELDS = 64
_LIMITS = {"MAX_MEMORY_FILE_SIZE": math.inf, "MAX_HEADER_COUNT": 16, "MAX_HEADER_SIZE": 4096}
_LONG_PADDING = rb"[ \t]{256}"

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # callers can cause its warnings

FormFields = dict[str, list[bytes]]


def read_form(body: bytes, content_type: str, file_names: dict[str, str] | None = None) -> FormFields:
    """Returns the values of each field, in order; the media type of a sound is the field NAME_type.

    Args:
        body: The form.
        content_type: Its media type.
        file_names: Gets the names of the files, by their fields.

    Raises:
        InvalidRequest: The body is not a whole form, or has more than `_MAX_FIELDS` fields.
    """
    kind, parameters = parse_options_header(content_type)
    boundary = parameters.get(b"boundary")
    if kind.decode() == ENCODED:
        pairs = _encoded(body)
    elif kind == b"multipart/form-data" and boundary:
        pairs = _parts(body, boundary, {} if file_names is None else file_names)
    else:
        raise InvalidRequest(
            f"the body is {content_type[:100]!r}: send multipart/form-data with its boundary", field=""
        )
    form: FormFields = {}
    for name, value in pairs:
        form.setdefault(text_of(name, "", "the name of a field"), []).append(value)
    return form


def text_of(value: bytes, field: str, name: str = "") -> str:
    """Returns the text of a field; raises InvalidRequest, which calls it `name`, if it is not UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{name or field[:100]} is not UTF-8", field=field[:100]) from None


def _encoded(body: bytes) -> list[tuple[bytes, bytes]]:
    _check_count(body.count(b"&"))
    pairs = [part.replace(b"+", b" ").partition(b"=") for part in body.split(b"&") if part]
    return [(unquote_to_bytes(name), unquote_to_bytes(value)) for name, _, value in pairs]


def _parts(body: bytes, boundary: bytes, file_names: dict[str, str]) -> list[tuple[bytes, bytes]]:
    # The parser takes a microsecond for each boundary, and for each space after it; for others it takes none.
    _check_count(body.count(b"--" + boundary) - 1)  # the last one ends the form
    if re.search(b"--" + re.escape(boundary) + _LONG_PADDING, body):
        raise InvalidRequest("a boundary of the form has too much space after it", field="")
    pairs: list[tuple[bytes, bytes]] = []
    ends: list[bool] = []
    parser: FormParser | None = None

    def add_file(file: Any) -> None:
        name = file.field_name or b""
        pairs.append((name, file.file_object.getvalue()))
        file_names[name.decode(errors="replace")] = (file.file_name or b"").decode(errors="replace")
        if (file.content_type or "").casefold().startswith("audio/"):
            pairs.append((name + b"_type", file.content_type.encode()))

    try:
        parser = FormParser(
            "multipart/form-data",
            lambda field: pairs.append((field.field_name or b"", field.value or b"")),
            add_file,
            lambda: ends.append(True),
            boundary=boundary,
            config=_LIMITS,
        )
        # A preamble (RFC 2046) is read as the content of a field before the first one.
        parser.write(b"--" + boundary + b'\r\nContent-Disposition: form-data; name=""\r\n\r\n\r\n')
        parser.write(body)
    except FormParserError as error:
        raise InvalidRequest(f"the form is not valid: {error}", field="") from None
    finally:
        if parser is not None:  # it and its own parser refer to each other, and to the last file
            parser.parser = None
    if not ends:
        raise InvalidRequest("the form does not end with its boundary", field="")
    return pairs[1:]


def _check_count(count: int) -> None:
    if count > _MAX_FIELDS:
        raise InvalidRequest(f"the form has more than {_MAX_FIELDS} fields: send fewer", field="")
