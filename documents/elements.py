"""Reads XML so that it can be written anew with other texts and otherwise the same bytes.

Libraries for kinds of XML write the whole file anew, and leave out what they do not know. Here expat reports
where everything stands. Entities of a file's own are refused: a few lines of them can make gigabytes.
"""

from __future__ import annotations

import codecs
import html
import re
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from html.entities import html5
from pathlib import Path
from xml.parsers import expat

from seq2seq_serve.documents.alignment import text_of
from seq2seq_serve.documents.markup import Flows, escaped_xml, unescaped
from seq2seq_serve.documents.notes import MAX_CHARACTERS, MAX_TAGS, is_note
from seq2seq_serve.documents.page import note_of
from seq2seq_serve.documents.segments import Document, Part, Segment, TextSpan, has_words, wrong_file
from seq2seq_serve.documents.spans import Here, Tag
from seq2seq_serve.documents.tags import Element, Tags

BEGIN, END, TEXT, OTHER = range(4)

_CHUNK_BYTES = 2**14
_NONE = frozenset[str]()
_NO_ATTRIBUTES: dict[str, str] = {}
_DECLARED = re.compile(rb"""<\?xml[^>]{1,100}?encoding\s*=\s*["']([\w.-]{1,40})["']""")
_TAG_NAME = re.compile(r"<[^\s/>]+")
_STRICT = re.compile(r"http://purl\.oclc\.org/ooxml/(\w+)/")
LINE_BREAK = re.compile(r"((?:\r\n|[\r\n]|&#(?:10|13|[xX]0?[aAdD]);)\s*+)")
_RANGE, _IDS = re.compile("-?(?:start|end)", re.IGNORECASE), ("id", "name", "change-id")  # of ranges
_DESCRIPTION = re.compile(
    r"""<[^\s/>]+(?:\s+(?!descr\s*=)[^\s=]+\s*=\s*(?:"[^"]*"|'[^']*'))*+\s+descr\s*=\s*("[^"]*"|'[^']*')"""
)
_FILE = re.compile(r"\.(?:bmp|emf|gif|jpe?g|png|svg|tiff?|webp|wmf)\s*\Z", re.IGNORECASE)
_RAISED = re.compile(
    r"""<[\w:]*rPr\s[^<>]*\bbaseline\s*=\s*["'][1-9]|<[\w:]*vertAlign\s[^<>]*\bval\s*=\s*["']superscript"""
)
_PROPERTIES = 4000  # characters of a run that may say that it is raised
_AFTER = 64  # events after a note among which its next text is looked for
_CHARSETS = re.compile(r"utf-8|ascii|cp\d+|iso8859-\d+|koi8-[ru]|gb\w*|shift_jis|euc_\w+|big5")


@dataclass(slots=True)
class Event:
    """A part of XML.

    Attributes:
        kind: `BEGIN` or `END` of an element, `TEXT`, or `OTHER`, such as a comment.
        name: That of the element, after its namespace and a space.
        attributes: Its attributes, by their names.
        markup: As it is written.
        text: What it says.
    """

    kind: int
    name: str = ""
    attributes: dict[str, str] = field(default_factory=lambda: _NO_ATTRIBUTES)
    markup: str = ""
    text: str = ""

    @property
    def local(self) -> str:
        """The name of the element without its namespace."""
        return self.name.rpartition(" ")[2]


def decoded_xml(content: bytes, path: Path, part: str = "") -> tuple[str, bytes]:
    """Returns the encoding of XML, as its mark or its declaration says, and its text in UTF-8; see `events`.

    Raises:
        WrongFile: It is not in that encoding.
    """
    encoding = "utf-8-sig" if content.startswith(codecs.BOM_UTF8) else "utf-8"
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    elif declared := _DECLARED.match(content):
        try:
            name = codecs.lookup(declared[1].decode()).name
        except LookupError:
            name = ""
        encoding = name if _CHARSETS.fullmatch(name) else encoding
    try:
        return encoding, content.decode(encoding).encode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        text = f"is not {encoding.upper()}: byte {error.start + 1} is wrong"
        raise wrong_file(path, f"{_where(part)} {text}") from error


