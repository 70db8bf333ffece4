"""Reads and writes HTML, as browsers read it: https://html.spec.whatwg.org/multipage/parsing.html."""

from __future__ import annotations

import codecs
import html
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path

from seq2seq_serve.documents.alignment import text_of
from seq2seq_serve.documents.markup import Flows, unescaped
from seq2seq_serve.documents.notes import MAX_CHARACTERS, MAX_TAGS, WORD, is_note, stays
from seq2seq_serve.documents.segments import LETTER, Document, Part, Segment, TextSpan, wrong_file
from seq2seq_serve.documents.spans import Here, Tag
from seq2seq_serve.protos.languages import is_other_language

# What does not end goes on to the end of the file.
_ATTRIBUTE_PATTERN = r"""([^\s/>][^\s/>=]*+)(?:\s*+=\s*+("[^"]*+"?|'[^']*+'?|[^\s>"'][^\s>]*+)?+)?+"""
_ATTRIBUTE = re.compile(_ATTRIBUTE_PATTERN)
_MARKUP = re.compile(
    r"<!--(?:-?>|.*?(?:--!?>|\Z))|<(?:[!?]|/(?![a-zA-Z]))[^>]*+(?:>|\Z)|<(/?)([a-zA-Z][^\s/>]*+)"
    r"(?:[\s/]++|" + _ATTRIBUTE_PATTERN.replace("([", "(?:[").replace('("', '(?:"') + r")*+(?:>|\Z)",
    re.DOTALL,
)
_INSIDE = re.compile(
    r"([^<]*+)</([a-zA-Z]++)\s*+>(?:<[^<>]{0,200}>){0,4}"
)  # of an element, and tags after it
_CHARSET = re.compile(rb"charset\s*+=\s*+[\"']?([\w-]{1,40})", re.IGNORECASE)
_CHARSETS = re.compile(
    r"utf-8|cp\d+|iso8859-\d+|koi8-[rut]|big5|euc_(jp|kr)|gb\w*|shift_jis|iso2022_jp|mac-roman"
)
# Browsers read the names of these as those of larger ones
_AS_BROWSERS = {
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "euc_kr": "cp949",
    "gb2312": "gbk",
    "shift_jis": "cp932",
}

# These may be written several times, unless something refers to one.
_FORMATTING_NAMES = """
b bdi bdo big cite del dfn em font i ins mark s samp small span strike strong sub sup tt u var
"""
FORMATTING = frozenset(_FORMATTING_NAMES.split())
FIXED = frozenset(["code", "kbd"])
READINGS, RUBY = frozenset(["rp", "rt", "rtc"]), frozenset(["rb", "ruby"])  # of characters of the source
INLINE = FORMATTING | FIXED | {"a", "abbr", "acronym", "data", "label", "q", "time"}
_WITHIN = INLINE | READINGS | RUBY | {"wbr"}
_DRAWN = frozenset(["math", "svg"])  # formulas and pictures, which stand within a sentence
_UNTRANSLATED = frozenset(["notranslate", "katex", "katex-display", "MathJax", "MathJax_Display"])  # classes
_FORMULAS = frozenset(["display", "inline"])  # classes of formulas of pandoc, beside "math"
_LEFT_OUT = _DRAWN | {"pre", "script", "style", "template", "textarea"}
# These stand within a sentence that goes on after them, with texts of their own.
EMBEDDED = {
    name: re.compile(rf"</{name}\s*+>", re.IGNORECASE | re.ASCII)
    for name in (
        "audio",
        "button",
        "canvas",
        "iframe",
        "meter",
        "object",
        "picture",
        "progress",
        "select",
        "video",
    )
} | dict.fromkeys(("embed", "input"), re.compile(""))
_EMBEDDED_CHARACTERS = 4000  # of one of them
_GOES_ON = re.compile(r"\s*+[^<\s]")
VOID = frozenset(
    ["area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"]
)
_ENDS = {
    name: re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE | re.ASCII)  # of elements without elements inside
    for name in ("script", "style", "textarea", "title")
}
_SHOWN = frozenset(["alt", "aria-label", "placeholder", "title"])
_NAMES, _LANGUAGES = ("name", "property"), ("lang", "xml:lang")
_ATTRIBUTES = (
    _SHOWN
    | {"class", "content", "epub:type", "href", "id", "role", "translate", "type", "value"}
    | {*_NAMES, *_LANGUAGES}
)
_DESCRIPTIONS = frozenset(
    ["description", "og:description", "og:title", "twitter:description", "twitter:title"]
)
_BUTTONS = frozenset(["button", "reset", "submit"])


