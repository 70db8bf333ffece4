"""Reads and writes slides (.pptx), tables (.xlsx), books (.epub), and OpenDocument (.odt, .ods, .odp).

python-pptx, openpyxl and EbookLib write files anew, without the charts, pictures and settings that they do
not know. Here only the parts with texts change, and in these only the texts.
"""

from __future__ import annotations

import posixpath
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from itertools import islice
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote

from seq2seq_serve.documents.alignment import text_of
from seq2seq_serve.documents.archive import Archive
from seq2seq_serve.documents.elements import (
    BEGIN,
    END,
    LINE_BREAK,
    OTHER,
    TEXT,
    Content,
    Event,
    Names,
    XmlTexts,
    described,
    description,
    keeping_space,
    markup_of,
    named,
)
from seq2seq_serve.documents.markup import Flows
from seq2seq_serve.documents.notes import MAX_CHARACTERS, MAX_TAGS, WORD, is_note, stays
from seq2seq_serve.documents.page import EMBEDDED, READINGS, RUBY, is_untranslated
from seq2seq_serve.documents.segments import Document, Part, Segment, TextSpan, wrong_file
from seq2seq_serve.documents.spans import Tag
from seq2seq_serve.protos.languages import is_other_language

_DRAWING = "http://schemas.openxmlformats.org/drawingml/2006/main "
_SHEET = "http://schemas.openxmlformats.org/spreadsheetml/2006/main "
_FORMULA = named("http://schemas.openxmlformats.org/markup-compatibility/2006 ", "AlternateContent")
_TEXT = "urn:oasis:names:tc:opendocument:xmlns:text:1.0 "
_OFFICE = "urn:oasis:names:tc:opendocument:xmlns:office:1.0 "
_TABLE = "urn:oasis:names:tc:opendocument:xmlns:table:1.0 "
_CELL, _DELETION = f"{_TABLE}table-cell", f"{_TEXT}deletion"
_PRESENTATION = "urn:oasis:names:tc:opendocument:xmlns:presentation:1.0 "
_STYLE = "urn:oasis:names:tc:opendocument:xmlns:style:1.0 "
_RAISED = re.compile(r"\s*(?:super|[1-9])")
_STYLE_OF_TEXT = re.compile(r"""\s[\w.-]+:style-name\s*=\s*["']([^"']*)""")
_SPACES, _RUBIES = f"{_TEXT}s", named(_TEXT, "ruby ruby-base")
_RANGES = ("bookmark", "reference-mark", "change", "toc-mark", "user-index-mark", "alphabetical-index-mark")
_BEGINS, _ENDS = (frozenset(f"{_TEXT}{kind}-{end}" for kind in _RANGES) for end in ("start", "end"))
_FIELD = "urn:openoffice:names:experimental:ooo-ms-interop:xmlns:field:1.0 "
_CITATIONS = {  # what begins and ends one; the second is that of a file of Word
    f"{_TEXT}reference-mark-start": f"{_TEXT}reference-mark-end",
    f"{_FIELD}fieldmark-start": f"{_FIELD}fieldmark-end",
}
_CITATION = re.compile(r"ZOTERO_|JABREF_|vnd\.oasis\.opendocument\.field\.UNHANDLED")
_FIELDS = named(
    _TEXT,
    "author-initials author-name bibliography-mark bookmark-ref chapter character-count conditional-text "
    "creation-date creation-time creator database-display date description drop-down editing-cycles "
    "editing-duration expression file-name hidden-text image-count initial-creator keywords "
    "modification-date modification-time note-ref object-count page-count page-number page-variable-get "
    "paragraph-count print-date print-time printed-by reference-ref sequence sequence-ref sheet-name subject "
    "table-count template-name time title user-defined user-field-get user-field-input variable-get "
    "variable-input variable-set word-count",
)
_DRAWN = named(
    "urn:oasis:names:tc:opendocument:xmlns:drawing:1.0 ",
    "a caption circle connector control custom-shape ellipse frame g line measure path polygon polyline rect "
    "regular-polygon",
)
_STRING_VALUE = re.compile(r"""(?<!\s)\s++[\w.-]++:string-value\s*+=\s*+(?:"[^"]*"|'[^']*')""")
_NO_TITLES = ("PowerPoint Presentation", "Word Document")  # which programs give
_XHTML = "http://www.w3.org/1999/xhtml "
_LANGUAGE = "http://www.w3.org/XML/1998/namespace lang"
_WORKSHEET = "worksheet"
_CHUNK_BYTES = 2**20
_MAX_COPIES = 6  # how often the markup of a string may be written for its lines


