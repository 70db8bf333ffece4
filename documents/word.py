"""Reads and writes Word files (.docx and its like): archives of XML, and pictures that stay as they are."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
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

    kind, needed = "a Word document (.docx)", "word/document.xml"

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


@dataclass
class _Run:
    """A run that begins, separates or ends a field.

    Attributes:
        begin: The number of its first event in the paragraph.
        end: That behind its last one.
        depth: The number of elements around it in the paragraph.
        kinds: The marks of fields in it.
        has_text: Whether it has a text beside them.
    """

    begin: int
    end: int
    depth: int
    kinds: tuple[str, ...]
    has_text: bool


class _Paragraphs(Content):
    """Adds whole paragraphs, because only the end of a field says whether it is within one."""

    def __init__(self, flows: Flows, names: Names) -> None:
        super().__init__(flows, names)
        self._events: list[Event] = []  # of a paragraph
        self._around = 0  # elements open in it

    def add(self, event: Event, name: str) -> None:
        if self._events or (event.kind == BEGIN and name == _PARAGRAPH):
            self._events.append(event)
            self._around += (event.kind == BEGIN) - (event.kind == END)
            if not self._around:
                events, self._events = self._events, []
                self._add_all(events, _fields(events))
        else:
            super().add(event, name)

    def _add_all(self, events: Sequence[Event], fields: Sequence[tuple[_Run, _Run, _Run]]) -> None:
        """Adds the events of a paragraph, or of a part of it, with its outer fields."""
        place = 0
        for begin, separator, end in fields:
            if begin.begin < place:
                continue  # inside of the last one
            self._add_events(events[place : begin.begin])
            opening, inside = events[begin.begin : separator.end], events[separator.end : end.begin]
            place = end.end
            if separator is not end and _instruction(opening).startswith("HYPERLINK"):
                self.flows.open(_markup(opening), _MARK, is_single=True)
                self._add_all(inside, _fields(inside))
                self.flows.close(_markup(events[end.begin : end.end]), _MARK)
            else:
                text = "".join(_shown(inside)) if separator is not end else ""
                self._keep_field(_markup(events[begin.begin : place]), text)
        self._add_events(events[place:])

    def _add_events(self, events: Sequence[Event]) -> None:
        """Adds events without fields. A picture without a text of its own stays within the sentence."""
        end = 0
        for place, event in enumerate(events):
            if place < end:
                continue
            inside: Sequence[Event] = ()
            if event.kind == BEGIN and (event.name in (_SIMPLE, _RUN) or event.name in _DRAWN):
                inside = events[place : _end_of(events, place)]
            names = {one.name for one in inside}
            if not inside or _BOX in names or (event.name == _RUN and not _is_picture(inside)):
                super().add(event, event.name)
                continue
            end = place + len(inside)
            if event.name != _SIMPLE:
                self.flows.add_markup(_markup(inside))
            elif event.attributes.get(f"{_W}instr", "").strip().startswith("HYPERLINK"):
                self.flows.open(event.markup, _SIMPLE, is_single=True)
                self._add_all(inside[1:-1], _fields(inside[1:-1]))
                self.flows.close(inside[-1].markup, _SIMPLE)
            else:
                self._keep_field(_markup(inside), "".join(_shown(inside)))

    def _keep_field(self, markup: str, text: str) -> None:
        if text.strip():
            self.flows.add_fixed(markup, text)
        else:
            self.flows.add_markup(markup)


def _fields(events: Sequence[Event]) -> list[tuple[_Run, _Run, _Run]]:
    """Returns the fields of a paragraph by their runs that begin, separate and end them, outer ones first.

    One without a result has its end in place of the separator. Those that go on in other paragraphs, that are
    not between the same elements at both ends, or that share a run with a text are left out.
    """
    if not any(event.name == _MARK for event in events):
        return []
    found, opened = list[tuple[_Run, _Run, _Run]](), list[list[_Run]]()
    for run in _runs(events):
        for kind in run.kinds:
            if kind == "begin":
                opened.append([run])
            elif opened and kind == "separate":
                opened[-1].append(run)
            elif opened and kind == "end":
                begin, *separators = opened.pop()
                separator = separators[-1] if separators else run
                its = (begin, separator, run)
                is_apart = begin is not separator and separator is not run and begin is not run
                is_even = len({one.depth for one in its}) == 1 and not any(one.has_text for one in its)
                depth, is_inside = 0, True
                for event in events[begin.begin : run.end]:
                    depth += (event.kind == BEGIN) - (event.kind == END)
                    is_inside = is_inside and depth >= 0 and event.name != _BOX
                if is_even and is_inside and (is_apart or not separators):
                    found.append(its)
    return sorted(found, key=lambda its: (its[0].begin, -its[2].end))


def _runs(events: Sequence[Event]) -> Iterable[_Run]:
    """Yields the runs with marks of fields."""
    depth, begin = 0, -1
    kinds, has_text = list[str](), False
    for place, event in enumerate(events):
        if event.kind == BEGIN and event.name == _RUN and begin < 0:
            begin, kinds, has_text, at = place, [], False, depth
        depth += (event.kind == BEGIN) - (event.kind == END)
        if begin >= 0 and event.kind == BEGIN:
            if event.name == _MARK:
                kinds.append(event.attributes.get(_KIND, ""))
            has_text = has_text or event.name == _TEXT
        if event.kind == END and begin >= 0 and depth == at:
            if kinds:
                yield _Run(begin, place + 1, at, tuple(kinds), has_text)
            begin = -1


def _end_of(events: Sequence[Event], place: int) -> int:
    """Returns the number behind the last event of an element that begins at a place."""
    depth = 0
    for number in range(place, len(events)):
        depth += (events[number].kind == BEGIN) - (events[number].kind == END)
        if not depth:
            return number + 1
    return len(events)


def _is_picture(run: Sequence[Event]) -> bool:
    """Whether a run has a picture, and nothing beside it."""
    depth, names = 0, set[str]()
    for event in run:
        depth -= event.kind == END
        if event.kind == BEGIN and depth == 1:
            names.add(event.name)
        depth += event.kind == BEGIN
    return bool(names & _DRAWN) and names <= _DRAWN | {f"{_W}rPr"}


def _markup(events: Iterable[Event]) -> str:
    return "".join(event.markup for event in events)


def _instruction(events: Iterable[Event]) -> str:
    """Returns what a field does, from the runs before its result."""
    return "".join(_texts(events, _INSTRUCTION)).strip()


def _shown(events: Iterable[Event]) -> Iterable[str]:
    """Yields the texts of runs."""
    return _texts(events, _TEXT)


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