class HtmlDocument(Document):
    """HTML: the text between two blocks or line breaks is a segment, and so are some attributes.

    A picture or formula belongs to a sentence that has a word and a space before it, and ends others. So does
    an embedded element, such as a field, if a text follows.

    Its encoding is the given one, or the one that its content says.
    """

    errors = "xmlcharrefreplace"

    def __init__(self, content: bytes, path: Path, encoding: str = "") -> None:
        self.encoding, self._text = (
            (encoding, content.decode(encoding)) if encoding else _decoded_page(content, path)
        )
        self._flows = Flows(is_tight=True)
        self._languages: list[Callable[[Sequence[TextSpan]], None]] = []  # write that of the page
        self._num_open = Counter[str]()  # elements around the place, by their names
        self._left_out = ""  # the one of them that is left out, with those inside
        self._num_inside = Counter[str]()
        self._fixed: list[str] = []  # its markup, if it stands within a sentence
        self._fixed_texts: list[str] = []
        self._is_embedded = False  # whether the text is that of an element within a sentence
        self._reading = ""  # the element of ruby around the place: "ruby", or that of a reading

    def parts(self) -> Iterator[Part]:
        text, place = self._text, 0
        while found := _MARKUP.search(text, place):
            if found.start() > place:
                self._add_text(text[place : found.start()])
            if self._flows.is_ready:
                yield self._part()
            name, place = (found[2] or "").lower(), found.end()
            if not name and self._fixed:
                self._fixed.append(found[0])
            elif not name:
                self._flows.add_markup(found[0])
            elif self._is_of_source(found[0], name, is_end=bool(found[1])) and not self._left_out:
                self._flows.add_of_source(found[0])
            elif found[1]:
                self._end(found[0], name)
            else:
                after = 0 if self._left_out else self._add_note(found) or self._add_embedded(found, name)
                if after := after or self._add_without_letters(found[0], name, place):
                    place = after
                    continue
                self._start(found[0], name)
                if name in _ENDS:
                    end = _ENDS[name].search(text, place)
                    begin, place = place, end.start() if end else len(text)
                    self._add_text(text[begin:place])
        self._add_text(text[place:])
        self._break_fixed()
        self._flows.end()
        yield self._part()

    def _part(self) -> Part:
        part = self._flows.part()
        if languages := self._languages:
            self._languages = []
            part.written = partial(self._with_language, part.written, languages)
        return part

    def _with_language(
        self, written: Callable[[], str], languages: Sequence[Callable[[Sequence[TextSpan]], None]]
    ) -> str:
        for write in languages if self.target_language else ():
            write([(self.target_language, 0)])
        return written()

    def _add_text(self, text: str) -> None:
        is_shown = self._reading not in READINGS and not (self._reading and text.isspace())
        if self._fixed:
            self._fixed.append(text)
            self._fixed_texts.append(text if is_shown else "")
        elif self._left_out:
            self._flows.end(text)
        elif text and not is_shown:
            self._flows.add_of_source(text)
        elif text:
            self._flows.add_text(text, unescaped(text))

    def _is_of_source(self, markup: str, name: str, *, is_end: bool) -> bool:
        """Whether a tag belongs to characters of the source: of a reading, or where a word may be broken."""
        if name in RUBY or (name in READINGS and self._reading):
            is_over = is_end and name == "ruby"
            self._reading = "" if is_over else "ruby" if is_end or name in RUBY else name
            return is_end or name in READINGS or not self._is_kept(name, _values(markup, len(name) + 1))
        if name not in INLINE and name not in VOID:
            self._reading = ""
        return name == "wbr" or self._reading in READINGS

    def _add_note(self, tag: re.Match[str]) -> int:
        """Adds the number of a note; returns the place after it, and 0 if the element is not one."""
        found = note_of(self._from(tag), self._flows.last_characters)
        if found is None:
            return 0
        parts, after = found
        note = self._flows.add_note("".join(parts), after)
        for number, part in enumerate([*parts]):
            if (begin := _MARKUP.fullmatch(part)) and not begin[1]:
                values = _values(part, len(begin[2]) + 1)
                write = partial(_replace_part, note, parts, number)
                self._add_attributes(part, write, begin[2].lower(), values)
        return tag.start() + sum(map(len, parts))

    def _from(self, tag: re.Match[str]) -> Iterator[str]:
        """Yields a tag, and the texts and tags after it, as far as they may be the number of a note."""
        found: re.Match[str] | None = tag
        while found is not None:
            yield found[0]
            begin = found.end()
            end = self._text.find("<", begin, begin + MAX_CHARACTERS + 1)
            yield self._text[begin : end if end >= 0 else begin + MAX_CHARACTERS]
            found = _MARKUP.match(self._text, end) if end >= 0 else None

    def _add_embedded(self, tag: re.Match[str], name: str) -> int:
        """Adds an element with texts of its own within a sentence; returns the place after it, or 0."""
        if name not in EMBEDDED or self._is_embedded or not self._flows.is_within:
            return 0
        end = EMBEDDED[name].search(self._text, tag.end(), tag.end() + _EMBEDDED_CHARACTERS)
        if end is None or not _GOES_ON.match(self._text, end.end()):
            return 0
        inner = HtmlDocument(b"", Path(), "utf-8")
        inner._text, inner._is_embedded = self._text[tag.start() : end.end()], True
        inner.source_language = self.source_language
        self._flows.add_parts(list(inner.parts()), is_spaced=True)
        return end.end()

    def _add_without_letters(self, markup: str, name: str, place: int) -> int:
        """Keeps an element without letters within a sentence, such as a number.

        Returns the place after it; 0 if the element is not one. A part of a word, as in H₂O, is not.
        """
        inside = _INSIDE.match(self._text, place) if name in INLINE and not self._left_out else None
        if inside is None or inside[2].lower() != name or (name not in FIXED and markup.endswith("/>")):
            return 0
        text, end = unescaped(inside[1]), inside.end(2)
        end = self._text.index(">", end) + 1
        after = self._text[inside.end() : inside.end() + 1]
        is_shown = _values(markup, len(name) + 1).keys() & _SHOWN
        if is_shown or not stays(text, self._flows.last_characters, after):
            return 0
        self._flows.add_fixed(self._text[place - len(markup) : end], text)
        return end

    def _start(self, markup: str, name: str) -> None:
        """Adds the tag that begins an element."""
        is_empty = name in VOID or markup.endswith("/>")
        values = {} if self._left_out else _values(markup, len(name) + 1)
        if self._left_out or name in _LEFT_OUT or name in FIXED or self._is_kept(name, values):
            is_inline = name in _WITHIN or (name in _DRAWN and self._flows.is_within)
            if not is_inline and self._left_out not in _DRAWN:
                self._break_fixed()
            if self._fixed or (is_inline and not is_empty and not self._left_out):
                self._fixed.append(markup)
            else:
                self._flows.end(markup)
            if not is_empty:
                self._left_out = self._left_out or name
                self._num_inside[name] += 1
            return
        self._num_open[name] += not is_empty
        if name in INLINE:
            is_single = name not in FORMATTING or "id" in values or "name" in values
            tag = self._flows.open(markup, name, is_single=is_single)
        elif name == "img" and self._flows.is_within:
            picture = self._flows.add_fixed(markup, "")
            self._add_attributes(markup, partial(setattr, picture, "markup"), name, values)
            return
        else:
            tag = Tag(markup, "")
            self._flows.end(tag)
        self._add_attributes(markup, partial(setattr, tag, "open"), name, values)

    def _is_kept(self, name: str, values: Mapping[str, re.Match[str]]) -> bool:
        """Whether the document keeps the texts of an element. The `lang` of a whole page is often wrong."""
        tag = next((_value(values[each]) for each in _LANGUAGES if each in values), "")
        is_foreign = name not in ("html", "body") and is_other_language(tag, self.source_language)
        return is_foreign or _is_kept_by(values)

    def _end(self, markup: str, name: str) -> None:
        """Adds the end of an element. That of one around an element that is left out also ends this one."""
        if self._left_out and (self._num_inside[name] or not self._num_open[name]):
            self._num_inside[name] -= self._num_inside[name] > 0
            is_over = not self._num_inside[self._left_out]
            if is_over:
                self._left_out = ""
                self._num_inside.clear()
            if not self._fixed:
                self._flows.end(markup)
            elif is_over:
                text = "" if name == "svg" else unescaped("".join(self._fixed_texts))
                self._flows.add_fixed("".join([*self._fixed, markup]), text)
                self._fixed.clear()
                self._fixed_texts.clear()
            else:
                self._fixed.append(markup)
            return
        self._break_fixed()
        self._left_out = ""
        self._num_inside.clear()
        self._num_open[name] -= self._num_open[name] > 0
        if name in INLINE:
            self._flows.close(markup, name)
        else:
            self._flows.end(markup)

    def _break_fixed(self) -> None:
        """Ends the sentence before an element that is left out, because there is more in it than a text."""
        if self._fixed:
            self._flows.end("".join(self._fixed))
            self._fixed.clear()
            self._fixed_texts.clear()

    def _add_attributes(
        self, tag: str, replace: Callable[[str], None], name: str, values: Mapping[str, re.Match[str]]
    ) -> None:
        """Adds the attributes of a tag that are shown, and the language of the page."""
        parts, end = list[str](), 0
        for attribute, value in values.items():
            text, is_language = _value(value), name == "html" and attribute in _LANGUAGES
            if value[2] is None or not (
                is_language or (_is_shown(attribute, name, values) and LETTER.search(text))
            ):
                continue
            parts += [tag[end : value.start(2)], value[2]]
            end = value.end(2)
            write = partial(_write_attribute, replace, parts, len(parts) - 1)
            if is_language:
                self._languages.append(write)
            else:
                self._flows.segments.append(Segment([(text, 0)], write))
        parts.append(tag[end:])


