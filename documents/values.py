"""Texts that are replaced where they stand in a file: strings of catalogues."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from seq2seq_serve.commands import install_command
from seq2seq_serve.documents.segments import Document, Segment, TextSpan, has_choice, has_words, wrong_file

# Paths, addresses, names and colours in a catalogue are not texts.
_CODE = re.compile(
    r"[!-.0-?A-\[\]^`-~]*+[/@_\\][!-~]*+|[:#][!-~]*+|[A-Za-z_$][\w$-]*+(?:\.[\w$-]++)++|true|false",
    re.ASCII | re.IGNORECASE,
)

_ESCAPE = re.compile(r"\\(?:[uU]([0-9a-fA-F]{4})|\r\n[ \t\f]*+|[\r\n][ \t\f]*+|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "f": "\f"}


class _Value:
    """A string of a file. Owned by its document.

    Attributes:
        begin: Where it begins.
        end: Where it ends.
    """

    __slots__ = ("_encode", "_lines", "_target", "begin", "end")

    def __init__(self, begin: int, end: int, encode: Callable[[str], str]) -> None:
        self.begin, self.end = begin, end
        self._encode = encode
        self._lines: list[str] | None = None  # if it has several
        self._target: str | None = None

    def segments(self, text: str) -> list[Segment]:
        """Returns the segments of its text."""
        if "\n" not in text:
            return [Segment(((text, 0),), self._translate)]
        self._lines = text.split("\n")
        return [
            Segment(((line, 0),), partial(self._translate_line, number))
            for number, line in enumerate(self._lines)
            if has_words(line)
        ]

    def _translate(self, pieces: Sequence[TextSpan]) -> None:
        self._target = "".join(text for text, _ in pieces)

    def _translate_line(self, number: int, pieces: Sequence[TextSpan]) -> None:
        self._translate(pieces)
        if self._lines is not None and self._target is not None:
            self._lines[number] = self._target

    def written(self) -> str | None:
        """Returns the string as it is written now; None if it stays."""
        if self._target is None:
            return None
        return self._encode(self._target if self._lines is None else "\n".join(self._lines))


class Spliced(Document):
    """A file in which only the strings that are translated change."""

    def __init__(self, encoding: str, text: str) -> None:
        self._encoding, self._text = encoding, text
        self._values: list[_Value] = []
        self.segments = []

    def add(self, begin: int, end: int, text: str, encode: Callable[[str], str]) -> None:
        """Adds the string between two places, whose lines are segments, after those that were added before.

        Args:
            begin: Where it begins in the file.
            end: Where it ends.
            text: What it says.
            encode: Returns how another text is written there.
        """
        if has_words(text) and not has_choice(text) and not _CODE.fullmatch(text.strip()):
            self.segments += self.replaceable(begin, end, text, encode)

    def replaceable(self, begin: int, end: int, text: str, encode: Callable[[str], str]) -> list[Segment]:
        """Returns the segments of a string, which are not among those of the document; see `add`."""
        self._values.append(_Value(begin, end, encode))
        return self._values[-1].segments(text)

    def content(self) -> bytes:
        parts, end = list[str](), 0
        for value in self._values:
            written = value.written()
            if written is not None:
                parts += [self._text[end : value.begin], written]
                end = value.end
        return "".join([*parts, self._text[end:]]).encode(self._encoding)


def imported(name: str, path: Path) -> Any:
    """Returns the package that reads a kind of file.

    Raises:
        WrongFile: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        text = f"the package {name} is missing, which reads such files: {install_command('documents')}"
        raise wrong_file(path, text) from error


def without_escapes(text: str) -> str:
    """Returns what a string with escapes of Java or Apple says."""

    def character(found: re.Match[str]) -> str:
        return chr(int(found[1], 16)) if found[1] else _ESCAPED.get(found[2], found[2]) if found[2] else ""

    # Characters beyond 16 bits are written in two halves
    whole = _ESCAPE.sub(character, text)
    return (
        whole
        if whole.isascii()
        else whole.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    )
