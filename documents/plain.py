"""Reads and writes plain texts: each line is a segment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from seq2seq_serve.documents.segments import (
    LETTER,
    Document,
    Part,
    Segment,
    TextSpan,
    decoded,
    lines_of,
    unchanged,
)


class Plain(Document):
    """A plain text (.txt) in UTF-8, whose lines with letters are segments."""

    def __init__(self, content: bytes, path: Path) -> None:
        self.encoding, self._text = decoded(content, path)

    def parts(self) -> Iterator[Part]:
        for line, after in lines_of(self._text):
            if LETTER.search(line):
                written = [line]
                segment = Segment([(line, 0)], partial(_replace, written))
                yield Part([segment], partial("".join, written))
            else:
                yield unchanged(line)
            yield unchanged(after)


def _replace(written: list[str], pieces: Sequence[TextSpan]) -> None:
    written[:] = [text for text, _ in pieces]