def events(content: bytes, path: Path, part: str = "", root: str = "") -> Iterator[Event]:
    """Yields the parts of XML, whose markup joined is the text.

    Args:
        content: The XML, in UTF-8.
        path: Its file.
        part: The name of the part of the file that has it.
        root: The name of the outermost element without its namespace; empty if there may be any.

    Raises:
        WrongFile: It is not XML, has another root, or declares entities.
    """
    where = _where(part)
    reader = _Reader(path, where)
    is_strict = b"//purl.oclc.org/ooxml/" in content
    begin = end = 0
    step, is_over = _CHUNK_BYTES, False
    try:
        while not is_over:
            place, end = end, end + step
            is_over = end > len(content)
            reader.parser.Parse(content[place:end], is_over)
            # A tag that does not end is read again with each chunk
            step = _CHUNK_BYTES if len(reader.found) > 1 else 2 * step
            while len(reader.found) > 1:
                event, _ = reader.found.popleft()
                after = reader.found[0][1]
                event.markup, begin = content[begin:after].decode(), after
                if is_strict:
                    event.name = _transitional(event.name)
                    event.attributes = {_transitional(key): value for key, value in event.attributes.items()}
                if root and event.kind == BEGIN:
                    if event.local != root:
                        text = f"the file begins with <{event.local[:60]}>, and must begin with <{root}>"
                        raise wrong_file(path, f"{text}: XML of other kinds is not known")
                    root = ""
                yield event
    except (expat.ExpatError, UnicodeError) as error:
        raise wrong_file(path, f"{where} is not XML: {error}") from error
    event, _ = reader.found.popleft()
    event.markup = content[begin:].decode()
    yield event


def _transitional(name: str) -> str:
    """Returns a name of a file that is saved as "Strict Open XML" as other files have it."""
    return _STRICT.sub(r"http://schemas.openxmlformats.org/\1/2006/", name)


def _where(part: str) -> str:
    return f"its part {part}" if part else "the file"


class _Reader:
    """The handlers of a parser. Owned by `events`.

    Attributes:
        parser: The parser.
        found: Events, and where they begin. Each ends where the next one begins.
    """

    def __init__(self, path: Path, where: str) -> None:
        self.found: deque[tuple[Event, int]] = deque([(Event(OTHER), 0)])
        self._texts: list[str] = []  # of the last event
        parser = self.parser = expat.ParserCreate("UTF-8", " ")
        parser.buffer_text = False
        parser.StartElementHandler = lambda name, attributes: self._add(Event(BEGIN, name, attributes))
        parser.EndElementHandler = lambda name: self._add(Event(END, name))
        parser.CharacterDataHandler = self._add_text
        parser.StartCdataSectionHandler = lambda: self._add_text("")
        for name in ("CommentHandler", "ProcessingInstructionHandler"):
            setattr(parser, name, lambda *_: self._add(Event(OTHER)))
        parser.SkippedEntityHandler = self._add_entity
        parser.StartDoctypeDeclHandler = lambda *_: self._add(Event(OTHER))

        def refuse(*_: object) -> None:
            raise wrong_file(path, f"{where} declares entities, which may stand for any text: remove them")

        parser.EntityDeclHandler = refuse

    def _add(self, event: Event) -> None:
        self.found[-1][0].text = "".join(self._texts)
        self._texts.clear()
        self.found.append((event, self.parser.CurrentByteIndex))

    def _add_entity(self, name: str, is_parameter: bool) -> None:
        """Adds an entity that a DTD declares, which is not read: those of HTML are texts."""
        text = "" if is_parameter else html5.get(f"{name};")
        if text:
            self._add_text(text)
        else:
            self._add(Event(OTHER))

    def _add_text(self, text: str) -> None:
        if self.found[-1][0].kind != TEXT:
            self._add(Event(TEXT))
        self._texts.append(text)