def _names_of_runs(namespace: str, left_out: str) -> Names:
    """Returns the names of runs, which drawings and tables have in the same form."""
    return Names(
        around=named(namespace, "r"),
        runs=named(namespace, "r"),
        left_out=named(namespace, left_out),
        texts=named(namespace, "t"),
        properties=named(namespace, "rPr"),
        has_raised=True,
    )


class _Part(XmlTexts):
    """A part of an archive, whose elements are known by their names with namespaces."""

    begin: ClassVar[frozenset[str]]  # the elements that have texts
    languages: ClassVar[tuple[re.Pattern[str], ...]] = ()  # of the texts, after the markup before them

    def name_of(self, event: Event) -> str:
        return event.name

    def has_text(self, event: Event) -> bool:
        return event.name in self.begin

    def changed(self, markup: str) -> str:
        if self.target_language:
            for pattern in self.languages:
                markup = pattern.sub(rf"\g<1>{escape(self.target_language)}", markup)
        return markup


class Titles(_Part):
    """The title of a file, or the table of contents of a book."""

    begin = frozenset(["http://www.daisy.org/z3986/2005/ncx/ text", "http://purl.org/dc/elements/1.1/ title"])
    languages = (re.compile(r"(<(?:\w+:)?language(?:\s[^<>]*)?>)[^<]*"),)

    def parts(self) -> Iterator[Part]:
        for part in super().parts():
            part.segments = [segment for segment in part.segments if segment.text not in _NO_TITLES]
            yield part


class _Drawing(_Part):
    """A slide, or the texts of pictures and charts: each paragraph is a text."""

    begin = named(_DRAWING, "p")
    names = replace(
        _names_of_runs(_DRAWING, left_out="pPr br endParaRPr"), fixed=named(_DRAWING, "fld") | _FORMULA
    )

    def outside(self, event: Event) -> str | Tag:
        is_described = event.kind == BEGIN and event.local == "cNvPr" and description(event)
        return described(event, self._flows) if is_described else event.markup

    languages = (re.compile(r"""(<(?:\w+:)?(?:rPr|defRPr|endParaRPr)\b[^<>]*?\slang=["'])[^"']*"""),)


class _OfficeFile(Archive):
    """A file of Microsoft's office, which lists what kind each part is."""

    kinds: ClassVar[dict[str, type[_Part]]]  # of parts with texts, by the ends of their types

    def _kinds_of_parts(self) -> dict[str, str]:
        """Returns the end of the type of each part, by its name."""
        found = {}
        for event in self._elements("[Content_Types].xml"):
            if (
                event.local == "Override"
                and (name := event.attributes.get("PartName", "")[1:]) in self._sizes
            ):
                kind = event.attributes.get("ContentType", "").removesuffix("+xml")
                found[name] = kind.rpartition(".")[2]
        return found

    def _names_of_texts(self) -> Iterable[str]:
        found = self._kinds_of_parts().items()
        kinds: dict[str, type[_Part]] = {**self.kinds, "core-properties": Titles}
        self._classes = {name: kinds[kind] for name, kind in found if kind in kinds}
        return self._classes

    def _part(self, name: str, content: bytes) -> Document:
        return self._classes[name](content, self._path, name)


class Slides(_OfficeFile):
    """PowerPoint (.pptx and its like): paragraphs of slides, notes, charts and diagrams are texts."""

    kind, needed = "a PowerPoint file", "ppt/presentation.xml"
    kinds: ClassVar[dict[str, type[_Part]]] = dict.fromkeys(
        ("slide", "notesSlide", "chart", "diagramData", "diagramDrawing"), _Drawing
    )


