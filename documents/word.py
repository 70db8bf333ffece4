"""Reads and writes Word files (.docx and its like): archives of XML, and pictures that stay as they are."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from seq2seq_serve.documents.archive import Archive
from seq2seq_serve.documents.elements import BEGIN, END, Content, Event, Names, XmlTexts, named
from seq2seq_serve.documents.markup import Flows
from seq2seq_serve.documents.segments import Document

_W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main "
_WORD_PARTS = re.compile(r"word/((document|header|footer)\d*|comments|footnotes|endnotes)\.xml")
_STYLES = "word/styles.xml"
_LANGUAGE = re.compile(r"<w:lang\b[^>]*>")
# The attribute of texts in scripts other than those of Europe
_SCRIPT_ATTRIBUTES = dict.fromkeys(("ja", "ko", "zh"), "w:eastAsia") | dict.fromkeys(
    ("ar", "ckb", "dv", "fa", "he", "ps", "sd", "ug", "ur", "yi"), "w:bidi"
)


class WordDocument(Archive):
    """Word (.docx and its like): paragraphs of the body, tables, headers, notes, comments are segments."""

    kind, needed = "a Word document", "word/document.xml"

    def _names_of_texts(self) -> Iterable[str]:
        return filter(_WORD_PARTS.fullmatch, self._sizes)

    def _part(self, name: str, content: bytes) -> Document:
        return _WordPart(content, self._path, name)

    def changed_member(self, name: str) -> bytes | None:
        if name != _STYLES or not self.target_language:
            return None
        styles = self.archive.read(name).decode("utf-8", "surrogateescape")
        return _in_language(styles, self.target_language).encode("utf-8", "surrogateescape")


_PARAGRAPH, _RUN, _TEXT, _MARK = (f"{_W}{name}" for name in ("p", "r", "t", "fldChar"))
_INSTRUCTION, _SIMPLE, _BOX = (f"{_W}{name}" for name in ("instrText", "fldSimple", "txbxContent"))
_KIND = f"{_W}fldCharType"
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
        links: list[tuple[int, int, str]] = []  # around the place: the events of their ends, and their names
        place = 0
        while place < len(events):
            if links and links[-1][0] == place:
                begin, place, name = links.pop()
                self.flows.close(_markup(events[begin:place]), name)
                continue
            event, end = events[place], paragraph.ends[place]
            field = fields.get(place)
            if field is not None and not (links and field[2].end > links[-1][0]):
                place = self._add_field(events, *field, links)
            elif event.kind != BEGIN or paragraph.has_box(place, end):
                super().add(event, event.name)
                place += 1
            elif event.name == _SIMPLE and _is_link(event.attributes.get(f"{_W}instr", "")):
                self.flows.open(event.markup, _SIMPLE, is_single=True)
                links.append((end - 1, end, _SIMPLE))
                place += 1
            elif event.name == _SIMPLE:
                self._keep_field(_markup(events[place:end]), "".join(_texts(events[place:end], _TEXT)))
                place = end
            elif event.name in _DRAWN or (event.name == _RUN and paragraph.is_picture(place)):
                self.flows.add_markup(_markup(events[place:end]))
                place = end
            else:
                super().add(event, event.name)
                place += 1

    def _add_field(
        self,
        events: Sequence[Event],
        begin: _Run,
        separator: _Run,
        end: _Run,
        links: list[tuple[int, int, str]],
    ) -> int:
        """Adds a field, or begins one that is a link, and returns the number of the next event."""
        opening = events[begin.begin : separator.end]
        if separator is not end and _is_link("".join(_texts(opening, _INSTRUCTION))):
            self.flows.open(_markup(opening), _MARK, is_single=True)
            links.append((end.begin, end.end, _MARK))
            return separator.end
        text = "" if separator is end else "".join(_texts(events[separator.end : end.begin], _TEXT))
        self._keep_field(_markup(events[begin.begin : end.end]), text)
        return end.end

    def _keep_field(self, markup: str, text: str) -> None:
        if text.strip():
            self.flows.add_fixed(markup, text)
        else:
            self.flows.add_markup(markup)


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
        self._num_boxes = [0]  # before each event
        opened: list[int] = []
        for place, event in enumerate(events):
            if event.kind == END and opened:
                self.ends[opened.pop()] = place + 1
            self._around[place] = opened[-1] if opened else -1
            if event.kind == BEGIN:
                opened.append(place)
            self._num_boxes.append(self._num_boxes[-1] + (event.name == _BOX))

    def has_box(self, begin: int, end: int) -> bool:
        """Whether there is a text of its own among some events."""
        return self._num_boxes[begin] < self._num_boxes[end]

    def is_picture(self, place: int) -> bool:
        """Whether the run that begins at a place has a picture, and nothing beside it."""
        names, inside, end = set[str](), place + 1, self.ends[place] - 1
        while inside < end:
            if self.events[inside].kind == BEGIN:
                names.add(self.events[inside].name)
                inside = self.ends[inside]
            else:
                inside += 1
        return bool(names & _DRAWN) and names <= _DRAWN | {f"{_W}rPr"}

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
                    if is_even and (is_apart or not separators) and not self.has_box(begin.begin, run.end):
                        found[begin.begin] = its
        return found

    def _runs(self) -> Iterator[_Run]:
        """Yields the runs with marks of fields."""
        begin = -1
        kinds, has_text = list[str](), False
        for place, event in enumerate(self.events):
            if event.kind == BEGIN and event.name == _RUN and begin < 0:
                begin, kinds, has_text = place, [], False
            if begin >= 0 and event.kind == BEGIN:
                if event.name == _MARK:
                    kinds.append(event.attributes.get(_KIND, ""))
                has_text = has_text or event.name == _TEXT
            if begin >= 0 and self.ends[begin] == place + 1:
                if kinds:
                    yield _Run(begin, place + 1, self._around[begin], tuple(kinds), has_text)
                begin = -1


def _is_link(instruction: str) -> bool:
    """Whether a field is a link, by what it does."""
    return instruction.strip().startswith("HYPERLINK")


def _markup(events: Iterable[Event]) -> str:
    return "".join(event.markup for event in events)


def _texts(events: Iterable[Event], name: str) -> Iterable[str]:
    """Yields the texts in elements of a name."""
    is_inside = False
    for event in events:
        if event.name == name:
            is_inside = event.kind == BEGIN
        elif is_inside:
            yield event.text


class _WordPart(XmlTexts):
    """A part of a Word document. Every element except runs of texts and their properties separates texts."""

    names = Names(
        around=named(_W, "r hyperlink ins smartTag"),
        single=named(_W, "hyperlink ins smartTag"),
        runs=named(_W, "r"),
        beside=named(_W, "commentReference endnoteReference footnoteReference lastRenderedPageBreak")
        | named(_W, "proofErr bookmarkStart commentRangeStart bookmarkEnd commentRangeEnd"),
        begins=named(_W, "bookmarkStart commentRangeStart"),
        ends=named(_W, "bookmarkEnd commentRangeEnd"),
        texts=named(_W, "t"),
        properties=named(_W, "rPr pPr"),
        keeps_space=True,
    )
    content_of = _Paragraphs

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
