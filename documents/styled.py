"""Reads and writes subtitles with styles: Advanced SubStation Alpha (.ass) and SubStation Alpha (.ssa).

pysubs2 writes the whole file anew, and does not say where the codes of a text stand; here only texts change.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path

from seq2seq_serve.documents.alignment import text_of
from seq2seq_serve.documents.markup import Flows
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

_FIELDS = 10  # of an event, where the file does not say it
_PART = re.compile(r"(\{[^{}]*\})|((?:[^{]|\{(?![^{}]*\}))++)")
_SPACE, _BREAK = re.compile(r"\\[Nnh]"), re.compile(r"\\[Nn]")
_STYLE = re.compile(r"\{\\([ibus])([01])\}")
_DRAWN_OR_SUNG = re.compile(r"\\(?:p[1-9]|[kK])")
_WORD = re.compile(r"((?:\{[^{}]*\}|[^ {]|\{)++)| ++")
_CODE = re.compile(r"\{[^{}]*\}")
_IS_SPACE = re.compile(r"\\(?=[Nnh])")
_SPEAKER = re.compile(r"((?:\{[^{}]*\}|\s)*+[-–—]\s*+)(.*+)", re.DOTALL)  # begins a line of another speaker


def _line(text: str) -> Part:
    """Returns the part of a line of an event, or of several that one speaker has."""
    num_lines = 1 + len(_BREAK.findall(text))
    if not _CODE.search(text):
        shown, written = _SPACE.sub(" ", text), [text]

        def write(pieces: Sequence[TextSpan]) -> None:
            written[0] = _wrapped(_escaped(text_of(pieces)), num_lines)

        segments = [Segment([(shown, 0)], write)] if LETTER.search(shown) else []
        return Part(segments, partial("".join, written))
    flows = Flows(_escaped, is_ordered=True)
    ends = {found[1]: found.start() for found in _STYLE.finditer(text) if found[2] == "0"}
    opened = set[str]()
    has_text = False
    for part in _PART.finditer(text):
        code, shown = part[1], part[2]
        style = _STYLE.fullmatch(part[0])
        if shown:
            has_text = True
            flows.add_text(shown, _SPACE.sub(" ", shown))
        elif style and style[2] == "1" and style[1] not in opened and part.end() <= ends.get(style[1], -1):
            opened.add(style[1])
            flows.open(code, style[1])
        elif style and style[2] == "0" and style[1] in opened:
            opened.remove(style[1])
            flows.close(code, style[1])
        elif has_text:
            flows.add_markup(code)
        else:
            flows.end(code)
    flows.end()
    return flows.part(lambda markup: markup if markup == text else _wrapped(markup, num_lines))


def _wrapped(written: str, num_lines: int) -> str:
    """Returns a text in a number of lines of about the same length."""
    if num_lines == 1 or not written:
        return written
    parts = [found[0] for found in _WORD.finditer(written)]
    sizes = [len(_CODE.sub("", part)) for part in parts]
    ends = [*accumulate(sizes)]
    gaps = [number for number, part in enumerate(parts) if not part.strip(" ")]
    middles = [ends[gap] - sizes[gap] / 2 for gap in gaps]
    place = 0  # among the gaps
    for number in range(1, num_lines):
        middle = ends[-1] * number / num_lines
        after = bisect_left(middles, middle, place)
        if after == len(gaps) or (after > place and middle - middles[after - 1] < middles[after] - middle):
            after -= 1
        if place <= after:
            parts[gaps[after]] = r"\N"
            place = after + 1
    return "".join(parts)


class StyledSubtitles(Document):
    """.ass and .ssa: the text of an event is a segment, or each of its lines that has a speaker.

    Drawings and the syllables of songs stay, and so does what stands before or between the words in braces.
    """

    def __init__(self, content: bytes, path: Path) -> None:
        self.encoding, self._text = decoded(content, path)

    def parts(self) -> Iterator[Part]:
        num_fields, is_event = _FIELDS, False
        for line, after in lines_of(self._text):
            kind, _, rest = line.partition(":")
            if line.startswith("["):
                is_event = line.strip().lower() == "[events]"
            elif is_event and kind == "Format":
                num_fields = rest.count(",") + 1
            elif (
                is_event
                and kind == "Dialogue"
                and len(fields := line.split(",", num_fields - 1)) == num_fields
            ):
                yield unchanged(line.removesuffix(fields[-1]))
                yield from _event(fields[-1])
                yield unchanged(after)
                continue
            yield unchanged(line + after)


def _event(text: str) -> Iterator[Part]:
    """Yields the parts of the text of an event."""
    if any(map(_DRAWN_OR_SUNG.search, _CODE.findall(text))):
        yield unchanged(text)
        return
    shown = text.split(r"\N")
    speakers = [_SPEAKER.fullmatch(line) for line in shown]
    if len(shown) == 1 or not all(speakers):
        yield _line(text)
        return
    for number, speaker in enumerate(speakers):
        if speaker:
            yield unchanged(r"\N" * (number > 0) + speaker[1])
            yield _line(speaker[2])


def _escaped(text: str) -> str:
    """Returns a text whose braces and backslashes are replaced: they begin codes, and cannot be escaped."""
    return _IS_SPACE.sub("/", text).replace("{", "(").replace("}", ")")
