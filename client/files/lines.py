"""Reads the lines of files and pipes, and whole files."""

from __future__ import annotations

import codecs
import gzip
import io
import itertools
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from seq2seq_serve.client.wire import MAX_REQUEST_BYTES
from seq2seq_serve.documents.segments import COMPRESSED, check_is_text, wrong_file

STANDARD = Path("-")
MAX_LINE_BYTES = 16 * 2**20  # four times the most of a request
_BLOCK_BYTES = 2**20

_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_UTF16 = "the file is UTF-16: convert it with `iconv -f UTF-16 -t UTF-8`"


@contextmanager
def open_input(path: Path) -> Iterator[Iterator[str]]:
    """Yields an iterator over the lines of a file or pipe; bytes that are not UTF-8 become surrogates.

    The first line is read at once, so that a file of another kind is refused before there is an output.

    Raises:
        OSError: The file cannot be read.
    """
    stream = open_binary(path)
    try:
        lines = read_lines(stream, path)
        first = [text_of(line, is_first=True) for line in itertools.islice(lines, 1)]
        yield itertools.chain(first, (text_of(line, is_first=False) for line in lines))
    finally:
        if path.is_file():  # closing a pipe would wait for a thread that reads from it
            stream.close()


def is_compressed(path: Path) -> bool:
    """Whether a file is compressed, by its name."""
    return path.suffix.lower() == COMPRESSED


def open_binary(path: Path) -> BinaryIO:
    """Opens a file, which is decompressed if it has the suffix of gzip, or standard input."""
    if is_compressed(path):
        return cast(BinaryIO, gzip.open(path))
    # Not `sys.stdin`: a thread that waits for a line would hold its lock.
    is_standard = path == STANDARD
    return io.BufferedReader(io.FileIO(sys.stdin.fileno() if is_standard else path, closefd=not is_standard))


def read_lines(stream: BinaryIO, path: Path, first_line: int = 0) -> Iterator[bytes]:
    """Yields the lines of a stream from where it stands, each with its break.

    Args:
        stream: Of `open_binary`.
        path: Its file, for errors.
        first_line: The number of the line at which the stream stands, counted from 0.

    Raises:
        WrongFile: The file is not text, UTF-16 or damaged, or a line has more than `MAX_LINE_BYTES`.
    """
    with _gzip_errors(path):
        for number in itertools.count(first_line + 1):
            line = stream.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            if len(line) > MAX_LINE_BYTES:
                raise wrong_file(path, f"line {number} has more than {MAX_LINE_BYTES} bytes")
            if number == 1:
                _check_begin(line, path)
            yield line


def _check_begin(content: bytes, path: Path) -> None:
    """Raises WrongFile if a file that begins so does not have lines of UTF-8."""
    if content.startswith(_UTF16_MARKS):
        raise wrong_file(path, _UTF16)
    check_is_text(content, path)


def text_of(line: bytes, *, is_first: bool) -> str:
    """Returns the text of a line of `read_lines`; bytes that are not UTF-8 become surrogates."""
    return line.rstrip(b"\r\n").decode("utf-8-sig" if is_first else "utf-8", "surrogateescape")


def count_lines(path: Path) -> int:
    """Returns the number of lines in a file or pipe, which is read; raises as `read_lines`."""
    with open_binary(path) as stream:
        return sum(1 for _ in read_lines(stream, path))


@contextmanager
def _gzip_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise wrong_file(path, f"the file is not a whole file of gzip: {error}") from error


def read_blocks(path: Path, max_bytes: int) -> Iterator[bytes]:
    """Yields the content of a file in blocks of up to a mebibyte.

    Raises:
        OSError: The file cannot be read, or has more than `max_bytes`.
    """
    num_bytes = 0
    with open_binary(path) as stream, _gzip_errors(path):
        while block := stream.read(_BLOCK_BYTES):
            num_bytes += len(block)
            if num_bytes > max_bytes:
                raise wrong_file(path, f"the file has more than {max_bytes} bytes: split it")
            yield block


def read_whole(path: Path, max_bytes: int) -> bytes:
    """Returns the content of a file, or of standard input, up to a number of bytes.

    Raises:
        OSError: The file cannot be read.
    """
    content = io.BytesIO()  # a file that is read at once may take the memory of `max_bytes`
    with open_binary(path) as stream, _gzip_errors(path):
        while block := stream.read(min(_BLOCK_BYTES, max_bytes - content.tell())):
            content.write(block)
    return content.getvalue()


def read_file(path: Path, advice: str = "make it smaller") -> bytes:
    """Returns the content of a file, or of standard input.

    Args:
        path: The file.
        advice: What to do with a file that is too large.

    Raises:
        OSError: The file cannot be read, or is too large for a request.
    """
    content = read_whole(path, MAX_REQUEST_BYTES + 1)
    if len(content) > MAX_REQUEST_BYTES:
        text = f"the file has more than {MAX_REQUEST_BYTES} bytes, the most of a request: {advice}"
        raise wrong_file(path, text)
    return content


def read_text(path: Path) -> str:
    """Returns the text of a file, or of standard input.

    Raises:
        OSError: The file cannot be read, is too large for a request, or is not UTF-8.
    """
    content = read_file(path)
    _check_begin(content, path)
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise wrong_file(path, f"the file is not UTF-8: byte {error.start + 1} is wrong") from error