def note_of(parts: Iterable[str], before: str) -> tuple[list[str], str] | None:
    """Returns the parts of the number of a note, and the text after it; None if there is none.

    Args:
        parts: Those of a page from a tag on: tags, and the texts between them.
        before: The last characters before the tag; see `is_note`.
    """
    read, elements, opened, shown = list[str](), list[tuple[str, str, str]](), list[str](), ""
    for part in islice(parts, 2 * MAX_TAGS):
        if elements and not opened:
            return (read, part) if is_note(elements, shown, before, part) else None
        read.append(part)
        if not len(read) % 2:
            shown += unescaped(part)
            if WORD.search(shown):
                return None
            continue
        tag = _MARKUP.fullmatch(part)
        name = (tag[2] or "").lower() if tag else ""
        if not tag or name not in INLINE or name in FIXED or (tag[1] and opened.pop() != name):
            return None
        if tag[1]:
            continue
        opened.append(name)
        values, names = _values(part, len(name) + 1), ("href", "role", "epub:type")
        target, role, kind = (_value(values[by]) if by in values else "" for by in names)
        elements.append((name, target, f"{role} {kind}"))
    return None


def _values(tag: str, place: int) -> dict[str, re.Match[str]]:
    """Returns the attributes of a tag that are read, by their names; the first of those with one name."""
    values: dict[str, re.Match[str]] = {}
    for attribute in _ATTRIBUTE.finditer(tag, place):
        if (name := attribute[1].lower()) in _ATTRIBUTES:
            values.setdefault(name, attribute)
    return values