class _StringContent(Content):
    """Adds strings by their lines: a run with line breaks becomes a run for each, if one of them changes."""

    def add_all(self, events: Sequence[Event]) -> None:
        source, lines = markup_of(events), list[Event]()
        room = _MAX_COPIES * len(source)
        for event in self._by_lines(events):
            lines.append(event)
            room -= len(event.markup)
            if room < 0:
                break
        if room < 0 or lines == [*events]:
            super().add_all(events)
            return
        outer, self.flows = self.flows, self.flows.inner()
        super().add_all(lines)
        self.flows.end()
        string, self.flows = _String(self.flows.part(), source), outer
        outer.add_parts([string.part()])

    def _by_lines(self, events: Sequence[Event]) -> Iterator[Event]:
        """Yields the events of a string; if it has several runs, none of these has a line break."""
        runs = self._names.runs
        is_rich = sum(event.kind == BEGIN and event.name in runs for event in events) > 1
        run = list[Event]()
        for event in events:
            if is_rich and (run or event.name in runs):
                run.append(event)
                if event.name in runs and event.kind == END:
                    yield from self._lines_of(run)
                    run = []
            else:
                yield event

    def _lines_of(self, run: Sequence[Event]) -> Iterator[Event]:
        ends = [number for number, event in enumerate(run) if event.name in self._names.texts]
        text = markup_of(run[ends[0] + 1 : ends[-1]]) if len(ends) == 2 else ""
        if not LINE_BREAK.search(text) or "<" in text:
            yield from run
            return
        tag = run[ends[0]]
        before, after = [*run[: ends[0]], replace(tag, markup=keeping_space(tag.markup))], run[ends[1] :]
        for number, line in enumerate(LINE_BREAK.split(text)):
            if number % 2:
                yield Event(END, markup=f"{markup_of(before)}{line}{markup_of(after)}")
            elif line:
                yield from [*before, Event(TEXT, markup=line, text=self.decoded(line)), *after]


@dataclass
class _String:
    """A string of a table by its lines.

    Attributes:
        lines: Them.
        source: What is written if none of them changes.
        is_changed: Whether one did.
    """

    lines: Part
    source: str
    is_changed: bool = False

    def part(self) -> Part:
        """Returns it as a part of a document."""
        segments = [replace(one, write=partial(self._write, one)) for one in self.lines.segments]
        return Part(segments, lambda: self.lines.written() if self.is_changed else self.source)

    def _write(self, segment: Segment, pieces: Sequence[TextSpan]) -> None:
        self.is_changed = self.is_changed or pieces is not segment.pieces
        segment.write(pieces)


class _Strings(_Part):
    """The strings of a table's cells, and comments on them."""

    content_of = _StringContent
    begin = named(_SHEET, "si is text")
    names = replace(
        _names_of_runs(_SHEET, left_out=""),
        beside=named(_SHEET, "phoneticPr"),
        source=named(_SHEET, "rPh"),
        keeps_space=True,
        keeps_lines=True,
    )


class Spreadsheet(_OfficeFile):
    """Excel (.xlsx and its like): strings in cells, comments, and texts of pictures and charts.

    Formulas and names stay, and so do strings that name the columns of tables, which formulas use.
    """

    kind, needed = "an Excel file", "xl/workbook.xml"
    kinds: ClassVar[dict[str, type[_Part]]] = {
        **dict.fromkeys(("sharedStrings", "comments", _WORKSHEET), _Strings),
        **dict.fromkeys(("drawing", "chart"), _Drawing),
    }

    def __init__(self, content: bytes, path: Path, *limits: int) -> None:
        super().__init__(content, path, *limits)
        columns = self._columns = set[str]()
        for name, kind in self._kinds_of_parts().items():
            for event in self._elements(name) if kind in ("table", "pivotCacheDefinition") else ():
                if event.local in ("tableColumn", "cacheField"):
                    column = event.attributes.get("name", "").replace("_x000a_", "\n")
                    columns |= {" ".join(line.split()) for line in (column, *column.split("\n"))}

    def parts(self) -> Iterator[Part]:
        for part in super().parts():
            wholes = (" ".join(text_of(segment.pieces).split()) for segment in part.segments)
            part.segments = [
                segment
                for segment, whole in zip(part.segments, wholes, strict=True)
                if whole not in self._columns
            ]
            yield part

    def _names_of_texts(self) -> Iterable[str]:
        super()._names_of_texts()
        for name, kind in self._kinds_of_parts().items():
            if kind == _WORKSHEET and not self._has_strings(name):
                del self._classes[name]
        return self._classes

    def _has_strings(self, name: str) -> bool:
        """Whether the cells of a sheet may have strings, which are among those of the file otherwise."""
        with self.archive.open(name) as stream:
            before = b""
            while chunk := stream.read(_CHUNK_BYTES):
                if b"inlineStr" in before + chunk:
                    return True
                before = chunk[-9:]
        return False


