"""The bodies of forms."""

import re

import pytest

from seq2seq_serve.server.errors import InvalidRequest
from seq2seq_serve.server.service.forms import read_form, text_of

KIND = "multipart/form-data; boundary=aXb"


def part(name: str, content: bytes, more: str = "") -> bytes:
    return (
        f'--aXb\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + content + b"\r\n"
    )


def test_fields_of_any_bytes_are_read_in_order():
    file = b"\r\n--aX\x00\xff\r\n\r\n--"
    body = part("file", file, '; filename="말.wav"') + part("a", b"1") + part("a", b"") + b"--aXb--\r\n"
    assert read_form(body, KIND) == {"file": [file], "a": [b"1", b""]}
    assert read_form(body, 'multipart/form-data; boundary="aXb"') == read_form(body, KIND)
    assert read_form(b"--aXb--", KIND) == {}


@pytest.mark.parametrize("header", ['; x="', "; x=\\", '; x=" ', '; x="\\"; a=', "; ", "; x "])
def test_a_long_header_is_read_in_time_that_grows_with_its_length(header):
    """`email` took two seconds for 64 KiB, and would take ten minutes for these."""
    long = header + ";" * 1_000_000 + '"' * header.count('"')
    assert read_form(b"--aXb--", f"multipart/form-data{long}; boundary=aXb") == {}
    assert read_form(b"--aXb--", 'multipart/form-data; x="a\\";boundary=b"; Boundary = aXb ') == {}


def test_an_encoded_form_is_read():
    kind = "application/x-www-form-urlencoded"
    assert read_form(b"q=a+b%0A&q=&x=%EC%98%A4", kind) == {"q": [b"a b\n", b""], "x": ["오".encode()]}


@pytest.mark.parametrize(
    ("body", "kind", "match"),
    [
        (b"{}", "application/json", "the body is 'application/json': send multipart/form-data"),
        (b"", "multipart/form-data", "send multipart/form-data with its boundary"),
        (b"x" + part("a", b"1"), KIND, "does not begin with its boundary"),
        (part("a", b"1"), KIND, "ends inside a field"),
        (part("a", b"1") + b"--aXb", KIND, "does not end with its boundary"),
        (part("a", b"1", "; x=" + "x" * 5000) + b"--aXb--", KIND, "too long a header"),
        (b"--aXb\r\nX: y\r\n\r\n1\r\n--aXb--", KIND, "does not have a name"),
        (part("a", b"1") * 65 + b"--aXb--", KIND, "more than 64"),
        (b"a=1&" * 70, "application/x-www-form-urlencoded", "more than 64 fields"),
        (b"a=\xff", "application/x-www-form-urlencoded", "not UTF-8"),
        (b"a=%FF", "application/x-www-form-urlencoded", "not UTF-8"),
    ],
)
def test_a_form_that_is_not_whole_is_refused(body, kind, match):
    with pytest.raises(InvalidRequest, match=re.escape(match)):
        read_form(body, kind)


def test_the_text_of_a_field_is_utf_8():
    assert text_of("말".encode(), "q") == "말"
    with pytest.raises(InvalidRequest, match="q is not UTF-8"):
        text_of(b"\xff", "q")
