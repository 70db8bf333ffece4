"""Reads and writes subtitles: SubRip and WebVTT."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from seq2seq_serve.documents.alignment import formatted, text_of
from seq2seq_serve.documents.markup import MAX_COPIES, unescaped
from seq2seq_serve.documents.segments import (
    LETTER,
    Document,
    Part,
    Segment,
    TextSpan,
    decoded,
    lines_of,
    suffix_of,
    unchanged,
)
from seq2seq_serve.documents.spans import NO_TAG, Here, Tag, between, close_gaps

# Also with another arrow, or without spaces, as some programs read it
_TIMES = re.compile(r"^\s*(?:\d+:)?\d+:\d+[.,:]\d+\s*(?:[-–—]+>|→)\s*\d")
_SRT_TAG = re.compile(r"(</?[a-zA-Z][^<>]*>)")
_VTT_TAG = re.compile(r"(</?[a-zA-Z][^<>]*>|<\d[\d:.]*>)")
_TAG_NAME = re.compile(r"<([^\s.>]*)")
_POSITION = re.compile(r"^(?:\{\\[^}]*\})+")  # such as {\an8}, at the begin of a subtitle
_SPEAKER = re.compile(r"^\s*[-–—]\s*")  # begins a line of another speaker
_VOICE = re.compile(r"^\s*<v[\s.>]")  # the same in WebVTT
_WORD_OR_SPACE = re.compile(r"\S+|\s+")


class Subtitles(Document):
    """SubRip (.srt) or WebVTT (.vtt): each subtitle is a segment, or what each of its speakers says."""

    def __init__(self, content: bytes, path: Path) -> None:
        self.encoding, self._text = decoded(content, path)
        self._is_vtt = suffix_of(path) == ".vtt"

    def parts(self) -> Iterator[Part]:
        newline = "\r\n" if "\r\n" in self._text else "\n"
        lines = (line for line, _ in lines_of(self._text))
        before = ""
        for line in lines:
            yield unchanged(before + line)
            before = newline
            if not _TIMES.match(line):
                continue
            shown, last = list[str](), None
            for other in lines:
                if not other.strip():
                    last = other
                    break
                shown.append(other)
            for group in self._by_speakers(shown) if shown else ():
                yield unchanged(newline)
                yield _Subtitle(group, newline, is_vtt=self._is_vtt).part()
            if last is not None:
                yield unchanged(newline + last)

    def _by_speakers(self, shown: list[str]) -> list[list[str]]:
        """Returns the lines of a subtitle, those of each speaker apart if it has several."""
        if all(map(_SPEAKER.match, shown)):
            return [[line] for line in shown]
        voices = [number for number, line in enumerate(shown) if self._is_vtt and _VOICE.match(line)]
        if voices[:1] != [0]:
            return [shown]
        return [shown[begin:end] for begin, end in pairwise([*voices, len(shown)])]


class _Subtitle:
    """Lines that belong together. Owned by its document."""

    def __init__(self, shown: list[str], newline: str, *, is_vtt: bool) -> None:
        self._newline, self._is_vtt = newline, is_vtt
        self._num_lines = len(shown)
        self._written = newline.join(shown)
        first = shown[0]
        position = _POSITION.match(first)
        prefix = position[0] if position else ""
        if speaker := _SPEAKER.match(first[len(prefix) :]):
            prefix += speaker[0]
        self._prefix = prefix
        opened = NO_TAG
        heres = self._heres = list[Here]()  # by the number of the formatting
        pieces = self._pieces = list[TextSpan]()
        tag = _VTT_TAG if is_vtt else _SRT_TAG
        for number, part in enumerate(tag.split(" ".join(shown)[len(prefix) :])):
            if number % 2 == 0:
                pieces.append((unescaped(part) if is_vtt else part, len(heres)))
                heres.append(Here(part, opened, ("", ""), pieces[-1][0]))
            elif part.startswith("</"):
                opened = opened.around or NO_TAG
            elif not part[1:2].isdigit():  # times inside of a subtitle do not fit the words of a translation
                name = _TAG_NAME.match(part)
                opened = Tag(part, f"</{name[1] if name else ''}>", opened, opened.depth + 1)

    def part(self) -> Part:
        """Returns their part of the document."""
        has_letters = LETTER.search(text_of(self._pieces))
        return Part([Segment(self._pieces, self._write)] if has_letters else [], lambda: self._written)

    def _write(self, pieces: Sequence[TextSpan]) -> None:
        """Replaces the text; in the source's order if tags would take far more room."""
        heres = self._heres
        parts = close_gaps([(text, heres[number]) for text, number in pieces])
        lines = self._wrapped(parts, MAX_COPIES * len(self._written))
        if lines is None:
            source = [(here.text, number) for number, here in enumerate(heres)]
            whole = text_of(pieces)
            parts = [(text, heres[number]) for text, number in formatted(source, whole)]
            lines = self._wrapped(parts) or []
        self._written = self._prefix + self._newline.join(lines)

    def _wrapped(self, parts: Sequence[tuple[str, Here]], max_length: int | None = None) -> list[str] | None:
        """Returns lines of about the same length, with tags around the words that have them.

        None if the tags have more than `max_length` characters.
        """
        total = len(text_of(parts).strip())
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
                if is_apart and number < self._num_lines and half >= total * number / self._num_lines:
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