class _OpenContent(Content):
    """Spaces are elements where they are several, and a word may have a reading (ruby).

    A citation of Zotero or JabRef is the text between two marks. It stays, as that of a field.
    """

    def __init__(self, flows: Flows, names: Names) -> None:
        super().__init__(flows, names)
        self._kept_until = 0  # the number of the event behind a citation

    def _is_raised(self) -> bool:
        style = _STYLE_OF_TEXT.search(self.flows.place.open)
        return style is not None and style[1] in self.raised

    def add_all(self, events: Sequence[Event]) -> None:
        self._kept_until = 0
        super().add_all(events)

    def add(self, event: Event, name: str) -> None:
        if self._next <= self._kept_until:
            return
        is_mark = event.kind == BEGIN and name in _CITATIONS and not self._depth
        if is_mark and (end := self._end_of_citation(event)):
            events = self._whole[self._next - 1 : end]
            self.flows.add_fixed(markup_of(events), "".join(event.text for event in events))
            self._kept_until = end
        elif name in _RUBIES and not self._depth:
            self.flows.add_of_source(event.markup, 1 if event.kind == BEGIN else -1)
        else:
            super().add(event, name)

    def _end_of_citation(self, mark: Event) -> int:
        """Returns the number of the event behind the citation that a mark begins; 0 if it begins none."""
        if not _CITATION.match(
            mark.attributes.get(f"{_TEXT}name") or mark.attributes.get(f"{_FIELD}type", "")
        ):
            return 0
        depth = 1
        for number in range(self._next, len(self._whole)):
            event = self._whole[number]
            depth += (event.kind == BEGIN) - (event.kind == END)
            if depth < 0:
                break
            if event.kind == BEGIN and (event.name in _CITATIONS or event.name == _CITATIONS[mark.name]):
                is_same = event.attributes.get(f"{_TEXT}name") == mark.attributes.get(f"{_TEXT}name")
                return number + 2 if is_same and depth == 1 and event.name not in _CITATIONS else 0
        return 0

    def _kept_by(self, event: Event, name: str) -> Callable[[str], object] | None:
        if name == _SPACES:
            is_one = event.attributes.get(f"{_TEXT}c", "1") == "1"
            return partial(self.flows.add_text, text=" " if is_one else "  ")  # each for their element only
        return super()._kept_by(event, name)


class _OpenText(_Part):
    """The content of an OpenDocument file: each paragraph is a text, if it is not the value of a cell."""

    content_of = _OpenContent
    begin = named(_TEXT, "p h")
    names = Names(
        around=named(_TEXT, "a meta span text-input"),
        single=named(_TEXT, "a meta text-input"),
        beside=named(_TEXT, "soft-page-break bookmark reference-mark change toc-mark user-index-mark")
        | named(_TEXT, "alphabetical-index-mark")
        | named(_PRESENTATION, "date-time footer header")
        | named(_OFFICE, "annotation-end")
        | _BEGINS
        | _ENDS,
        fixed=_FIELDS,
        begins=_BEGINS,
        ends=_ENDS,
        boxes=named(_TEXT, "note") | named(_OFFICE, "annotation") | _DRAWN,
        notes=named(_TEXT, "note"),
        has_raised=True,
        source=named(_TEXT, "ruby-text"),
        left_out=named("http://purl.org/dc/elements/1.1/ ", "creator date") | named(_TEXT, "note-citation"),
    )

    def __init__(self, content: bytes, path: Path, part: str = "") -> None:
        # With a value of its own, and the segments of the present part before it
        self._cells: list[tuple[Tag | None, int]] = []
        super().__init__(content, path, part)

    @property
    def is_held(self) -> bool:
        return bool(self._cells)

    def outside(self, event: Event) -> str | Tag:
        position = event.attributes.get(f"{_STYLE}text-position", "")
        if _RAISED.match(position) and self.around:
            self._inside.raised.add(self.around[-1].attributes.get(f"{_STYLE}name", ""))
        if event.name != _CELL:
            return event.markup
        segments = self._flows.segments
        if event.kind == BEGIN:
            has_value = f"{_OFFICE}string-value" in event.attributes
            self._cells.append((Tag(event.markup, "") if has_value else None, len(segments)))
            return self._cells[-1][0] or event.markup
        tag, begin = self._cells.pop()
        if tag is not None:
            segments[begin:] = [
                replace(segment, write=partial(_write_cell, tag, segment.write))
                for segment in segments[begin:]
            ]
        if self._cells:
            self._cells[-1] = (self._cells[-1][0], len(segments))
        return event.markup

    def has_text(self, event: Event) -> bool:
        cell = self.around[-1] if self.around else event
        if cell.name == _DELETION:
            return False
        kind = cell.attributes.get(f"{_OFFICE}value-type", "string")
        is_value = kind != "string" or f"{_TABLE}formula" in cell.attributes
        return event.name in self.begin and not is_value