@dataclass(frozen=True)
class Names:
    """The names of elements that may stand inside a text. Every other element ends the text.

    Attributes:
        around: They format the texts inside.
        single: Those of them that must not become two.
        runs: Those of them that have nothing but properties and texts.
        beside: They stay where they are within a text, with all that they have inside.
        fixed: The same; what they have inside is a part of the text, but is not translated.
        begins: Those of them where a range of texts, such as a bookmark, begins.
        ends: Those where one ends.
        boxes: They stay where they are within a text, and have texts of their own inside, as notes have.
        notes: Notes, or references to them, which stay right after the text before them.
        source: They belong to the words of the source, such as readings: a translation does not have them.
        left_out: They end a text, and stay with all that they have inside.
        texts: Only they have texts; without any, all elements have.
        properties: They belong to the element that begins before them.
        keeps_space: Whether elements of texts need an attribute to keep the white space at their ends.
        keeps_lines: Whether line breaks are shown: they end a text, and stay.
        has_tags: Whether texts are strings of programs, which may have tags of HTML, escaped.
        has_raised: Whether texts may be raised, as the numbers of notes are; all names have a namespace then.
    """

    around: frozenset[str] = _NONE
    single: frozenset[str] = _NONE
    runs: frozenset[str] = _NONE
    beside: frozenset[str] = _NONE
    fixed: frozenset[str] = _NONE
    begins: frozenset[str] = _NONE
    ends: frozenset[str] = _NONE
    boxes: frozenset[str] = _NONE
    notes: frozenset[str] = _NONE
    source: frozenset[str] = _NONE
    left_out: frozenset[str] = _NONE
    texts: frozenset[str] = _NONE
    properties: frozenset[str] = _NONE
    keeps_space: bool = False
    keeps_lines: bool = False
    has_tags: bool = False
    has_raised: bool = False


def named(namespace: str, names: str) -> frozenset[str]:
    """Returns names, which white space separates, in a namespace that ends with a space."""
    return frozenset(namespace + name for name in names.split())


def description(event: Event) -> re.Match[str] | None:
    """Returns the attribute of an element that describes a picture in words; None if there is none."""
    text = event.attributes.get("descr", "")
    return _DESCRIPTION.match(event.markup) if has_words(text) and not _FILE.search(text) else None


def described(event: Event, flows: Flows) -> Tag:
    """Returns what is written for such an element, and adds its description to the texts."""
    tag, found = Tag(event.markup, ""), description(event)

    def write(pieces: Sequence[TextSpan]) -> None:
        if found is not None:
            before, after = event.markup[: found.start(1)], event.markup[found.end(1) :]
            tag.open = f'{before}"{html.escape(text_of(pieces))}"{after}'

    flows.segments.append(Segment([(event.attributes["descr"], 0)], write))
    return tag


