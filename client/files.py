"""Reads texts and writes answers, a line each, continues an interrupted output, and reads whole files."""

from __future__ import annotations

import codecs
import gzip
import io
import itertools
import json
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from seq2seq_serve.client.output import valid_unicode
from seq2seq_serve.client.wire import MAX_REQUEST_BYTES

STANDARD = Path("-")
COMPRESSED = ".gz"
MAX_LINE_BYTES = 16 * 2**20  # four times the most of a request

_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_UTF16 = "the file is UTF-16: convert it with `iconv -f UTF-16 -t UTF-8`"


class WrongOutput(Exception):
    """The output file to continue does not belong to the given input."""


class WrongFile(OSError):
    """The content of a file is wrong."""


def wrong_file(path: Path, text: str) -> WrongFile:
    """Returns the error for a file whose content is wrong; commands print it after the file's name."""
    return WrongFile(None, text, str(path))


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
        WrongFile: The file is UTF-16 or damaged, or a line has more than `MAX_LINE_BYTES`.
    """
    try:
        for number in itertools.count(first_line + 1):
            line = stream.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            if len(line) > MAX_LINE_BYTES:
                raise wrong_file(path, f"line {number} has more than {MAX_LINE_BYTES} bytes")
            if number == 1 and line.startswith(_UTF16_MARKS):
                raise wrong_file(path, _UTF16)
            yield line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise wrong_file(path, f"the file is not a whole file of gzip: {error}") from error


def text_of(line: bytes, *, is_first: bool) -> str:
    """Returns the text of a line of `read_lines`; bytes that are not UTF-8 become surrogates."""
    return line.rstrip(b"\r\n").decode("utf-8-sig" if is_first else "utf-8", "surrogateescape")


def count_lines(path: Path) -> int | None:
    """Returns the number of lines in a file; None for a pipe or a compressed file."""
    if not path.is_file() or is_compressed(path):
        return None
    num_lines, chunk = 0, b"\n"
    with path.open("rb") as stream:
        while more := stream.read(2**20):
            chunk = more
            num_lines += chunk.count(b"\n")
    return num_lines + (not chunk.endswith(b"\n"))


def read_file(path: Path, advice: str = "make it smaller") -> bytes:
    """Returns the content of a file, or of standard input.

    Args:
        path: The file.
        advice: What to do with a file that is too large.

    Raises:
        OSError: The file cannot be read, or is too large for a request.
    """
    with open_binary(path) as stream:
        content = stream.read(MAX_REQUEST_BYTES + 1)
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
    if content.startswith(_UTF16_MARKS):
        raise wrong_file(path, _UTF16)
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise wrong_file(path, f"the file is not UTF-8: byte {error.start + 1} is wrong") from error


@contextmanager
def open_output(path: Path, *, resume: bool, overwrite: bool) -> Iterator[BinaryIO]:
    """Opens the file, pipe or device for the answers. On closing a file, they are written to the disk.

    Raises:
        FileExistsError: The file exists, and neither `resume` nor `overwrite` is set.
        OSError: The file cannot be written.
    """
    is_special = path.exists() and not path.is_file()
    mode = "wb" if is_special else "w+b" if overwrite else "r+b" if resume and path.exists() else "x+b"
    with path.open(mode) as stream:
        yield cast(BinaryIO, stream)
        stream.flush()
        if not is_special:
            os.fsync(stream.fileno())


def skip_answered(texts: Iterator[str], output: BinaryIO, lines_each: int, *, as_json: bool) -> int:
    """Skips the texts that `output` already answers, and cuts off an incomplete answer at its end.

    Args:
        texts: The texts of the input; advanced to the first without an answer.
        output: The file of answers, at its beginning; left at the end of its last whole answer.
        lines_each: The number of lines of an answer.
        as_json: Whether answers are JSON.

    Returns:
        The number of texts skipped.

    Raises:
        WrongOutput: The output does not answer these texts.
    """
    num_answered = num_bytes = 0
    while (lines := [output.readline() for _ in range(lines_each)])[-1].endswith(b"\n"):
        text = next(texts, None)
        if text is None:
            raise WrongOutput(f"it has more answers than the input has lines ({num_answered})")
        if not (_is_json_of(lines[0], text) if as_json else text.strip() or not b"".join(lines).strip()):
            raise WrongOutput(f"it does not answer line {num_answered + 1} of the input")
        num_answered += 1
        num_bytes += sum(map(len, lines))
    output.seek(num_bytes)
    output.truncate()
    return num_answered


def _is_json_of(line: bytes, text: str) -> bool:
    try:
        content = json.loads(line)
    except ValueError:
        return False
    return isinstance(content, dict) and content.get("source") == valid_unicode(text)
