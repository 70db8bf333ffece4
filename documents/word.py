"""Reads and writes Word files (.docx and its like): archives of XML, and pictures that stay as they are."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial

from seq2seq_serve.documents.archive import Archive
from seq2seq_serve.documents.elements import (
    BEGIN,
    END,
    Content,
    Event,
    Names,
    XmlTexts,
    described,
    description,
    markup_of,
    named,
)
from seq2seq_serve.documents.markup import Flows
from seq2seq_serve.documents.office import Titles
from seq2seq_serve.documents.segments import LETTER, Document

_W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main "
_WORD_PARTS = re.compile(r"word/(document|header|footer|comments|footnotes|endnotes)\d*\.xml")
_STYLES, _TITLE = re.compile(r"word/styles\d*\.xml"), "docProps/core.xml"
_LANGUAGE = re.compile(r"<w:lang\b[^>]*>")
# The attribute of texts in scripts other than those of Europe
_SCRIPT_ATTRIBUTES = dict.fromkeys(("ja", "ko", "zh"), "w:eastAsia") | dict.fromkeys(
    ("ar", "ckb", "dv", "fa", "he", "ps", "sd", "ug", "ur", "yi"), "w:bidi"
)


class WordDocument(Archive):
    """Word (.docx and its like): paragraphs of the body, tables, headers, notes, comments are segments."""

    kind, needed = "a Word document", r"word/document\d*\.xml"

    def _names_of_texts(self) -> Iterable[str]:
        return [*filter(_WORD_PARTS.fullmatch, self._sizes), _TITLE]

    def _part(self, name: str, content: bytes) -> Document:
        return (Titles if name == _TITLE else _WordPart)(content, self._path, name)

    def changed_member(self, name: str) -> bytes | None:
        if not self.target_language or not _STYLES.fullmatch(name):
            return None
        styles = self.archive.read(name).decode("utf-8", "surrogateescape")
        return _in_language(styles, self.target_language).encode("utf-8", "surrogateescape")


_M = "http://schemas.openxmlformats.org/officeDocument/2006/math "
_PARAGRAPH, _RUN, _TEXT, _MARK = (f"{_W}{name}" for name in ("p", "r", "t", "fldChar"))
_INSTRUCTION, _SIMPLE, _SYMBOL = (f"{_W}{name}" for name in ("instrText", "fldSimple", "sym"))
_CONTROL, _CONTROLLED, _RUBY, _RUBY_BASE = (
    f"{_W}{name}" for name in ("sdt", "sdtContent", "ruby", "rubyBase")
)
_ALIGNMENT = f"{_W}vertAlign"
_HYPHENS = {f"{_W}noBreakHyphen": "-", f"{_W}softHyphen": ""}
_KIND = f"{_W}fldCharType"
_FORMULAS, _FORMULA_TEXT = named(_M, "oMath oMathPara"), f"{_M}t"
_PICTURE = "http://schemas.openxmlformats.org/drawingml/2006/wordprocessingDrawing docPr"
_BLOCKS = named(_W, "p tbl")
_DELETED = named(_W, "del moveFrom")
_PROPERTIES, _HIDDEN, _NOT = f"{_W}rPr", f"{_W}vanish", frozenset(["0", "false", "off"])
_DRAWN = named(_W, "drawing pict object") | named(
    "http://schemas.openxmlformats.org/markup-compatibility/2006 ", "AlternateContent"
)


@dataclass(frozen=True)
class _Run:
    """A run that begins, separates or ends a field.

    Attributes:
        begin: The number of its first event in the paragraph.
        end: That behind its last one.
        around: The number of the event that begins the element around it.
        kinds: The marks of fields in it.
        has_text: Whether it has a text beside them.
    """

    begin: int
    end: int
    around: int
    kinds: tuple[str, ...]
    has_text: bool


# Of an element around the place: the numbers of the events that end it, and what adds these
_Ending = tuple[int, int, Callable[[str], object]]


class _Paragraphs(Content):
    """Adds whole paragraphs, because only the end of a field says whether it is within one."""

    def __init__(self, flows: Flows, names: Names) -> None:
        super().__init__(flows, names)
        self._events: list[Event] = []  # of a paragraph
        self._depth_in_paragraph = 0

    def add(self, event: Event, name: str) -> None:
        if self._events or (event.kind == BEGIN and name == _PARAGRAPH):
            self._events.append(event)
            self._depth_in_paragraph += (event.kind == BEGIN) - (event.kind == END)
            if not self._depth_in_paragraph:
                events, self._events = self._events, []
                self._add_all(_Paragraph(events))
        else:
            super().add(event, name)

    def _add_all(self, paragraph: _Paragraph) -> None:
        """Adds the events of a paragraph, in time that is linear in their number."""
        events, fields = paragraph.events, paragraph.fields()
        self._whole = events
        inside: list[_Ending] = []
        place = 0
        while place < len(events):
            if inside and inside[-1][0] == place:
                begin, place, add = inside.pop()
                add(markup_of(events[begin:place]))
                continue
            field = fields.get(place)
            if field is not None and not (inside and field[2].end > inside[-1][0]):
                place = self._add_field(paragraph, *field, inside)
            elif events[place].kind != BEGIN or self._depth or self._held:
                self._next = place + 1
                super().add(events[place], events[place].name)
                place += 1
            else:
                place = self._begin(paragraph, place, inside)

    def _begin(self, paragraph: _Paragraph, place: int, inside: list[_Ending]) -> int:
        """Adds an element, or what begins it, and returns the number of the next event."""
        events, event, end = paragraph.events, paragraph.events[place], paragraph.ends[place]
        name, flows, has_paragraphs = event.name, self.flows, paragraph.has_paragraphs(place, end)
        if name in _DRAWN or (name == _RUN and paragraph.has_only(place, _DRAWN)):
            if not has_paragraphs and not paragraph.is_described(place, end):
                flows.add_picture(markup_of(events[place:end]))
                return end
            if self._outer is None:
                self._begin_box()
                self.flows.end(event.markup)
                inside.append((end - 1, end, self._end_box))
                return place + 1
        elif name == _PICTURE and description(event):
            flows.end(described(event, flows))
            return place + 1
        elif name in _DELETED or (name == _RUN and paragraph.is_hidden(place)):
            flows.add_markup(markup_of(events[place:end]))
            return end
        elif name == _SIMPLE and _has_words(
            event.attributes.get(f"{_W}instr", ""), has_letters=paragraph.has_letters(place, end)
        ):
            flows.open(event.markup, _SIMPLE, is_single=True)
            inside.append((end - 1, end, partial(flows.close, name=_SIMPLE)))
            return place + 1
        elif name in _FORMULAS or (name == _SIMPLE and not has_paragraphs):
            its = events[place:end]
            texts = _texts(its, _TEXT if name == _SIMPLE else _FORMULA_TEXT)
            return self._keep_field(its, "".join(texts), end)
        elif name == _CONTROL and not paragraph.is_block(content := paragraph.child(place, _CONTROLLED)):
            if content < 0 or not paragraph.has_letters(content, paragraph.ends[content]):
                its = events[place:end]
                return self._keep_field(its, "".join(_texts(its, _TEXT)), end)
            flows.open(markup_of(events[place : content + 1]), _CONTROL, is_single=True)
            inside.append((paragraph.ends[content] - 1, end, partial(flows.close, name=_CONTROL)))
            return content + 1
        elif name == _SYMBOL:
            flows.add_picture(markup_of(events[place:end]))
            return end
        elif name in _HYPHENS:
            prefix = event.markup[1 : event.markup.index(name.rpartition(" ")[2])]
            around = f'<{prefix}t xml:space="preserve">', f"</{prefix}t>"
            flows.add_text(markup_of(events[place:end]), _HYPHENS[name], around)
            return end
        elif name == _RUN and paragraph.has_only(place, {_RUBY}):
            ruby = paragraph.child(place, _RUBY)
            flows.add_of_source(markup_of(events[place:ruby]), 1)
            inside.append((end - 1, end, self._end_source))
            return ruby
        elif name == _RUBY and inside and inside[-1][2] == self._end_source:
            # The translation has the text as a run of its own, without how the source is read
            base = paragraph.child(place, _RUBY_BASE)
            if base >= 0:
                flows.add_of_source(markup_of(events[place : base + 1]), 1)
                inside.append((paragraph.ends[base] - 1, end, self._end_source))
                return base + 1
        super().add(event, name)
        return place + 1

    def _end_source(self, markup: str) -> None:
        self.flows.add_of_source(markup, -1)

    def _add_field(
        self, paragraph: _Paragraph, begin: _Run, separator: _Run, end: _Run, inside: list[_Ending]
    ) -> int:
        """Adds a field, or begins one whose text is translated, and returns the number of the next event."""
        events, has_letters = paragraph.events, paragraph.has_letters(separator.end, end.begin)
        opening = events[begin.begin : separator.end]
        instruction = "".join(_texts(opening, _INSTRUCTION))
        if separator is not end and _has_words(instruction, has_letters=has_letters):
            self.flows.open(markup_of(opening), _MARK, is_single=True)
            inside.append((end.begin, end.end, partial(self.flows.close, name=_MARK)))
            return separator.end
        text = "" if separator is end else "".join(_texts(events[separator.end : end.begin], _TEXT))
        return self._keep_field(events[begin.begin : end.end], text, end.end)

    def _keep_field(self, events: Sequence[Event], text: str, end: int) -> int:
        """Adds a field, which may be the number of a note; returns `end`, the number of the next event."""
        markup, self._next = markup_of(events), end
        if self._add_raised(markup, text, is_raised=_is_raised(events), target="#"):
            return end
        if text.strip():
            self.flows.add_fixed(markup, text)
        else:
            self.flows.add_markup(markup)
        return end


class _Paragraph:
    """The events of a paragraph.

    Attributes:
        events: Them.
        ends: For each event that begins an element, the number behind the event of its end.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self.ends = [len(events)] * len(events)
        self._around = [-1] * len(events)  # the number of the event that begins the element around each
        # Before each event
        self._num_paragraphs, self._num_letters, self._num_described = [0], [0], [0]
        opened: list[int] = []
        for place, event in enumerate(events):
            if event.kind == END and opened:
                self.ends[opened.pop()] = place + 1
            self._around[place] = opened[-1] if opened else -1
            if event.kind == BEGIN:
                opened.append(place)
            is_paragraph = event.kind == BEGIN and event.name == _PARAGRAPH
            self._num_paragraphs.append(self._num_paragraphs[-1] + is_paragraph)
            is_described = event.name == _PICTURE and event.kind == BEGIN and description(event) is not None
            self._num_described.append(self._num_described[-1] + is_described)
            self._num_letters.append(self._num_letters[-1] + bool(LETTER.search(event.text)))

    def has_paragraphs(self, begin: int, end: int) -> bool:
        """Whether there are texts of their own among some events."""
        return self._num_paragraphs[begin] < self._num_paragraphs[end]

    def has_letters(self, begin: int, end: int) -> bool:
        """Whether there are letters among some events."""
        return self._num_letters[begin] < self._num_letters[end]

    def is_described(self, begin: int, end: int) -> bool:
        """Whether there is a description of a picture among some events."""
        return self._num_described[begin] < self._num_described[end]

    def children(self, place: int) -> Iterator[int]:
        """Yields the numbers of the events that begin the elements in the element that begins at a place."""
        inside, end = place + 1, self.ends[place] - 1
        while inside < end:
            if self.events[inside].kind == BEGIN:
                yield inside
                inside = self.ends[inside]
            else:
                inside += 1

    def child(self, place: int, name: str) -> int:
        """Returns the first of those with a name; -1 if there is none."""
        return next((child for child in self.children(place) if self.events[child].name == name), -1)

    def is_block(self, place: int) -> bool:
        """Whether an element has paragraphs or tables."""
        names = (self.events[child].name for child in self.children(place)) if place >= 0 else ()
        return not {*names}.isdisjoint(_BLOCKS)

    def has_only(self, place: int, names: Set[str]) -> bool:
        """Whether the run that begins at a place has elements with these names, and nothing beside them."""
        found = {self.events[child].name for child in self.children(place)}
        return bool(found & names) and found <= names | {_PROPERTIES}

    def is_hidden(self, place: int) -> bool:
        """Whether the run that begins at a place has a text that is not shown."""
        properties = self.child(place, _PROPERTIES)
        marks = [self.events[child] for child in self.children(properties)] if properties >= 0 else []
        return any(mark.name == _HIDDEN and mark.attributes.get(f"{_W}val") not in _NOT for mark in marks)

    def fields(self) -> dict[int, tuple[_Run, _Run, _Run]]:
        """Returns the fields by their first events: the runs that begin, separate and end each one.

        One without a result has its end in place of the separator. Those that go on in other paragraphs, that
        are not between the same elements at both ends, or that share a run with a text are left out. Of two
        that begin in one run, the outer one counts.
        """
        found: dict[int, tuple[_Run, _Run, _Run]] = {}
        opened: list[list[_Run]] = []
        for run in self._runs():
            for kind in run.kinds:
                if kind == "begin":
                    opened.append([run])
                elif opened and kind == "separate":
                    opened[-1].append(run)
                elif opened and kind == "end":
                    begin, *separators = opened.pop()
                    separator = separators[-1] if separators else run
                    its = begin, separator, run
                    is_apart = begin is not separator and separator is not run and begin is not run
                    is_even = len({one.around for one in its}) == 1 and not any(one.has_text for one in its)
                    if (
                        is_even
                        and (is_apart or not separators)
                        and not self.has_paragraphs(begin.begin, run.end)
                    ):
                        found[begin.begin] = its
        return found

    def _runs(self) -> Iterator[_Run]:
        """Yields the runs with marks of fields, in the order of their ends."""
        opened: list[tuple[int, list[str], set[str]]] = []  # their begins, marks, and the names of elements
        for place, event in enumerate(self.events):
            if event.kind == BEGIN and event.name == _RUN:
                opened.append((place, [], set()))
            elif opened and event.kind == BEGIN:
                opened[-1][2].add(event.name)
                if event.name == _MARK:
                    opened[-1][1].append(event.attributes.get(_KIND, ""))
            if opened and self.ends[opened[-1][0]] == place + 1:
                begin, kinds, names = opened.pop()
                if kinds:
                    yield _Run(begin, place + 1, self._around[begin], tuple(kinds), _TEXT in names)