class Content:
    """Puts what is inside a text element into a flow of texts. Owned by a document.

    Attributes:
        flows: Those of the document.
        source_language: The tag of the language of its texts; empty if it is not known.
        raised: The names of styles whose texts stand higher than others.
        decoded: Returns what the markup of a text says.
        escape: Returns how a text is written.
        has_spaced_boxes: Whether markup with texts of its own always stands between spaces.
    """

    has_spaced_boxes = False
    decoded = staticmethod(unescaped)
    escape = staticmethod(escaped_xml)

    def __init__(self, flows: Flows, names: Names) -> None:
        self.source_language = ""
        self.raised = set[str]()
        self.flows = flows
        self._names = names
        self._kept: list[str] = []  # the markup of an element that stays, and of those inside
        self._kept_texts: list[str] = []
        self._depth = 0  # within it
        self._keep: Callable[[str], object] = flows.add_markup
        self._opened: Tag | None = None  # by the last event
        self._held: list[Event] = []  # a text element and its text
        self._outer: Flows | None = None  # those around a box, which has texts of its own
        self._depth_in_box = 0
        self._ranges: dict[tuple[str, str], Here] = {}  # the begins of ranges, by their names
        self._whole: Sequence[Event] = ()  # the events of the present text, if they are known
        self._next = 0  # the number of the next one

    def add(self, event: Event, name: str) -> None:
        """Adds the next event; `name` is that of its element, as the names have it."""
        flows, names, opened = self.flows, self._names, self._opened
        self._opened = None
        if self._depth_in_box:
            self._depth_in_box += (event.kind == BEGIN) - (event.kind == END)
            if not self._depth_in_box:
                self._end_box(event.markup, name)
                return
        if self._depth:
            self._kept.append(event.markup)
            self._kept_texts.append(event.text)
            self._depth += (event.kind == BEGIN) - (event.kind == END)
            if not self._depth:
                self._keep("".join(self._kept))
                self._kept.clear()
                self._kept_texts.clear()
        elif self._held:
            self._hold(event, name)
        elif event.kind == TEXT:
            if not names.texts:
                self.add_text(event)
            elif opened is not None:  # before its properties
                opened.open += event.markup
            elif event.text.isspace():
                flows.add_of_source(event.markup)
            else:
                flows.add_markup(event.markup)
        elif event.kind == OTHER:
            flows.add_markup(event.markup)
        elif event.kind == BEGIN and name in names.texts:
            self._held.append(event)
        elif event.kind == BEGIN and (keep := self._kept_by(event, name)):
            self._keep, self._depth = keep, 1
            self._kept.append(event.markup)
        elif event.kind == BEGIN and self._outer is None and self._is_box(name):
            self._depth_in_box = 1
            self._begin_box()
            self.flows.end(event.markup)
        elif name in names.around and event.kind == BEGIN:
            is_single = name in names.single or "id" in event.attributes
            is_run = name in names.runs
            self._opened = flows.open(event.markup, name, is_single=is_single, is_run=is_run)
        elif name in names.around:
            flows.close(event.markup, name)
        else:
            flows.end(event.markup)

    def finish(self) -> None:
        """Adds the events that wait for others, at the end of the text element."""

    def add_all(self, events: Sequence[Event]) -> None:
        """Adds all events of a text."""
        self.flows.tags = None
        if self._names.has_tags and any("&" in event.markup for event in events):
            elements = {BEGIN: Element.BEGIN, END: Element.END}
            written = (event for event in events if event.kind != OTHER and not _is_cdata(event))
            parts = [elements.get(event.kind, event.markup) for event in written]
            self.flows.tags = Tags(parts, self.decoded, self.escape)
        self._whole, place = events, 0
        while place < len(events):
            event, has_raised = events[place], self._names.has_raised
            size = 0 if has_raised else self._add_note(events[place : place + 2 * MAX_TAGS])
            if not size:
                self._next = place + 1
                self.add(event, event.name if has_raised else event.local)
            place += size or 1
        self.flows.close_all()

    def _add_note(self, events: Sequence[Event]) -> int:
        """Adds the number of a note if events of a string begin with one; returns how many it has."""
        parts = list[str]()
        if events[0].kind == BEGIN and events[0].local in self._names.around and not self._depth:
            for event in events:
                parts += [""] * (event.kind != TEXT and len(parts) % 2) + [event.markup]
        read, after = note_of([*parts, ""], self.flows.last_characters) or ([], "")
        if read:
            self.flows.add_note("".join(read), after)
        return sum(map(bool, read))

    def _kept_by(self, event: Event, name: str) -> Callable[[str], object] | None:
        """Returns what keeps an element with all that it has inside; None if it does not stay."""
        if name in self._names.properties:
            return self.flows.extend
        is_no = event.attributes.get("translate") == "no" or event.attributes.get("mtype") == "protected"
        if name in self._names.fixed or is_no:
            return self._add_fixed
        if name in self._names.beside:
            is_range = name in self._names.begins or name in self._names.ends
            return partial(self._add_range, event) if is_range else self.flows.add_markup
        if name in self._names.source:
            return self.flows.add_of_source
        if name in self._names.notes and name not in self._names.boxes:
            return self._add_reference
        return self.flows.end if name in self._names.left_out else None

    def _is_box(self, name: str) -> bool:
        """Whether an element that begins here has texts of its own, within the one around it."""
        return name in self._names.boxes

    def _begin_box(self) -> None:
        """Begins markup within a text that has texts of its own."""
        self._outer, self.flows = self.flows, self.flows.inner()

    def _end_box(self, markup: str, name: str = "") -> None:
        inner, self.flows, self._outer = self.flows, self._outer or self.flows, None
        inner.end(markup)
        if name in self._names.notes:
            self.flows.add_inner_note(inner, self._text_after())
        else:
            self.flows.add_parts([inner.part()], is_spaced=self.has_spaced_boxes)

    def _add_reference(self, markup: str) -> None:
        """Adds a reference to a note, which shows its number."""
        self.flows.add_note(markup, self._text_after())

    def _add_range(self, event: Event, markup: str) -> None:
        """Adds the begin or the end of a range of texts; an empty range, as of a bookmark, has no words."""
        begins, namespace = event.name in self._names.begins, event.name.rpartition(" ")[0]
        kind = _RANGE.sub("", event.local)
        name = next((value for key in _IDS if (value := event.attributes.get(f"{namespace} {key}"))), "")
        here = self.flows.add_markup(markup, begins=begins)
        if begins:
            self._ranges[kind, name] = here
        elif (begin := self._ranges.pop((kind, name), here)).number == here.number:
            begin.begins = here.begins = None

    def _add_fixed(self, markup: str) -> None:
        text = "".join(self._kept_texts)
        text = text.strip() if self._names.texts else text  # between text elements, white space is not shown
        if text.strip():
            self.flows.add_fixed(markup, text)
        else:
            self.flows.add_picture(markup)

    def add_text(self, event: Event) -> None:
        """Adds a text. One of markup within CDATA stays."""
        has_lines = self._names.keeps_lines or self._names.has_tags
        if _is_cdata(event) and "<" in event.text:
            self.flows.end(event.markup)
        elif self._add_raised(event.markup, event.text, is_raised=self._is_raised()):
            return
        elif _is_cdata(event) or not has_lines:
            self.flows.add_text(event.markup, event.text)
        elif self.flows.tags is None:
            self.add_lines(event.markup)
        else:
            self.flows.tags.add(self.flows, event.markup, self.add_lines)

    def add_lines(self, markup: str) -> None:
        """Adds the lines of a text, each of which may be a text of its own."""
        for number, part in enumerate(LINE_BREAK.split(markup) if self._names.keeps_lines else [markup]):
            if number % 2:
                self.flows.end(part)
            elif part:
                self.flows.add_text(part, self.said(part))

    def said(self, markup: str) -> str:
        """Returns what the markup of a text without tags says."""
        return self.decoded(markup) if self.flows.tags is None else self.flows.tags.said(markup)

    def _hold(self, event: Event, name: str) -> None:
        """Adds the text of an element that has one."""
        self._held.append(event)
        if event.kind == TEXT:
            return
        begin, *texts, last = self._held
        self._held = []
        markup = markup_of((begin, *texts, last))
        if event.kind == END and name in self._names.texts and texts:
            text = "".join(one.text for one in texts)
            tag = keeping_space(begin.markup) if self._names.keeps_space else begin.markup
            inside = markup_of(texts)
            if self._names.keeps_lines and LINE_BREAK.search(inside) and "<" not in inside:
                self.flows.end(begin.markup)
                self.add_lines(inside)
                self.flows.end(last.markup)
            elif not self._add_raised(markup, text, is_raised=self._is_raised()):
                self.flows.add_text(markup, text, (tag, last.markup))
        else:
            self.flows.add_markup(markup)

    def _add_raised(self, markup: str, text: str, *, is_raised: bool, target: str = "") -> bool:
        """Adds a raised text if it is the number of a note; returns whether it is one.

        Args:
            markup: Its markup.
            text: It.
            is_raised: Whether it stands higher than others.
            target: That of its link.
        """
        if not is_raised or len(text) > MAX_CHARACTERS or text != text.strip():
            return False
        after = self._text_after()
        if not is_note([("sup", target, "")], text, self.flows.last_characters, after):
            return False
        self.flows.add_note(markup, after)
        return True

    def _is_raised(self) -> bool:
        """Whether texts stand higher than others at the present place."""
        return self._names.has_raised and _RAISED.search(self.flows.place.open, 0, _PROPERTIES) is not None

    def _text_after(self) -> str:
        """Returns the next text of the events that are known; empty if none is near."""
        for number in range(self._next, min(self._next + _AFTER, len(self._whole))):
            is_text = not self._names.texts or self._whole[number - 1].name in self._names.texts
            if self._whole[number].kind == TEXT and is_text:
                return self._whole[number].text
        return ""


