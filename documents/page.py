"""Reads and writes HTML, as browsers read it: https://html.spec.whatwg.org/multipage/parsing.html."""

from __future__ import annotations

import codecs
import html
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from seq2seq_serve.documents.markup import Flows, Tag, unescaped
from seq2seq_serve.documents.segments import LETTER, Document, Segment, TextSpan

# What does not end goes on to the end of the file.
_ATTRIBUTE_PATTERN = r"""([^\s/>][^\s/>=]*+)(?:\s*+=\s*+("[^"]*+"?|'[^']*+'?|[^\s>"'][^\s>]*+)?+)?+"""
_ATTRIBUTE = re.compile(_ATTRIBUTE_PATTERN)
_MARKUP = re.compile(
    r"<!--(?:-?>|.*?(?:--!?>|\Z))|<(?:[!?]|/(?![a-zA-Z]))[^>]*+(?:>|\Z)|<(/?)([a-zA-Z][^\s/>]*+)"
    r"(?:[\s/]++|" + _ATTRIBUTE_PATTERN.replace("([", "(?:[").replace('("', '(?:"') + r")*+(?:>|\Z)",
    re.DOTALL,
)
_CHARSET = re.compile(rb"charset\s*+=\s*+[\"']?([\w-]{1,40})", re.IGNORECASE)
_CHARSETS = re.compile(
    r"utf-8|cp\d+|iso8859-\d+|koi8-[rut]|big5|euc_(jp|kr)|gb\w*|shift_jis|iso2022_jp|mac-roman"
)

_NAMES = """
a abbr acronym b bdi bdo big cite code data del dfn em font i ins kbd label mark q rp rt ruby s samp small
span strike strong sub sup time tt u var
"""
_INLINE = frozenset(_NAMES.split())
_LEFT_OUT = frozenset(["math", "noscript", "pre", "script", "style", "svg", "template", "textarea"])
_VOID = frozenset(
    ["area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"]
)
_ENDS = {
    name: re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE | re.ASCII)  # of elements without elements inside
    for name in ("script", "style", "textarea", "title")
}
_ATTRIBUTES = frozenset(["alt", "aria-label", "placeholder", "title", "translate"])


class HtmlDocument(Document):
    """HTML: the text between two blocks, line breaks or pictures is a segment, and so are some attributes.

    Its encoding is the given one, or the one that its content says.
    """

    def __init__(self, content: bytes, path: Path, encoding: str = "") -> None:  # noqa: ARG002
        self._encoding, text = (encoding, content.decode(encoding)) if encoding else _decoded_page(content)
        self._flows = Flows()
        self._attributes: list[Segment] = []
        self._num_open = Counter[str]()  # elements around the place, by their names
        self._left_out = ""  # the one of them that is left out, with those inside
        self._num_inside = Counter[str]()
        place = 0
        while found := _MARKUP.search(text, place):
            if found.start() > place:
                self._add_text(text[place : found.start()])
            name, place = (found[2] or "").lower(), found.end()
            if not name:
                self._flows.add_markup(found[0])
            elif found[1]:
                self._end(found[0], name)
            else:
                self._start(found[0], name)
                if name in _ENDS:
                    end = _ENDS[name].search(text, place)
                    begin, place = place, end.start() if end else len(text)
                    self._add_text(text[begin:place])
        self._add_text(text[place:])
        self._flows.end()
        self.segments = self._flows.segments + self._attributes

    def content(self) -> bytes:
        return self._flows.written().encode(self._encoding, "xmlcharrefreplace")

    def _add_text(self, text: str) -> None:
        if self._left_out:
            self._flows.end(text)
        elif text:
            self._flows.add_text(text, unescaped(text))

    def _start(self, markup: str, name: str) -> None:
        """Adds the tag that begins an element."""
        is_empty = name in _VOID or markup.endswith("/>")
        values = {} if self._left_out else _shown_values(markup, len(name) + 1)
        is_no = "translate" in values and _value(values.pop("translate")).lower() == "no"
        if self._left_out or name in _LEFT_OUT or is_no:
            if not is_empty:
                self._left_out = self._left_out or name
                self._num_inside[name] += 1
            self._flows.end(markup)
            return
        self._num_open[name] += not is_empty
        if name in _INLINE:
            tag = self._flows.open(markup, name)
        else:
            tag = Tag(markup, "")
            self._flows.end(tag)
        self._add_attributes(tag, values.values())

    def _end(self, markup: str, name: str) -> None:
        """Adds the end of an element. That of one around an element that is left out also ends this one."""
        if self._left_out and (self._num_inside[name] or not self._num_open[name]):
            self._num_inside[name] -= self._num_inside[name] > 0
            if not self._num_inside[self._left_out]:
                self._left_out = ""
                self._num_inside.clear()
            self._flows.end(markup)
            return
        self._left_out = ""
        self._num_inside.clear()
        self._num_open[name] -= self._num_open[name] > 0
        if name in _INLINE:
            self._flows.close(markup, name)
        else:
            self._flows.end(markup)

    def _add_attributes(self, tag: Tag, values: Iterable[re.Match[str]]) -> None:
        """Adds the attributes of a tag that are shown."""
        parts, end = list[str](), 0
        for value in values:
            text = _value(value)
            if not LETTER.search(text):
                continue
            parts += [tag.open[end : value.start(2)], value[2]]
            end = value.end(2)
            self._attributes.append(
                Segment([(text, 0)], partial(_write_attribute, tag, parts, len(parts) - 1))
            )
        parts.append(tag.open[end:])


def _shown_values(tag: str, place: int) -> dict[str, re.Match[str]]:
    """Returns the attributes of a tag that are texts, and `translate`; the first of those with one name."""
    values: dict[str, re.Match[str]] = {}
    for attribute in _ATTRIBUTE.finditer(tag, place):
        if (name := attribute[1].lower()) in _ATTRIBUTES:
            values.setdefault(name, attribute)
    return values


def _write_attribute(tag: Tag, parts: list[str], place: int, pieces: Sequence[TextSpan]) -> None:
    """Replaces a part of a tag, the value of an attribute."""
    parts[place] = '"' + html.escape("".join(text for text, _ in pieces)) + '"'
    tag.open = "".join(parts)


def _value(attribute: re.Match[str]) -> str:
    """Returns the value of an attribute of HTML."""
    value = attribute[2] or ""
    quote = value[:1] if value[:1] in ('"', "'") else ""
    return unescaped(value[len(quote) :].removesuffix(quote) if quote else value)


def _decoded_page(content: bytes) -> tuple[str, str]:
    """Returns the encoding of a page, as its mark, its zeros, itself or its bytes say, and its text."""
    encoding: str = json.detect_encoding(content)
    if encoding != "utf-8":
        return encoding, content.decode(encoding, "replace")
    encodings = ["utf-8", "cp1252"]
    if named := _CHARSET.search(content[:1024]):
        with suppress(LookupError):
            encoding = codecs.lookup(named[1].decode()).name
            encoding = {"ascii": "cp1252", "iso8859-1": "cp1252"}.get(encoding, encoding)
            if _CHARSETS.fullmatch(encoding):
                encodings.insert(0, encoding)
    for encoding in encodings:
        with suppress(UnicodeDecodeError):
            return encoding, content.decode(encoding)
    return "latin-1", content.decode("latin-1")
