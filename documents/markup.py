"""Tags around texts: how they follow the words of a translation, in subtitles, HTML and Word files."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from seq2seq_serve.documents.segments import LETTER, Segment, TextSpan, longest

MAX_COPIES = 4  # how often the markup of a text may be written around parts of its translation

_LONG_NUMBER = re.compile(r"&#[0-9]{1000,}+;?")  # has more digits than `html.unescape` reads
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(slots=True, eq=False)
class Tag:
    """A tag and those around it, as a chain that the texts inside share.

    Attributes:
        open: As it is written.
        close: Its end.
        around: The next tag around it; None at the end of the chain.
        depth: The number of tags around it.
    """

    open: str
    close: str
    around: Tag | None = None
    depth: int = 0


NO_TAG = Tag("", "")


def between(one: Tag, other: Tag) -> tuple[str, str]:
    """Returns the ends of tags, and the tags, that lead from a place inside of one tag to another."""
    closing, opening = [], []
    while one is not other:
        depths = one.depth, other.depth
        if depths[0] >= depths[1]:
            closing.append(one.close)
            one = one.around or NO_TAG
        if depths[1] >= depths[0]:
            opening.append(other.open)
            other = other.around or NO_TAG
    return "".join(closing), "".join(reversed(opening))


@dataclass(slots=True)
class _Here:
    """A text, or markup that belongs to no text, in the flow of a document.

    Attributes:
        markup: As it is written.
        place: The tag around it.
        around: What is written before a translation of the text, and after it; None for markup.
    """

    markup: str
    place: Tag
    around: tuple[str, str] | None = None


@dataclass(slots=True)
class _Flow:
    """Texts that belong together, with the tags among them. Owned by its document.

    Attributes:
        begin: The tag around the place where it begins.
        end: That around its end.
        tokens: What is written: texts, tags that begin, the ends of tags.
        longest: The number of the longest text.
        translated: Replaces the texts.
    """

    begin: Tag
    tokens: list[_Here | Tag | str]
    longest: int
    end: Tag
    translated: Sequence[TextSpan] | None = None

    def translate(self, pieces: Sequence[TextSpan]) -> None:
        """Replaces the texts, each of which has the formatting of its number."""
        self.translated = pieces

    def markup(self) -> str:
        """Returns what is written, with a translation if there is one."""
        source = "".join(map(_written, self.tokens))
        if self.translated is None:
            return source
        written = self._with(self.translated, MAX_COPIES * len(source))
        if written is None:
            whole = "".join(text for text, _ in self.translated)
            written = self._with([(whole, self.longest)])
        return written or ""

    def _with(self, pieces: Sequence[TextSpan], max_length: int | None = None) -> str | None:
        """Returns what is written with other texts; None if their tags take more than `max_length` letters.

        What belongs to no text comes after the texts that were before it, as far as these are in order.
        """
        heres = [token for token in self.tokens if isinstance(token, _Here)]
        texts = [number for number, here in enumerate(heres) if here.around is not None]
        written, place, num_tagged, begin = list[str](), self.begin, 0, 0
        for text, formatting in [*pieces, ("", len(texts))]:
            end = texts[formatting] if formatting < len(texts) else len(heres)
            if not text and formatting < len(texts):
                continue
            for here in heres[begin:end]:
                if here.around is None:
                    tags = between(place, here.place)
                    written += [*tags, here.markup]
                    num_tagged += sum(map(len, tags))
                    place = here.place
            begin = max(begin, end)
            its = heres[end] if formatting < len(texts) else None
            tags = between(place, its.place if its else self.end)
            written += tags
            if its is not None and its.around is not None:
                written += [its.around[0], html.escape(_NOT_XML.sub("", text), quote=False), its.around[1]]
                num_tagged += sum(map(len, (*tags, *its.around)))
                place = its.place
            if max_length is not None and num_tagged > max_length:
                return None
        return "".join(written)


def _written(part: str | _Here | Tag | _Flow) -> str:
    if isinstance(part, _Flow | _Here):
        return part.markup() if isinstance(part, _Flow) else part.markup
    return part.open if isinstance(part, Tag) else part


class Flows:
    """Cuts markup into flows, and adds a segment for each that has letters. Owned by a document."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self._parts: list[str | _Here | Tag | _Flow] = []
        self._place = self._begin = NO_TAG
        self._extended = NO_TAG  # the last tag with properties
        self._names: list[str] = []  # of the tags around the place
        self._num_open = Counter[str]()
        self._tokens: list[_Here | Tag | str] = []
        self._pieces: list[TextSpan] = []

    def written(self) -> str:
        """Returns all markup, with the texts as they are now."""
        return "".join(map(_written, self._parts))

    def add_text(self, markup: str, text: str, around: tuple[str, str] = ("", "")) -> None:
        """Adds a text, and what is written around its translations."""
        self._pieces.append((text, len(self._pieces)))
        self._tokens.append(_Here(markup, self._place, around))

    def add_markup(self, markup: str) -> None:
        """Adds markup that neither ends a text nor formats one, such as a comment."""
        self._tokens.append(_Here(markup, self._place))

    def open(self, markup: str, name: str) -> Tag:
        """Adds a tag that formats the texts inside."""
        self._place = Tag(markup, f"</{name}>", self._place, self._place.depth + 1)
        self._names.append(name)
        self._num_open[name] += 1
        self._tokens.append(self._place)
        return self._place

    def extend(self, markup: str) -> None:
        """Adds the properties of a tag, which it has once, after its beginning."""
        if self._tokens and self._tokens[-1] is self._place is not self._extended:
            self._extended = self._place
            self._place.open += markup
        else:
            self.add_markup(markup)

    def close(self, markup: str, name: str) -> None:
        """Adds the end of a tag, which also ends those inside that lack one."""
        if not self._num_open[name]:
            self.add_markup(markup)
            return
        if self._tokens and self._tokens[-1] is self._place:
            self.add_markup("")  # for an element without a text, which stays
        while (innermost := self._names.pop()) != name:
            self._num_open[innermost] -= 1
            self._place = self._place.around or NO_TAG
        self._num_open[name] -= 1
        self._place.close = markup
        self._place = self._place.around or NO_TAG
        self._tokens.append(markup)

    def end(self, markup: str | Tag = "") -> None:
        """Ends a flow: what follows belongs to other texts."""
        if LETTER.search("".join(text for text, _ in self._pieces)):
            flow = _Flow(self._begin, self._tokens, longest(self._pieces), self._place)
            self._parts.append(flow)
            self.segments.append(Segment(self._pieces, flow.translate))
            self._tokens, self._pieces = [], []
        else:
            self._parts += self._tokens
            self._tokens.clear()
            self._pieces.clear()
        self._begin = self._place
        self._parts.append(markup)


def unescaped(text: str) -> str:
    """Returns a text of HTML without character references."""
    return html.unescape(_LONG_NUMBER.sub("\ufffd", text))