def _write_cell(tag: Tag, write: Callable[[Sequence[TextSpan]], None], pieces: Sequence[TextSpan]) -> None:
    """Replaces a text of a cell, whose value is that text then."""
    tag.open = _STRING_VALUE.sub("", tag.open)
    write(pieces)


class OpenDocument(Archive):
    """OpenDocument (.odt, .ods, .odp): paragraphs, and cells with strings; also in headers and footers."""

    kind, needed = "an OpenDocument file", "content.xml"

    def _names_of_texts(self) -> Iterable[str]:
        manifest = "META-INF/manifest.xml"
        is_there = manifest in self._sizes
        if is_there and any(event.local == "encryption-data" for event in self._elements(manifest)):
            raise wrong_file(self._path, "the file is encrypted: save it without a password")
        return ("content.xml", "styles.xml", "meta.xml")

    def _part(self, name: str, content: bytes) -> Document:
        kind: type[_Part] = Titles if name == "meta.xml" else _OpenText
        return kind(content, self._path, name)


_SVG, _MATH = "http://www.w3.org/2000/svg svg", "http://www.w3.org/1998/Math/MathML math"
_PICTURES = frozenset([f"{_XHTML}img", _SVG, _MATH])
_EMBEDDED = frozenset(_XHTML + name for name in EMBEDDED)
_RUBY = f"{_XHTML}ruby"
_EPUB_TYPE = "http://www.idpf.org/2007/ops type"
_NUM_TAGS_AFTER = 4  # between a number and the text of which it may be a part
_READINGS, _OF_SOURCE = (frozenset(_XHTML + name for name in names) for names in (READINGS, RUBY | {"wbr"}))