def _has_words(instruction: str, *, has_letters: bool) -> bool:
    """Whether the text of a field is one of the document: of a link, or what a user wrote into a form."""
    name = instruction.strip()
    return name.startswith("HYPERLINK") or (name.startswith("FORMTEXT") and has_letters)


def _is_raised(events: Iterable[Event]) -> bool:
    """Whether there are texts in runs, all of which stand higher than others."""
    is_raised, found = False, set[bool]()
    for event in events:
        if event.kind == BEGIN and event.name == _RUN:
            is_raised = False
        elif event.name == _ALIGNMENT:
            is_raised = is_raised or event.attributes.get(f"{_W}val") == "superscript"
        elif event.name == _TEXT:
            found.add(is_raised)
    return found == {True}


def _texts(events: Iterable[Event], name: str) -> Iterable[str]:
    """Yields the texts in elements of a name."""
    is_inside = False
    for event in events:
        if event.name == name:
            is_inside = event.kind == BEGIN
        elif is_inside:
            yield event.text


_RANGES = ("bookmark", "commentRange", "moveFromRange", "moveToRange", "perm")
_BEGINS, _ENDS = (frozenset(f"{_W}{kind}{end}" for kind in _RANGES) for end in ("Start", "End"))


class _WordPart(XmlTexts):
    """A part of a Word document. Every element except runs of texts and their properties separates texts."""

    names = Names(
        around=named(_W, "r hyperlink ins moveTo smartTag customXml bdo dir"),
        single=named(_W, "hyperlink ins moveTo smartTag customXml"),
        runs=named(_W, "r"),
        notes=named(_W, "endnoteReference footnoteReference"),
        beside=named(_W, "commentReference lastRenderedPageBreak proofErr") | _BEGINS | _ENDS,
        begins=_BEGINS,
        ends=_ENDS,
        texts=named(_W, "t"),
        properties=named(_W, "rPr pPr smartTagPr customXmlPr"),
        keeps_space=True,
        has_raised=True,
    )
    content_of = _Paragraphs

    is_whole = False  # but each paragraph

    def has_text(self, event: Event) -> bool:  # noqa: ARG002
        return not self.around

    def name_of(self, event: Event) -> str:
        return event.name

    def changed(self, markup: str) -> str:
        return _in_language(markup, self.target_language)


def _in_language(markup: str, language: str) -> str:
    """Returns markup with the language of its texts, where it has one, replaced by another one."""
    if not language:
        return markup
    name = _SCRIPT_ATTRIBUTES.get(language.partition("-")[0], "w:val")
    value = f'{name}="{html.escape(language)}"'

    def changed(tag: re.Match[str]) -> str:
        others = re.sub(rf"\s{name}\s*=\s*(\"[^\"]*\"|'[^']*')", "", tag[0])
        return others.replace("<w:lang", f"<w:lang {value}", 1)

    return _LANGUAGE.sub(changed, markup)
