"""Reads and writes plain texts: each line is a segment."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from seq2seq_serve.documents.segments import LETTER, LINE_BREAK, Document, Segment, TextSpan, decoded


class Plain(Document):
    """A plain text (.txt) in UTF-8, whose lines with letters are segments."""

    def __init__(self, content: bytes, path: Path) -> None:
        self._encoding, text = decoded(content, path)
        self._parts: list[str] = []  # lines, and the breaks after them
        end = 0
        for found in LINE_BREAK.finditer(text):
            self._parts += [text[end : found.start()], found[0]]
            end = found.end()
        self._parts.append(text[end:])
        self.segments = [
            Segment([(line, 0)], partial(self._write, place))
            for place, line in enumerate(self._parts)
            if LETTER.search(line)
        ]

    def content(self) -> bytes:
        return "".join(self._parts).encode(self._encoding)

    def _write(self, place: int, pieces: Sequence[TextSpan]) -> None:
        self._parts[place] = "".join(text for text, _ in pieces)
