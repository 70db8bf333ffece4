"""Reads the bodies of forms: `multipart/form-data` (RFC 7578) and `application/x-www-form-urlencoded`."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl

from seq2seq_serve.server.errors import InvalidRequest

_MAX_FIELDS = 64
_MAX_HEADER_BYTES = 4096  # of one field

# A parameter of a header (RFC 9110, section 5.6.6). Every search ends at the next quotation mark, so the time
# grows with the header's length alone; that of `email.message.Message` grows with its square.
_PARAMETER = re.compile(r';\s*([^\s;="]+)\s*=\s*("(?:[^"\\]|\\.)*"|[^;]*)', re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_DISPOSITION = "content-disposition"

Form = dict[str, list[bytes]]


def read_form(body: bytes, content_type: str) -> Form:
    """Returns the values of each field, in order.

    Raises:
        InvalidRequest: The body is not a whole form, or has more than `_MAX_FIELDS` fields.
    """
    kind, parameters = _header(content_type)
    form: Form = {}
    if kind == "application/x-www-form-urlencoded":
        try:
            pairs = parse_qsl(
                body.decode(), keep_blank_values=True, errors="strict", max_num_fields=_MAX_FIELDS
            )
        except ValueError:
            raise InvalidRequest(
                f"the form is not UTF-8, or has more than {_MAX_FIELDS} fields", field=""
            ) from None
        for name, text in pairs:
            form.setdefault(name, []).append(text.encode())
        return form
    if kind != "multipart/form-data" or not parameters.get("boundary"):
        raise InvalidRequest(
            f"the body is {content_type[:100]!r}: send multipart/form-data with its boundary", field=""
        )
    between = b"\r\n--" + parameters["boundary"].encode()
    if not body.startswith(between[2:]):
        raise InvalidRequest("the form does not begin with its boundary", field="")
    begin = len(between) - 2
    while body.startswith(b"\r\n", begin):
        end = body.find(between, begin)
        end_of_header = body.find(b"\r\n\r\n", begin, min(end, begin + _MAX_HEADER_BYTES))
        if end < 0 or end_of_header < 0:
            raise InvalidRequest("the form ends inside a field, or a field has too long a header", field="")
        field = _field_name(body[begin + 2 : end_of_header].decode(errors="replace"))
        if field is None or sum(map(len, form.values())) == _MAX_FIELDS:
            raise InvalidRequest(
                f"a field of the form does not have a name, or there are more than {_MAX_FIELDS}", field=""
            )
        form.setdefault(field, []).append(body[end_of_header + 4 : end])
        begin = end + len(between)
    if not body.startswith(b"--", begin):
        raise InvalidRequest("the form does not end with its boundary", field="")
    return form


def text_of(value: bytes, name: str) -> str:
    """Returns the text of a field; raises InvalidRequest if it is not UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{name[:100]} is not UTF-8", field=name[:100]) from None


def _field_name(headers: str) -> str | None:
    """Returns the name of a field from its headers; None without one."""
    for line in headers.split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == _DISPOSITION:
            return _header(value)[1].get("name")
    return None


def _header(text: str) -> tuple[str, dict[str, str]]:
    """Returns the value of a header in lower case, and its parameters by their names in lower case."""
    parameters: dict[str, str] = {}
    for match in _PARAMETER.finditer(text):
        name, value = match[1].lower(), match[2].strip()
        is_quoted = len(value) > 1 and value[0] == value[-1] == '"'
        parameters.setdefault(name, _ESCAPED.sub(r"\1", value[1:-1]) if is_quoted else value)
    return text.partition(";")[0].strip().lower(), parameters
