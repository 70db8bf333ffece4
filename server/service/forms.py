"""Reads the bodies of forms: `multipart/form-data` (RFC 7578) and `application/x-www-form-urlencoded`."""

from __future__ import annotations

from email.message import Message
from email.parser import HeaderParser
from urllib.parse import parse_qsl

from seq2seq_serve.server.errors import InvalidRequest

_MAX_FIELDS = 64
_MAX_HEADER_BYTES = 4096  # of one field

Form = dict[str, list[bytes]]


def read_form(body: bytes, content_type: str) -> Form:
    """Returns the values of each field, in order.

    Raises:
        InvalidRequest: The body is not a whole form, or has more than `_MAX_FIELDS` fields.
    """
    header = Message()
    header["content-type"] = content_type
    kind, boundary = header.get_content_type(), header.get_param("boundary")
    form: Form = {}
    if kind == "application/x-www-form-urlencoded":
        try:
            pairs = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=_MAX_FIELDS)
        except ValueError:
            raise InvalidRequest(
                f"the form is not UTF-8, or has more than {_MAX_FIELDS} fields", field=""
            ) from None
        for name, text in pairs:
            form.setdefault(name, []).append(text.encode())
        return form
    if kind != "multipart/form-data" or not isinstance(boundary, str):
        raise InvalidRequest(
            f"the body is {content_type[:100]!r}: send multipart/form-data with its boundary", field=""
        )
    between = b"\r\n--" + boundary.encode()
    if not body.startswith(between[2:]):
        raise InvalidRequest("the form does not begin with its boundary", field="")
    begin = len(between) - 2
    while body.startswith(b"\r\n", begin):
        end = body.find(between, begin)
        end_of_header = body.find(b"\r\n\r\n", begin, min(end, begin + _MAX_HEADER_BYTES))
        if end < 0 or end_of_header < 0:
            raise InvalidRequest("the form ends inside a field, or a field has too long a header", field="")
        headers = HeaderParser().parsestr(body[begin + 2 : end_of_header].decode(errors="replace"))
        field = headers.get_param("name", header="content-disposition")
        if not isinstance(field, str) or sum(map(len, form.values())) == _MAX_FIELDS:
            raise InvalidRequest(
                f"a field of the form does not have a name, or there are more than {_MAX_FIELDS}", field=""
            )
        form.setdefault(field, []).append(body[end_of_header + 4 : end])
        begin = end + len(between)
    if not body.startswith(b"--", begin):
        raise InvalidRequest("the form does not end with its boundary", field="")
    return form