def markup_of(events: Iterable[Event]) -> str:
    """Returns the markup of events."""
    return "".join(event.markup for event in events)


def keeping_space(tag: str) -> str:
    """Returns the tag that begins a text, whose white space at its ends stays."""
    if "xml:space" in tag:
        return tag
    return _TAG_NAME.sub(r'\g<0> xml:space="preserve"', tag, count=1)


def _is_cdata(event: Event) -> bool:
    return "<![CDATA[" in event.markup


class XmlTexts(Document):
    """XML with texts in some of its elements.

    Attributes:
        root: The name of the outermost element; empty if there may be any.
        names: What the elements inside a text mean.
        escape: Returns how a text is written.
        content_of: Puts what is inside a text into its flow.
        around: The elements around the place, outside of texts.
        before: The last text outside of those elements.
    """

    errors = "xmlcharrefreplace"
    root = ""
    names = Names()
    content_of: type[Content] = Content
    escape = staticmethod(escaped_xml)

    def __init__(self, content: bytes, path: Path, part: str = "") -> None:
        self._from = path, part
        self.encoding, self._content = decoded_xml(content, path, part)
        self._flows = Flows(self.escape, is_tight=self.names.has_tags)
        self._inside = self.content_of(self._flows, self.names)
        self.around: list[Event] = []
        self.before = ""

    def parts(self) -> Iterator[Part]:
        inside = self._inside
        inside.source_language = self.source_language
        depth = 0  # of elements in a text
        text = list[Event]()
        for event in events(self._content, *self._from, self.root):
            if event.kind == BEGIN and self._flows.is_ready and not self.is_held:
                yield self._flows.part(self.changed)
            if depth:
                depth += (event.kind == BEGIN) - (event.kind == END)
                if depth and self.is_whole:
                    text.append(event)
                    continue
                if depth:
                    inside.add(event, self.name_of(event))
                    continue
                if text:
                    inside.add_all(text)
                    text = []
                inside.finish()
            self._flows.end(self.outside(event))
            if event.kind == BEGIN:
                if self.has_text(event):
                    depth = 1
                else:
                    self.around.append(event)
            elif event.kind == END and self.around and self.around[-1].name == event.name:
                self.around.pop()
            elif event.kind == TEXT:
                self.before = event.text.strip() or self.before
        self._flows.end()
        yield self._flows.part(self.changed)

    @property
    def is_held(self) -> bool:
        """Whether the element around the place is a part, which must not be written before its end."""
        return False

    @property
    def is_whole(self) -> bool:
        """Whether a text is added when it has ended, because what follows in it says what a part of it is."""
        return self.names.has_tags or self.names.has_raised

    def changed(self, markup: str) -> str:
        """Returns what is written for a part, whose tags are whole."""
        return markup

    @abstractmethod
    def has_text(self, event: Event) -> bool:
        """Whether an element, which begins here, has a text."""

    def outside(self, event: Event) -> str | Tag:
        """Returns what is written for markup outside of texts."""
        return event.markup

    def name_of(self, event: Event) -> str:
        """Returns the name of an element as `names` has it."""
        return event.local