class _PageContent(Content):
    """Pictures and formulas stay within a sentence after a word and a space, as in HTML, and end others.

    Elements in another language than that of the texts stay, too. Readings belong to the source, as in HTML.
    """

    has_spaced_boxes = True

    def __init__(self, flows: Flows, names: Names) -> None:
        super().__init__(flows, names)
        self._ahead: deque[tuple[Event, str]] = deque()  # begins with what may be the number of a note
        self._is_ruby = False  # whether the place is in an element of ruby
        self._num_readings = 0  # around the place, within an element that stays

    def add(self, event: Event, name: str) -> None:
        self._ahead.append((event, name))
        self._add_ahead()

    def finish(self) -> None:
        self._add_ahead(is_over=True)

    def _add_ahead(self, *, is_over: bool = False) -> None:
        """Adds events, of which those wait whose element may be a number; `is_over`: all of them."""
        while self._ahead:
            size = 0 if self._depth else self._size_of_number()
            after = self._text_behind(size) if size else ""
            if (size is None or after is None) and not is_over:
                return
            events = [event for event, _ in islice(self._ahead, size or 0)]
            if events and self._add_number(events, after or ""):
                for _ in events:
                    self._ahead.popleft()
            else:
                self._add_now(*self._ahead.popleft())

    def _add_number(self, events: Sequence[Event], after: str) -> bool:
        """Adds events that are a note or another element without letters; returns whether they are one."""
        markup, text = ("".join(parts) for parts in zip(*((e.markup, e.text) for e in events), strict=True))
        begins = [(event.local, event.attributes) for event in events if event.kind == BEGIN]
        elements = [
            (name, its.get("href", ""), f"{its.get('role', '')} {its.get(_EPUB_TYPE, '')}")
            for name, its in begins
        ]
        before = self.flows.last_characters
        if is_note(elements, text, before, after):
            self.flows.add_note(markup, after)
        elif len(begins) > 1 or not stays(text, before, after):
            return False
        else:
            self.flows.add_fixed(markup, text)
        return True

    def _size_of_number(self) -> int | None:
        """Returns how many events are an element without words, 0 if they are not; None if more must come."""
        depth, text = 0, ""
        for number, (event, name) in enumerate(self._ahead, 1):
            if event.kind == TEXT and depth:
                text += event.text
            elif name not in self._names.around:
                return 0
            if len(text) > MAX_CHARACTERS or number > 2 * MAX_TAGS or WORD.search(text):
                return 0
            depth += (event.kind == BEGIN) - (event.kind == END)
            if depth <= 0:
                return number * (depth == 0 and event.kind == END and number > 1)
        return None

    def _text_behind(self, place: int) -> str | None:
        """Returns the text after some events and few tags; None if more must come."""
        events = [event for event, _ in islice(self._ahead, place, place + _NUM_TAGS_AFTER + 1)]
        text = next((event.text for event in events if event.kind == TEXT), "")
        return text if text or len(events) > _NUM_TAGS_AFTER else None

    def _add_now(self, event: Event, name: str) -> None:
        if self._depth and event.kind != OTHER:
            change = (name in _READINGS) * ((event.kind == BEGIN) - (event.kind == END))
            self._num_readings = max(self._num_readings + change, 0)
            event.text = "" if self._num_readings else event.text
        is_space = event.kind == TEXT and self._is_ruby and event.text.isspace()
        if self._depth or not (name in _OF_SOURCE or is_space) or self._kept_by(event, name):
            super().add(event, name)
            return
        self.flows.add_of_source(event.markup, (event.kind == BEGIN) - (event.kind == END))
        if name == _RUBY:
            self._is_ruby = event.kind == BEGIN

    def _kept_by(self, event: Event, name: str) -> Callable[[str], object] | None:
        if name in _READINGS:
            return self.flows.add_of_source
        tag = event.attributes.get("lang") or event.attributes.get(_LANGUAGE, "")
        classes = event.attributes.get("class", "")
        if is_other_language(tag, self.source_language) or is_untranslated(classes):
            return self._add_fixed if name in self._names.around else self.flows.end
        if name not in _PICTURES:
            return super()._kept_by(event, name)
        if not self.flows.is_within:
            return self.flows.end
        return self._add_fixed if name == _MATH else self._add_picture

    def _is_box(self, name: str) -> bool:
        return name in _EMBEDDED and self.flows.is_within

    def _add_picture(self, markup: str) -> None:
        self.flows.add_fixed(markup, "")


class BookPage(_Part):
    """A page of a book, or a file of XHTML."""

    content_of = _PageContent
    begin = named(_XHTML, "title body")
    names = Names(
        around=named(
            _XHTML,
            "a abbr acronym b bdi bdo big cite data del dfn em font i ins label mark q s samp small span "
            "strike strong sub sup time tt u var",
        ),
        single=named(_XHTML, "a abbr acronym data label q time"),
        fixed=named(_XHTML, "code kbd"),
        left_out=named(_XHTML, "pre script style svg template textarea"),
    )
    languages = tuple(
        re.compile(rf"""(<html\b[^<>]*?\s{name}=["'])[^"']*""") for name in ("lang", "xml:lang")
    )


class Book(Archive):
    """EPUB: the pages of a book as HTML is translated, its table of contents, and its title."""

    kind, needed = "a book", "META-INF/container.xml"
    _kinds: ClassVar[dict[str, type[_Part]]] = {
        "application/xhtml+xml": BookPage,
        "application/x-dtbncx+xml": Titles,
    }

    def _names_of_texts(self) -> Iterable[str]:
        self._classes: dict[str, type[_Part]] = {}
        for event in self._elements(self.needed):
            package = event.attributes.get("full-path", "") if event.local == "rootfile" else ""
            if package and package not in self._classes:
                self._classes[package] = Titles
                for item in self._elements(package):
                    if kind := self._kinds.get(item.attributes.get("media-type", "")):
                        name = unquote(item.attributes.get("href", ""))
                        self._classes[
                            posixpath.normpath(posixpath.join(posixpath.dirname(package), name))
                        ] = kind
        encrypted = "META-INF/encryption.xml"
        if encrypted in self._sizes:
            for event in self._elements(encrypted):
                if unquote(event.attributes.get("URI", "")) in self._classes:
                    raise wrong_file(self._path, "the file is encrypted, against being copied")
        return self._classes

    def _part(self, name: str, content: bytes) -> Document:
        return self._classes[name](content, self._path, name)
