"""Tags of HTML and references to characters in strings of programs, which other formats write as text.

A tag with an end, such as <b> or <link>, follows its words in a translation. <br> and blocks, such as <p>,
end a text. A tag of HTML that lacks its end or its begin, or never has one, stays beside its words. Anything
else in angle brackets, such as the variable <filename> or a comparison, is a part of the text.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence
from enum import Enum

from seq2seq_serve.documents.markup import Flows
from seq2seq_serve.documents.notes import MAX_TAGS
from seq2seq_serve.documents.page import FIXED, INLINE, VOID, note_of
from seq2seq_serve.documents.segments import TAG, Part, has_choice, tags_between

_NAMES_OF_BLOCKS = """
    address article aside blockquote body center dd details dialog div dl dt fieldset figcaption figure footer
    form h1 h2 h3 h4 h5 h6 header html li main nav ol p section summary table tbody td tfoot th thead tr ul
"""
_BLOCKS = frozenset(_NAMES_OF_BLOCKS.split())
_WITHOUT_END = frozenset(["br", "dd", "dt", "hr", "li", "p", "td", "th", "tr"])  # end a text also alone
_BREAK = "wbr"  # between the letters of a word
# A page, whose scripts, comments and attributes only a parser of HTML tells from texts
_PAGE = re.compile(r"<(?:!--|!\[|(?:script|style|ruby|svg|math)\b)|\btranslate\s*=", re.IGNORECASE)
_REFERENCE = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[a-zA-Z][a-zA-Z0-9]{1,31});")
_DIRECTIVE = r"%[-_0^\#]?[aAbBdDeFgGhHIjklmMpPrRSTuUVwWyYzZ]"
_FIELD = "(?:y{2,4}|Y{2,4}|M{1,4}|D{1,2}|d{1,2}|H{1,2}|h{1,2}|m{1,2}|s{1,2}|E{1,4})"
_FIELDS = rf"(?:{_FIELD}[-/.:,\ ]{{1,2}}){{0,8}}?"
_END = "(?![A-Za-z0-9])"
_TWO_FIELDS = "|".join(
    rf"{letter}{{2,4}}[-/.:,\ ]{{1,2}}{_FIELDS}(?!{letter})(?=yy|YY|MM|DD|dd|HH|hh|mm|ss|EE){_FIELD}{_END}"
    for letter in "yYMDdHhmsE"
)
# Formulas of TeX, and formats of dates: one has a letter that printf and shells do not have, or two fields of
# two letters, one of three, or the marks of dates or of times between fields that units do not have
_KEPT = re.compile(
    rf"""
    ( \$\$[^$]{{1,1000}}\$\$ | \$(?![\s${{])(?=[^$]*[\\^_=])[^$]{{1,500}}(?<![\s\\])\$(?!\w)
    | \\\((?:(?!\\\)).){{1,500}}\\\)
    | (?<![%\d]) (?=(?:{_DIRECTIVE}(?:T|[-/.:,\ ]{{0,2}})){{0,8}}?%[-_0^\#]?(?:[ABHIMRTYjmy]
        |b[-/.:,\ ]{{0,2}}%[-_0^\#]?[de]|[de][-/.:,\ ]{{0,2}}%[-_0^\#]?b))
      {_DIRECTIVE}(?:(?:T|[-/.:,\ ]{{0,2}}){_DIRECTIVE}){{0,12}}Z?{_END}
    | (?<![A-Za-z0-9]) (?={_FIELDS}(?:{_TWO_FIELDS}|(?=yyy|YYY|MMM|EEE){_FIELD}{_END})
        |(?:[DMYdmy]{{1,4}}[-/.]){{1,3}}?(?:yy|YY|MM|DD|dd) | (?:yy|YY|MM|DD|dd)[-/.][DMYdmy]
        |[Hhms]{{1,2}}:(?:HH|hh|mm|ss) | (?:HH|hh|mm|ss):[Hhms])
      {_FIELD}(?:[-/.:,\ ]{{1,2}}{_FIELD}){{1,8}}{_END}
    )
    """,
    re.VERBOSE,
)
_PIECE = re.compile(rf"{TAG.pattern}|<[^\s<>]*+>?|&(?:#?\w{{1,32}};)?|[^<&]++", re.DOTALL)

_ESCAPED_TAG = tags_between(
    "&lt;|&#60;|&#[xX]3[cC];",
    ">|&gt;|&#62;|&#[xX]3[eE];",
    ('"|&quot;|&#34;|&#[xX]22;', "'|&apos;|&#39;|&#[xX]27;"),
)
_TWICE_ESCAPED_TAG = tags_between("&amp;lt;", "&(?:amp;)?gt;", ("&(?:amp;)?quot;", "&(?:amp;)?#39;"))


class Element(Enum):
    """The begin or the end of an element of XML between the texts of a string."""

    BEGIN = True
    END = False


class Tags:
    """The tags of a string, and its references to characters. Owned by the reader of the string.

    Args:
        parts: How its texts are written, and the elements of XML between them.
        decoded: Returns what a part of it says; None if it is written as it is.
        escape: Returns how a text with tags is written in its file.
    """

    def __init__(
        self,
        parts: Sequence[str | Element],
        decoded: Callable[[str], str] | None = None,
        escape: Callable[[str], str] = str,
    ) -> None:
        levels = (TAG, _ESCAPED_TAG) if decoded is None else (_ESCAPED_TAG, _TWICE_ESCAPED_TAG)
        self._pattern, self._is_twice = levels[0], False
        self._decoded, self.escape = decoded or str, escape
        written = [part for part in parts if isinstance(part, str)]
        self._in_text: set[str] | None = None  # the names of tags that are text; None if all are
        self._single = set[str]()  # those of tags without an end that stand for something, such as a picture
        rest = whole = "".join(map(self._decoded, written))
        if not (has_choice(whole) or _PAGE.search(whole)):
            self._in_text, self._single = self._without_pair(parts)
            rest = self._without_tags(written)
            if rest == whole:  # the string may be escaped once more than its file is
                self._pattern, self._is_twice = levels[1], True
                self._in_text, self._single = self._without_pair(parts)
                if not whole.lstrip().startswith("&lt;"):
                    self._in_text |= _BLOCKS | _WITHOUT_END
                rest = self._without_tags(written)
        references = [found for found in _REFERENCE.findall(rest) if self._character(found)]
        self._written: dict[str, str] = {}  # how the string writes a character
        self._raw = set[str]()  # what it has as it is, with a character that it elsewhere writes so
        if references or rest != whole:
            self._written = {"&": "&amp;"} if references or self._is_twice else {}
            self._written |= {"<": "&lt;"}
            for reference in reversed(references):
                self._written[self._character(reference)] = reference
            raw = (found[0] for found in _PIECE.finditer(rest) if found[0][0] in "<&")
            self._raw = {piece for piece in raw if not self._character(piece) or piece in "<&"}
            characters = {piece[0] for piece in self._raw}
            if characters == self._written.keys():  # it is not HTML
                self._written, self._raw = {}, set()
            for character in characters - set(map(self._character, references)):
                self._written.pop(character, None)
        self._to_escape = str.maketrans(self._written)

    def escaped(self, text: str) -> str:
        """Returns a text as the string has it."""
        if not self._raw:
            return self.escape(text.translate(self._to_escape))
        pieces = (found[0] for found in _PIECE.finditer(text))
        return self.escape("".join(p if p in self._raw else p.translate(self._to_escape) for p in pieces))

    def whole(self, tokens: Sequence[str]) -> str:
        """Returns the text of a flow with its tags; empty if it has none, or has elements of XML."""
        written = "".join(tokens)
        is_text = self._decoded is str or not any(token.startswith("<") for token in tokens)
        has_tags = is_text and not self._is_twice and len(self._split(written)) > 1
        return self._decoded(written) if has_tags else ""

    def said(self, written: str) -> str:
        """Returns what a part of the string says that does not have tags."""
        text = self._decoded(written)
        if not self._written:
            return text
        return _REFERENCE.sub(lambda found: self._character(found[0]) or found[0], text)

    def add(self, flows: Flows, written: str, add_text: Callable[[str], None]) -> None:
        """Adds a part of the string to a flow.

        Args:
            flows: The flows.
            written: The part.
            add_text: Adds a part without tags.
        """
        parts = self._split(written)
        place = 0
        while place < len(parts):
            part = parts[place]
            place += 1
            if place % 2:
                if part:
                    add_text(part)
                continue
            is_end, name, is_empty = self._tag(part)
            if not is_end and (num_parts := self._add_note(flows, parts, place)):
                place += num_parts - 1
                continue
            if not is_end and name in FIXED and place + 1 < len(parts):
                after = self._tag(parts[place + 1])[:2]
                if after == (True, name) and (text := self.said(parts[place])).strip():
                    flows.add_fixed("".join(parts[place - 1 : place + 2]), text)
                    place += 2
                    continue
            if name in self._single and flows.is_within:
                flows.add_fixed(part, "")
            elif name in _BLOCKS or name in _WITHOUT_END or name in self._single:
                flows.end(part)
            elif name == _BREAK or is_empty:
                flows.add_markup(part)
            elif is_end:
                flows.close(part, name)
            else:  # written once, because programs compare the number of tags
                flows.open(part, name, is_single=True)

    def _add_note(self, flows: Flows, parts: Sequence[str], place: int) -> int:
        """Adds the number of a note, whose first tag is before a place; returns the number of its parts."""
        first = parts[place - 1 : place - 1 + 2 * MAX_TAGS]
        read, after = note_of(map(self._decoded, first), flows.last_characters) or ([], "")
        if read:
            flows.add_note("".join(first[: len(read)]), after)
        return len(read)

    def _without_tags(self, parts: Sequence[str]) -> str:
        return "".join(self._decoded("".join(self._split(part)[::2])) for part in parts)

    def _split(self, written: str) -> list[str]:
        """Returns the texts of a part with the tags between them."""
        parts, end = list[str](), 0
        for found in self._pattern.finditer(written):
            if self._in_text is not None and found[2].lower() not in self._in_text:
                parts += [written[end : found.start()], found[0]]
                end = found.end()
        return [*parts, written[end:]]

    def _tag(self, markup: str) -> tuple[bool, str, bool]:
        """Returns whether a tag is that of an end, its name, and whether nothing is inside of it."""
        found = self._pattern.fullmatch(markup)
        assert found is not None
        return found[1] == "/", found[2].lower(), found[4] == "/"

    def _without_pair(self, parts: Sequence[str | Element]) -> tuple[set[str], set[str]]:
        """Returns the names of tags that do not have an end or a begin where it must be.

        They are those of variables, and those of elements of HTML that stand for something, such as pictures.
        """
        opened, num_open = list[str | Element](), dict[tuple[str | Element, int], int]()
        alone, in_html, depth = set[str](), set[str](), 0  # elements of XML around the place

        def close(what: str | Element) -> bool:
            """Ends the innermost element, and those inside of it; returns whether there is one."""
            if not num_open.get((what, depth)):  # a tag does not end within another element
                return False
            while True:
                innermost = opened.pop()
                num_open[innermost, depth] -= 1
                if innermost == what:
                    return True
                if isinstance(innermost, str):
                    alone.add(innermost)

        def begin(what: str | Element) -> None:
            opened.append(what)
            num_open[what, depth] = num_open.get((what, depth), 0) + 1

        for part in parts:
            if part is Element.BEGIN:
                depth += 1
                begin(part)
            elif part is Element.END:
                close(Element.BEGIN)
                depth -= 1
            elif isinstance(part, str):
                for found in self._pattern.finditer(part):
                    name = found[2].lower()
                    if name in _WITHOUT_END or name == _BREAK:
                        continue
                    if (name in INLINE or name in VOID) and _is_html(found):
                        in_html.add(name)
                    if found[4]:  # a variable, such as <name/>
                        alone.add(name)
                    elif not found[1]:
                        begin(name)
                    elif not close(name):
                        alone.add(name)
        alone |= {name for name in opened if isinstance(name, str)}
        in_html = alone & in_html if all(isinstance(part, str) for part in parts) else set()
        return alone - in_html, in_html & VOID

    @staticmethod
    def _character(reference: str) -> str:
        """Returns the character of a reference; empty if there is none."""
        text = html.unescape(reference)
        return text if len(text) == 1 else ""


def _is_html(tag: re.Match[str]) -> bool:
    """Whether a tag with the name of an element of HTML that lacks its pair is one, and not a variable."""
    after = tag.string[tag.end() : tag.end() + 1]
    return "=" in (tag[3] or "") or (not tag[4] and (tag[1] == "/" or after.isalnum()))


def string_part(text: str, changed: Callable[[str], str] = str) -> Part:
    """Returns the part of a string, each of whose lines is a text.

    Args:
        text: What it says.
        changed: Returns what is written for the string as it is then.
    """
    flows = Flows(str, is_tight=True)
    tags = flows.tags = Tags([text]) if "<" in text or "&" in text else None

    def add_text(written: str) -> None:
        for number, line in enumerate(written.split("\n")):
            if number:
                flows.end("\n")
            for place, part in enumerate(_KEPT.split(line)):
                text = part if tags is None else tags.said(part)
                if place % 2:
                    flows.add_fixed(part, text)
                elif part:
                    flows.add_text(part, text)

    if tags is None:
        add_text(text)
    else:
        tags.add(flows, text, add_text)
        flows.close_all()
    flows.end()
    return flows.part(changed)
