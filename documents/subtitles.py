"""Reads and writes subtitles: SubRip and WebVTT."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from seq2seq_serve.documents.alignment import formatted
from seq2seq_serve.documents.markup import MAX_COPIES, unescaped
from seq2seq_serve.documents.segments import (
    COMPRESSED,
    LETTER,
    LINE_BREAK,
    Document,
    Segment,
    TextSpan,
    decoded,
)
from seq2seq_serve.documents.spans import NO_TAG, Here, Tag, between, close_gaps

_TIMES = re.compile(r"^\s*(?:\d+:)?\d+:\d+[.,]\d+\s+-->\s")
_SRT_TAG = re.compile(r"(</?[a-zA-Z][^<>]*>)")
_VTT_TAG = re.compile(r"(</?[a-zA-Z][^<>]*>|<\d[\d:.]*>)")
_TAG_NAME = re.compile(r"<([^\s.>]*)")
_POSITION = re.compile(r"^(?:\{\\[^}]*\})+")  # such as {\an8}, at the begin of a subtitle
_SPEAKER = re.compile(r"^\s*[-–—]\s*")  # begins a line of another speaker
_WORD_OR_SPACE = re.compile(r"\S+|\s+")


class Subtitles(Document):
    """SubRip (.srt) or WebVTT (.vtt): each subtitle is a segment, or each of its lines that has a speaker."""

    def __init__(self, content: bytes, path: Path) -> None:
        self._encoding, text = decoded(content, path)
        self._is_vtt = path.name.lower().removesuffix(COMPRESSED).endswith(".vtt")
        self._lines: list[str] = []
        self.segments = []
        lines = LINE_BREAK.split(text)
        self._newline = "\r\n" if "\r\n" in text else "\n"
        place = 0
        while place < len(lines):
            self._lines.append(lines[place])
            place += 1
            if not _TIMES.match(lines[place - 1]):
                continue
            begin = place
            while place < len(lines) and lines[place].strip():
                place += 1
            shown = lines[begin:place]
            has_speakers = len(shown) > 1 and all(map(_SPEAKER.match, shown))
            for group in [[line] for line in shown] if has_speakers else [shown] if shown else []:
                self._add(group)

    def content(self) -> bytes:
        return self._newline.join(self._lines).encode(self._encoding)

    def _add(self, shown: list[str]) -> None:
        """Adds the lines of a segment, whose place a single line holds from now on."""
        place = len(self._lines)
        self._lines.append(self._newline.join(shown))
        first = shown[0]
        position = _POSITION.match(first)
        prefix = position[0] if position else ""
        if speaker := _SPEAKER.match(first[len(prefix) :]):
            prefix += speaker[0]
        opened = NO_TAG
        heres: list[Here] = []  # by the number of the formatting
        pieces: list[TextSpan] = []
        tag = _VTT_TAG if self._is_vtt else _SRT_TAG
        for number, part in enumerate(tag.split(" ".join(shown)[len(prefix) :])):
            if number % 2 == 0:
                pieces.append((unescaped(part) if self._is_vtt else part, len(heres)))
                heres.append(Here(part, opened, ("", ""), pieces[-1][0]))
            elif part.startswith("</"):
                opened = opened.around or NO_TAG
            elif not part[1:2].isdigit():  # times inside of a subtitle do not fit the words of a translation
                name = _TAG_NAME.match(part)
                opened = Tag(part, f"</{name[1] if name else ''}>", opened, opened.depth + 1)

        if LETTER.search("".join(text for text, _ in pieces)):
            self.segments.append(Segment(pieces, partial(self._write, place, prefix, heres, len(shown))))

    def _write(
        self, place: int, prefix: str, heres: Sequence[Here], num_lines: int, pieces: Sequence[TextSpan]
    ) -> None:
        """Replaces the text of a segment; in the source's order if tags would take far more room."""
        parts = close_gaps([(text, heres[number]) for text, number in pieces])
        lines = self._wrapped(parts, num_lines, MAX_COPIES * len(self._lines[place]))
        if lines is None:
            source = [(here.text, number) for number, here in enumerate(heres)]
            whole = "".join(text for text, _ in pieces)
            parts = [(text, heres[number]) for text, number in formatted(source, whole)]
            lines = self._wrapped(parts, num_lines) or []
        self._lines[place] = prefix + self._newline.join(lines)

    def _wrapped(
        self, parts: Sequence[tuple[str, Here]], num_lines: int, max_length: int | None = None
    ) -> list[str] | None:
        """Returns lines of about the same length, with tags around the words that have them.

        None if the tags have more than `max_length` characters.
        """
        total = len("".join(text for text, _ in parts).strip())
        lines, line, num_tagged = list[str](), list[str](), 0
        opened, length, is_apart = NO_TAG, 0, False
        for text, here in parts:
            for word in _WORD_OR_SPACE.findall(text):
                if word.isspace():
                    is_apart = bool(length)
                    continue
                its = here.place
                shown = html.escape(word, quote=False) if self._is_vtt else word
                half, number = length + len(word) / 2, len(lines) + 1
                if is_apart and number < num_lines and half >= total * number / num_lines:
                    closing, opening = _between(opened, NO_TAG)[0], _between(NO_TAG, its)[1]
                    lines.append("".join([*line, closing]))
                    line = [opening, shown]
                else:
                    closing, opening = _between(opened, its)
                    line += [closing, " " * is_apart, opening, shown]
                num_tagged += len(closing) + len(opening)
                if max_length is not None and num_tagged > max_length:
                    return None
                opened, length, is_apart = its, length + is_apart + len(word), False
        return [*lines, "".join([*line, _between(opened, NO_TAG)[0]])]


def _between(one: Tag, other: Tag) -> tuple[str, str]:
    """Returns what is written from a place inside of one tag to another: ends of tags, and tags."""
    closing, opening = between(one, other)
    return "".join(tag.close for tag in closing), "".join(tag.open for tag in opening)