def _is_kept_by(values: Mapping[str, re.Match[str]]) -> bool:
    """Whether the texts of an element with these attributes stay as they are."""
    is_no = "translate" in values and _value(values["translate"]).lower() == "no"
    return is_no or ("class" in values and is_untranslated(_value(values["class"])))


def is_untranslated(classes: str) -> bool:
    """Whether the texts of an element with these classes stay as they are, as those of a formula do."""
    names = classes.split()
    return not _UNTRANSLATED.isdisjoint(names) or ("math" in names and not _FORMULAS.isdisjoint(names))


def _is_shown(attribute: str, name: str, values: Mapping[str, re.Match[str]]) -> bool:
    """Whether readers of a page, or of search results, see an attribute of an element."""
    if attribute == "content":
        return name == "meta" and any(
            _value(values[by]).lower() in _DESCRIPTIONS for by in _NAMES if by in values
        )
    if attribute == "value":
        return name == "input" and "type" in values and _value(values["type"]).lower() in _BUTTONS
    return attribute in _SHOWN


def _write_attribute(
    replace: Callable[[str], None], parts: list[str], place: int, pieces: Sequence[TextSpan]
) -> None:
    """Replaces a part of a tag, the value of an attribute."""
    parts[place] = '"' + html.escape(text_of(pieces)) + '"'
    replace("".join(parts))


def _replace_part(note: Here, parts: list[str], place: int, part: str) -> None:
    """Replaces a part of the markup of a note."""
    parts[place] = part
    note.markup = "".join(parts)


def _value(attribute: re.Match[str]) -> str:
    """Returns the value of an attribute of HTML."""
    value = attribute[2] or ""
    quote = value[:1] if value[:1] in ('"', "'") else ""
    return unescaped(value[len(quote) :].removesuffix(quote) if quote else value)


def _decoded_page(content: bytes, path: Path) -> tuple[str, str]:
    """Returns the encoding of a page, as its mark, its zeros or itself say, and its text.

    Raises:
        WrongFile: It is not in that encoding: in another one, its texts would be others.
    """
    encoding: str = json.detect_encoding(content)
    advice = ""
    if encoding == "utf-8":
        advice = ": name its own in a <meta charset=…>, or convert it"
        if named := _CHARSET.search(content[:1024]):
            with suppress(LookupError):
                name = codecs.lookup(named[1].decode()).name
                name = _AS_BROWSERS.get(name, name)
                encoding = name if _CHARSETS.fullmatch(name) else encoding
    try:
        return encoding, content.decode(encoding)
    except UnicodeDecodeError as error:
        if encoding == "cp1252":  # which browsers read with the controls that it lacks
            return "latin-1", content.decode("latin-1")
        name, number = (
            encoding.upper().removesuffix("-SIG"),
            len(content) - len(error.object) + error.start + 1,
        )
        text = f"the file is not {name}: byte {number} is wrong{advice}"
        raise wrong_file(path, text) from error
