"""The bodies of forms."""

import gc
import re
import tracemalloc
from contextlib import suppress

import pytest

from seq2seq_serve.server.errors import InvalidRequest
from seq2seq_serve.server.service.forms import read_form, text_of

KIND = "multipart/form-data; boundary=aXb"


def part(name: str, content: bytes, more: str = "") -> bytes:
    return (
        f'--aXb\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode(
            errors="surrogateescape"
        )
        + content
        + b"\r\n"
    )


def test_fields_of_any_bytes_are_read_in_order():
    file = b"\r\n--aX\x00\xff\r\n\r\n--"
    body = part("file", file, '; filename="말.wav"') + part("a", b"1") + part("a", b"") + b"--aXb--\r\n"
    assert read_form(body, KIND) == {"file": [file], "a": [b"1", b""]}
    typed = body.replace(b'wav"', b'wav"\r\nContent-Type: Audio/L16; rate=8000')
    assert read_form(typed, KIND) == {**read_form(body, KIND), "file_type": [b"Audio/L16; rate=8000"]}
    assert read_form(typed.replace(b"Audio", b"text"), KIND) == read_form(body, KIND)
    quoted = 'Multipart/Form-Data; x="a\\";boundary=b"; boundary="aXb" '
    assert read_form(body, quoted) == read_form(body, KIND)
    assert read_form(b"--aXb--", KIND) == {}


@pytest.mark.parametrize(
    "body",
    [
        b"A message of several parts.\r\n--aX\r\n" + part("a", b"1") + b"--aXb--\r\nits end",
        b"\r\n" + part("a", b"1") + b"--aXb--\r\n",
        part("a", b"1").replace(b"--aXb", b"--aXb \t") + b"--aXb--  \r\n",
        part("a", b"1").replace(b"Content-Disposition: ", b"content-disposition:") + b"--aXb--",
        part("x", b"2") + part("a", b"1").replace(b"--aXb", b"--aXb  ") + b"--aXb--",
    ],
)
def test_what_may_stand_around_a_boundary_is_skipped(body):
    """Forms with a preamble, a line break before the first boundary or spaces after one were refused."""
    assert read_form(body, KIND)["a"] == [b"1"]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", 'multipart/form-data; x="' + ";" * 1_000_000 + '"; boundary=aXb'),
        (b"", "multipart/form-data; x=\\" + ";" * 1_000_000 + "; boundary=aXb"),
        (b"--aXb" + b" " * 10_000_000, KIND),
        (b"\r\n--aXb" * 1_000_000, KIND),
        (part("a", b"1", ";" * 10_000_000), KIND),
        (b"--aXb\r\n" + b"a: b\r\n" * 1_000_000, KIND),
        (b"&" * 10_000_000, "application/x-www-form-urlencoded"),
    ],
)
@pytest.mark.timeout(60)
def test_a_hostile_form_is_refused_in_time_that_grows_with_its_length(body, kind):
    with pytest.raises(InvalidRequest):
        read_form(body, kind)


@pytest.mark.parametrize("end", [b"--aXb--", b"--aXb\r\n: "])
def test_a_form_takes_no_memory_after_it_was_read(end):
    """The library's parser is in a cycle of references with the content of the last file."""
    body = part("file", bytes(10_000_000), '; filename="a.wav"') + end
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        with suppress(InvalidRequest):
            read_form(body, KIND)
        assert tracemalloc.get_traced_memory()[0] < len(body) // 2
    finally:
        tracemalloc.stop()
        gc.enable()


def test_an_encoded_form_is_read():
    kind = "application/x-www-form-urlencoded"
    assert read_form(b"q=a+b%0A&q=&x=%EC%98%A4", kind) == {"q": [b"a b\n", b""], "x": ["오".encode()]}


@pytest.mark.parametrize(
    ("body", "kind", "match"),
    [
        (b"{}", "application/json", "the body is 'application/json': send multipart/form-data"),
        (b"", "multipart/form-data", "send multipart/form-data with its boundary"),
        (b"{}", KIND, "does not end with its boundary"),
        (part("a", b"1"), KIND, "does not end with its boundary"),
        (part("a", b"1") + b"--aXb", KIND, "does not end with its boundary"),
        (part("a", b"1", "; x=" + "x" * 5000) + b"--aXb--", KIND, "Maximum header size exceeded"),
        (b"--aXb\r\nX: y\r\n\r\n1\r\n--aXb--", KIND, "Field name not found in Content-Disposition"),
        (part("\udcff", b"1") + b"--aXb--", KIND, "the name of a field is not UTF-8"),
        (b"", f"multipart/form-data; boundary={'a' * 1000}", "Boundary length 1000 exceeds"),
        (part("a", b"1") * 65 + b"--aXb--", KIND, "more than 64"),
        (b"a=1&" * 70, "application/x-www-form-urlencoded", "more than 64 fields"),
        (b"%FF=a", "application/x-www-form-urlencoded", "not UTF-8"),
    ],
)
def test_a_form_that_is_not_whole_is_refused(body, kind, match):
    with pytest.raises(InvalidRequest, match=re.escape(match)) as caught:
        read_form(body, kind)
    assert caught.value.field == ""


def test_the_text_of_a_field_is_utf_8():
    assert text_of("말".encode(), "q") == "말"
    with pytest.raises(InvalidRequest, match="q is not UTF-8"):
        text_of(b"\xff", "q")
