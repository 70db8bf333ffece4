"""Reads the fields of LibreTranslate's requests: of the query, and of a body that is JSON or a form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from seq2seq_serve.protos.languages import tag_of
from seq2seq_serve.protos.options import OPTIONS
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateOptions
from seq2seq_serve.server.errors import InvalidRequest, TooLarge
from seq2seq_serve.server.service.call import BYTES_PER_TEXT_BYTE
from seq2seq_serve.server.service.calls import RemoteCall
from seq2seq_serve.server.service.fair_thread import YieldPoint
from seq2seq_serve.server.service.forms import ENCODED, MAX_ENCODED_BYTES, FormFields, read_form, text_of
from seq2seq_serve.server.service.open_inference.json import read_json

AUTO = "auto"  # in place of a language, which is detected then
KEY = "api_key"
FILE = "file"

_TEXT, _HTML = "text", "html"
_TERMS, _KEEP = "terms", "keep_placeholders"  # not fields of LibreTranslate's
# `secret` is of LibreTranslate's own page.
_FIELDS = ("q", "source", "target", "format", "alternatives", _TERMS, _KEEP, KEY, "secret", FILE)
_MAX_TEXTS = 256
_MOST_ALTERNATIVES = 10
_MAX_DIGITS = 6
_MAX_SHORT = 1_000  # characters of a field, besides the texts
_JSON_OBJECT = re.compile(rb"\s*+\{")
_JSON_BYTES = 4  # take as long to read as a byte of text


@dataclass(frozen=True)
class Fields:
    """The fields of a request. Those that are missing, empty or null have their defaults.

    Attributes:
        texts: The texts of `q`.
        is_list: Whether `q` is a list.
        source: The tag of the language of the texts; `AUTO` if it has to be detected.
        target: The tag of the language into which they are translated; empty if it is missing.
        is_html: Whether the texts are HTML.
        num_alternatives: The number of further translations of each text.
        options: Of a generation: how terms are translated, and whether placeholders are kept.
        keeps_placeholders: Whether documents of programs keep them.
        key: The caller's token.
        file: The content of a file.
        file_name: Its name.
    """

    texts: list[str]
    is_list: bool
    source: str
    target: str
    is_html: bool
    num_alternatives: int
    options: GenerateOptions
    keeps_placeholders: bool
    key: str
    file: bytes
    file_name: str


async def read_fields(request: Request, body: bytes, call: RemoteCall) -> Fields:
    """Returns the fields of a request; those of its body come before those of its query.

    Raises:
        InvalidRequest: The body is neither JSON nor a form, or a field is wrong.
    """
    content_type = request.headers.get("content-type", "")
    is_multipart = content_type.lower().startswith("multipart/")
    query = request.scope["query_string"]

    def read(_: YieldPoint) -> Fields:
        names: dict[str, str] = {}
        values = _form_values(read_form(query, ENCODED))
        if not is_multipart and ("json" in content_type or _JSON_OBJECT.match(body)):
            values |= _given(read_json(body)) if body else {}
        elif body:
            if not content_type and len(body) > MAX_ENCODED_BYTES:
                raise TooLarge(f"a form may have {MAX_ENCODED_BYTES} bytes: send JSON", field="")
            values |= _form_values(read_form(body, content_type or ENCODED, names))
        return _fields(values, names.get(FILE, ""))

    each = BYTES_PER_TEXT_BYTE if is_multipart else _JSON_BYTES
    return await call.read(read, len(query) + len(body) // each)


def _form_values(form: FormFields) -> dict[str, Any]:
    """Returns the values of a form by their fields: several texts as a list, the file as bytes."""
    values: dict[str, Any] = {}
    for name, contents in form.items():
        given = contents if name == FILE else [_unix_lines(text_of(content, name)) for content in contents]
        if name == "q" and len(given) > 1:
            values[name] = given
        elif len(set(given)) > 1:
            raise InvalidRequest(f"{name[:100]} has several values: send one", field=name[:100])
        else:
            values[name] = given[0]
    return _given(values)


def _unix_lines(text: str) -> str:
    """Returns a text with the line breaks that it had before a browser put it into a form."""
    return text.replace("\r\n", "\n")


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that are neither empty nor null."""
    return {name: value for name, value in values.items() if value is not None and value not in ("", b"")}


def _fields(values: Mapping[str, Any], file_name: str) -> Fields:
    for name in values:
        if name not in _FIELDS:
            raise InvalidRequest(f"there is no field {name[:100]!r}", field=name[:100])
    given = values.get("q", [])
    texts: list[Any] = given if isinstance(given, list) else [given]
    if len(texts) > _MAX_TEXTS or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"q must be a text, or a list of at most {_MAX_TEXTS} texts", field="q")
    if (form := _text(values, "format") or _TEXT) not in (_TEXT, _HTML):
        raise InvalidRequest(f"format is {form[:100]!r}, and must be text or html", field="format")
    file = values.get(FILE, b"")
    if not isinstance(file, bytes):
        raise InvalidRequest("file must be a file in a form of multipart/form-data", field=FILE)
    options = _options(values)
    return Fields(
        texts=texts,
        is_list=isinstance(values.get("q"), list),
        source=tag_of(_text(values, "source") or AUTO),
        target=tag_of(_text(values, "target")),
        is_html=form == _HTML,
        num_alternatives=_num_alternatives(values.get("alternatives", 0)),
        options=options,
        keeps_placeholders=options.keep_placeholders or _KEEP not in values,
        key=_text(values, KEY),
        file=file,
        file_name=file_name,
    )


def _text(values: Mapping[str, Any], name: str) -> str:
    text = values.get(name, "")
    if not isinstance(text, str) or len(text) > _MAX_SHORT:
        raise InvalidRequest(f"{name} must be a text of at most {_MAX_SHORT} characters", field=name)
    return text


def _options(values: Mapping[str, Any]) -> GenerateOptions:
    """Returns the options among some fields, each given as a JSON value, or as its text in a form."""
    options = GenerateOptions()
    for name in (_TERMS, _KEEP):
        given = values.get(name)
        if given is None or given in ([], {}):
            continue
        text = given if isinstance(given, str) else json.dumps(given)
        try:
            options.MergeFrom(OPTIONS[name].read(text, is_text=True))
        except ValueError as error:
            raise InvalidRequest(f"{name} {error}", field=name) from None
    return options


def _num_alternatives(given: Any) -> int:
    """Returns a number of alternatives, at most as many as there are for any text."""
    text = str(given) if isinstance(given, int | str) and not isinstance(given, bool) else ""
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise InvalidRequest(
            f"alternatives is {str(given)[:100]!r}, and must be a number from 0 on", field="alternatives"
        )
    return min(int(text), _MOST_ALTERNATIVES)
