"""Text files of sentences, plain or gzip: read line by line, with errors that name the line.

The iterating functions never hold a whole file in memory, so that a corpus may be larger than memory.
"""

from __future__ import annotations

import gzip
import hashlib
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from pathlib import Path
from typing import IO, NamedTuple, cast

STANDARD_INPUT = Path("-")

_MAX_LINE_BYTES = 1 << 20
_GZIP_START = b"\x1f\x8b"
_UTF16_STARTS = b"\xff\xfe", b"\xfe\xff"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SentencePair(NamedTuple):
    """A sentence and its translation."""

    source: str
    target: str


def pair_hash(pair: SentencePair) -> int:
    """A hash of 64 bits; among a billion pairs, two share theirs with a probability below 0.03."""
    digest = hashlib.blake2b(f"{pair.source}\t{pair.target}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def iterate_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 text file, gzip if its name ends in .gz, without their ends.

    Only a line feed (or carriage return and line feed) ends a line: other separators of Unicode belong to
    the text. A byte order mark at the start is dropped. `-` is standard input.

    Raises:
        ValueError: The file is not gzip, not UTF-8, or has a far too long line; the message names the line.
        OSError: It is missing, a folder, or cannot be read.
    """
    number = 0
    try:
        with _opened(path) as stream:
            while line := stream.readline(_MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > _MAX_LINE_BYTES:
                    raise ValueError(
                        f"{path}, line {number}: longer than {_MAX_LINE_BYTES:,} bytes, so it is not a "
                        "sentence: does every sentence end with a line feed?"
                    )
                if number == 1:
                    line = line.removeprefix(_BYTE_ORDER_MARK)
                yield _decode_line(path, number, line)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        if number == 0 and isinstance(error, gzip.BadGzipFile):
            raise ValueError(f"{path}: its name ends in .gz, but it is not a gzip file") from error
        raise ValueError(f"{path}, after line {number}: not a whole gzip file ({error})") from error


def read_lines(path: Path) -> list[str]:
    """The lines of `iterate_lines` as a list."""
    return list(iterate_lines(path))


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines as UTF-8 text."""
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())


def iterate_parallel(source: Path, target: Path) -> Iterator[SentencePair]:
    """Pairs from two files, line by line.

    Raises:
        ValueError: The files have different numbers of lines (known at their end), or none, or are not text.
        OSError: A file cannot be read.
    """
    lines = [0, 0]
    for texts in zip_longest(iterate_lines(source), iterate_lines(target)):
        for side, text in enumerate(texts):
            lines[side] += text is not None
        if lines[0] == lines[1]:
            yield SentencePair(*texts)
    if lines[0] != lines[1]:
        raise ValueError(f"{source} has {lines[0]} lines and {target} has {lines[1]}: not a parallel corpus")
    if not lines[0]:
        raise ValueError(f"{source} and {target} have 0 lines: the corpus is empty")


def read_parallel(source: Path, target: Path) -> list[SentencePair]:
    """The pairs of `iterate_parallel` as a list."""
    return list(iterate_parallel(source, target))


def iterate_tsv(path: Path) -> Iterator[SentencePair]:
    """Pairs from one file, source and target separated by a tab.

    Raises:
        ValueError: A line does not have exactly two columns, or the file is empty or not text.
        OSError: The file cannot be read.
    """
    number = 0
    for number, line in enumerate(iterate_lines(path), start=1):
        columns = line.split("\t")
        if len(columns) != 2:
            raise ValueError(
                f"{path}, line {number}: expected 2 columns, source and target, found {len(columns)}"
                + (" (`cut -f1,2` keeps the first two)" if len(columns) > 2 else "")
            )
        yield SentencePair(*columns)
    if not number:
        raise ValueError(f"{path} has 0 lines: the corpus is empty")


def _opened(path: Path) -> AbstractContextManager[IO[bytes]]:
    if path == STANDARD_INPUT:
        return nullcontext(sys.stdin.buffer)
    return path.open("rb") if path.suffix != ".gz" else cast("IO[bytes]", gzip.open(path))


def _decode_line(path: Path, number: int, line: bytes) -> str:
    try:
        return line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        byte = f"byte 0x{line[error.start]:02x} at column {error.start + 1}"
        raise ValueError(f"{path}, line {number}: not UTF-8 ({byte}){_guess(number, line)}") from error


def _guess(number: int, line: bytes) -> str:
    """A guess at what the file is instead of text, to end an error message with."""
    if number == 1 and line.startswith(_GZIP_START):
        return ": it is gzip, so its name must end in .gz"
    if number == 1 and line.startswith(_UTF16_STARTS):
        return ": it is UTF-16, convert it with `iconv -f UTF-16 -t UTF-8`"
    return ": a binary file?" if b"\0" in line else ""
