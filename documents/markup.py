"""Tags around texts: how they follow the words of a translation, in subtitles, HTML and Word files.

The tags around texts are a tree, and stay one: a tag has the same tags around it as in the source, and begins
and ends where its words do. If its words are apart in the translation, it is written several times. A tag
that may be written once only, such as that of a link, has the longest run of its words.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

from seq2seq_serve.bundle.placeholders import space_around
from seq2seq_serve.bundle.words import OPENING
from seq2seq_serve.documents.alignment import formatted, text_of
from seq2seq_serve.documents.emphasis import with_tags
from seq2seq_serve.documents.fixed import with_fixed
from seq2seq_serve.documents.notes import END_MARKS, is_after_end
from seq2seq_serve.documents.segments import WITH_TAGS, Part, Segment, TextSpan, has_choice, has_words
from seq2seq_serve.documents.spans import (
    NO_TAG,
    Here,
    Placed,
    Tag,
    between,
    close_gaps,
    in_run,
    place_spaces,
    with_spaces_outside,
)

if TYPE_CHECKING:
    from seq2seq_serve.documents.tags import Tags

MAX_COPIES = 4  # how often the markup of a text may be written around parts of its translation

_NEAR = 32  # events before a text among which the begin of a range is placed
_MOST_TOKENS = 256  # of a part without texts
_TAG_NAME = re.compile(r"<([^\s/>]+)")
_LINKS = frozenset(["a", "["])  # of HTML and Markdown
_BETWEEN = re.compile(r"\s++[|¦·•›»]\s++")  # two links of a menu, or the parts of a path
_LONG_NUMBER = re.compile(r"&#[0-9]{1000,}+;?")  # has more digits than `html.unescape` reads
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _joined(parts: Sequence[Placed]) -> list[Placed]:
    """Returns parts of a translation, with one in place of several that follow each other in one place."""
    groups = groupby(parts, key=lambda part: part[1])
    return [
        (text, here)
        for here, group in groups
        for text in ([here.text] if here.is_fixed else [text_of(group)])
    ]


_OPEN, _CLOSE, _TEXT = range(3)
_Event = tuple[int, Tag, str, Here | None]  # what is written, with the tag, or the text and its place


def _with_end_apart(text: str, here: Here) -> list[Placed]:
    """Returns a part of a translation with the marks apart that it begins with, and end a sentence."""
    marks = END_MARKS.match(text) if not here.is_fixed else None
    return [(text[: marks.end()], here), (text[marks.end() :], here)] if marks else [(text, here)]


@dataclass(slots=True)
class _Flow:
    """Texts that belong together, with the tags among them. Owned by its document.

    Attributes:
        begin: The tag around the place where it begins.
        end: That around its end.
        tokens: What is written: texts, tags that begin, the ends of tags, and markup of the source only.
        pieces: Its texts.
        kept: See `Segment`.
        end_number: The number of texts before its end in the document.
        escape: Returns how a text is written.
        is_tight: Whether tags stand next to their words, and white space outside of them.
        is_ordered: Whether markup that belongs to no text stays in its order.
        closes: The ends of tags that began before the flow and end in it, and those that may change.
        translated: Replaces the texts.
        tags: Those of the string of a program that it belongs to.
        whole: Replaces all that is written.
    """

    begin: Tag
    end: Tag
    tokens: list[Here | Tag | str]
    pieces: Sequence[TextSpan]
    kept: Sequence[range]
    end_number: int
    escape: Callable[[str], str]
    is_tight: bool
    is_ordered: bool
    closes: Mapping[Tag, str | Tag]
    translated: Sequence[TextSpan] | None = None
    tags: Tags | None = None
    whole: str | None = None

    def translate(self, pieces: Sequence[TextSpan]) -> None:
        """Replaces the texts, each of which has the formatting of its number, or all."""
        self.translated = pieces
        if self.tags is not None and pieces and pieces[0][1] == WITH_TAGS:
            self.whole = self.tags.escape(pieces[0][0])

    def close(self, tag: Tag) -> str:
        """Returns the end of a tag."""
        return _written(self.closes.get(tag, tag.close))

    def markup(self) -> str:
        """Returns what is written, with a translation if there is one."""
        if self.whole is not None:
            return self.whole
        source = "".join(map(_written, self.tokens))
        if self.translated is None or self.translated is self.pieces:
            return source
        written = self._with(self.translated, MAX_COPIES * len(source))
        if written is None:  # in the order of the source
            whole = text_of(self.translated)
            written = self._with(formatted(self.pieces, whole, self.kept))
        return written or ""

    def _with(self, pieces: Sequence[TextSpan], max_length: int | None = None) -> str | None:
        """Returns what is written with other texts; None if the tags take more than `max_length`."""
        runs = dict[tuple[Tag | None, frozenset[str]], Tag]()
        heres = [in_run(token, runs) for token in self.tokens if isinstance(token, Here)]
        texts = [here for here in heres if here.around is not None]
        last = next((here for here in reversed(heres) if here.markup or here.space), None)
        if last is not None and last.space:  # a note, which has the white space before it
            pieces = [*pieces[:-1], (pieces[-1][0].rstrip(), pieces[-1][1])]
        parts = with_fixed([(text, texts[number]) for text, number in pieces if text], texts)
        parts = _joined(close_gaps(list(place_spaces(parts, self.begin, self.end))))
        if self.is_tight:
            parts = _joined(list(with_spaces_outside(parts, self.begin, self.end)))
        if any(here.is_after_end for here in heres):
            parts = [part for one in parts for part in _with_end_apart(*one) if part[0]]
        events = self._events(parts, max_length)
        if events is None:
            return None
        fixed = {here for _, here in parts if here.is_fixed}
        marks = [here for here in heres if here.around is None or (here.is_fixed and here not in fixed)]
        return _Writer(self, events).written(marks)

    def _events(self, parts: Sequence[Placed], max_length: int | None) -> list[_Event] | None:
        events, place, num_tagged = list[_Event](), self.begin, 0
        for text, here in [*parts, ("", None)]:
            its = self.end if here is None else here.place
            closing, opening = between(place, its)
            events += [(_CLOSE, tag, "", None) for tag in closing]
            events += [(_OPEN, tag, "", None) for tag in opening]
            if here is not None:
                events.append((_TEXT, its, text, here))
                num_tagged += sum(map(len, here.around or ()))
                num_tagged += sum(len(self.close(tag)) for tag in closing)
                num_tagged += sum(len(tag.open) for tag in opening)
            place = its
            if max_length is not None and num_tagged > max_length:
                return None
        return events


class _Writer:
    """Writes the tags and texts of a flow. Owned by `_Flow._with`.

    A tag that is written once only keeps the run with the most letters of its words. Where the flow begins or
    ends inside of it, that is the first or last run.
    """

    def __init__(self, flow: _Flow, events: Sequence[_Event]) -> None:
        self._flow = flow
        self._events = events
        self._begins: dict[Tag, int] = {}  # where each tag begins: the first or only time; -1 before the flow
        self._ends: dict[Tag, int] = {}  # where it ends: the last or only time
        self._written: list[str] = []
        self._emphases: list[tuple[int, Tag, bool]] = []  # whose marks may not count: see `with_tags`
        self._after: dict[int, list[Here]] = {}  # what belongs to no text, by the event that comes before it
        self._waiting: dict[Tag, list[Here]] = {}  # the same, by the tag around it
        self._is_after_word = self._is_after_fixed = False  # the latter without a space of its own
        self._gap = 0  # where this space stands among the written ones
        # The present run if it has a text, how many parts were written then, what begins a longer text in it
        self._last: tuple[Tag | None, int, tuple[str, ...]] = None, 0, ()
        longest = dict[Tag, float]()
        opened = dict[Tag, tuple[int, int]]()
        num_letters = 0
        for number, (kind, tag, text, _) in enumerate(events):
            num_letters += len(text.strip())
            if kind == _OPEN:
                opened[tag] = number, num_letters
                self._begins.setdefault(tag, number)
            elif kind == _CLOSE:
                begin, before = opened.pop(tag, (-1, 0))
                self._begins.setdefault(tag, begin)
                if not tag.is_single:
                    self._ends[tag] = number
                elif num_letters - before > longest.get(tag, -1):
                    longest[tag] = num_letters - before if begin >= 0 else float("inf")
                    self._begins[tag], self._ends[tag] = begin, number
        self._begins |= {tag: begin for tag, (begin, _) in opened.items() if tag.is_single}

    def written(self, marks: Sequence[Here]) -> str:
        """Returns what is written.

        Args:
            marks: What belongs to no text. It comes after the text that was before it; the begin of a range
                comes before the text that was after it.
        """
        place, hidden = self._flow.begin, set[Tag]()
        self._plan(marks)
        self._write_marks(-1, place)
        for number, (kind, tag, text, here) in enumerate(self._events):
            if kind == _OPEN:
                if tag.is_single and self._begins[tag] != number:
                    hidden.add(tag)
                else:
                    self._write_tag(tag, is_open=True)
                    self._last = None, 0, ()
                place = tag
            elif kind == _CLOSE:
                if tag in hidden:
                    hidden.discard(tag)
                else:
                    self._write_tag(tag, is_open=False)
                    self._leave_gap()
                place = tag.around or NO_TAG
            elif here is not None and any(mark.space is not None for mark in self._after.get(number, ())):
                shown = text if here.is_fixed else text.rstrip() or text
                space = text[len(shown) :]
                self._write_text(shown, here)
                self._write_marks(number, place, goes_on=bool(space))
                if space:
                    self._write_text(space, here)
            elif here is not None:
                self._write_text(text, here)
            self._write_marks(number, place)
        for mark in [mark for marks in self._waiting.values() for mark in marks]:
            self._move(self._flow.end, mark.place)
            self._written.append(_written(mark))
            self._move(mark.place, self._flow.end)
        with_tags(self._written, self._emphases)
        return "".join(self._written)

    def _write_text(self, text: str, here: Here) -> None:
        if self._is_after_fixed and (text[0].isalnum() or (here.is_fixed and self._flow.is_tight)):
            if here.place.is_run:
                text = f" {text}"
            else:
                self._written[self._gap] = self._space
        self._is_after_fixed = False
        self._is_after_word = not (text[-1].isspace() or text.endswith(OPENING))
        around, escaped = here.around or ("", ""), self._flow.escape(text)
        if not here.markup and not here.place.is_run:
            around = self._plain
        run, num_written, begun = self._last
        if here.is_fixed:
            last = next(filter(None, reversed(self._written)), "")
            if here.markup.startswith("`") and last.endswith("`"):
                self._written.append(" ")  # two codes of Markdown side by side would be one
            self._written.append(here.markup)
            return
        is_joined = run is here.place and num_written == len(self._written)
        if run is here.place and not is_joined:  # a run has at most one text element
            self._written += [self._flow.close(here.place), here.place.open]
        if is_joined:
            self._written[-1:] = [*begun[:-1], escaped, begun[-1]]
            begun = begun[-1:]
        elif text == here.text:
            self._written.append(here.markup)
            begun = around[0], escaped, around[1]
        else:
            self._written += [around[0], escaped, around[1]]
            begun = around[1:]
        if here.place.is_run:
            self._last = here.place, len(self._written), begun

    def _plan(self, marks: Sequence[Here]) -> None:
        """Finds the event after which each mark can be written, and the tag around it that is written."""
        if not marks:
            return
        tokens = [token for token in self._flow.tokens if isinstance(token, Tag)]
        lacking = {tag for tag in tokens if tag not in self._begins}
        first: dict[int, int] = {}  # the first and the last event with each text
        last: dict[int, int] = {}
        for number, (_, _, text, here) in enumerate(self._events):
            if here is not None and here.markup and text.strip():
                first.setdefault(here.number, number)
                last[here.number] = number
        numbers = sorted(last)
        at_end = dict[Tag, int]()  # where the tags begin around which the flow ends, by the tag around them
        for number in range(len(self._events) - 1, -1, -1):
            kind, tag, _, _ = self._events[number]
            if kind != _OPEN:
                break
            at_end[tag.around or NO_TAG] = number
        around, place, begin, latest = dict[Tag, Tag](), 0, -1, -1
        # For each tag the outermost one without a text that it is in, whose marks stay together
        outermost, places = dict[Tag, Tag | None](), dict[Tag, int]()
        for mark in marks:
            while place < len(numbers) and numbers[place] < mark.number:
                latest = max(latest, last[numbers[place]])
                place += 1
            inner, passed = mark.place, list[Tag]()
            while inner in lacking:
                passed.append(inner)
                inner = around.get(inner) or inner.around or NO_TAG
            around |= dict.fromkeys(passed, inner)
            empty = next((tag for tag in reversed(passed) if not tag.has_text), None)
            empty = outermost.get(empty, empty) if empty else None
            outermost |= dict.fromkeys(passed, empty)
            before = numbers[place - 1] if place else -1
            is_inside = before >= inner.first and place
            event = last[before] if is_inside else self._begins.get(inner, -1)
            if mark.is_after_end is not None and is_inside and inner.first <= numbers[0]:
                near = range(latest + 1, min(latest + _NEAR, len(self._events)))
                after = next((number for number in near if self._events[number][2]), None)
                is_end = mark.is_after_end and after and END_MARKS.fullmatch(self._events[after][2])
                event = after if after and is_end else latest
            end = self._flow.end_number if inner.is_run else min(inner.end, self._flow.end_number)
            is_last = mark.number >= end  # a run may also have the texts of later ones
            if is_last and mark.begins is not False:
                event = self._ends.get(inner, at_end.get(inner, len(self._events))) - 1
            elif mark.begins and place < len(numbers):
                begin = max(begin, first[numbers[place]])
                event = self._event_before(first[numbers[place]], inner)
            elif mark.begins is False:
                event = max(event, begin)
            if self._flow.is_ordered:
                event = max(event, begin)
            if mark.begins or self._flow.is_ordered:
                begin = max(begin, event)  # the end of the range is not before it
            if empty is not None:
                event = places.setdefault(empty, event)
            self._after.setdefault(event, []).append(mark)
        self._around = around

    def _event_before(self, number: int, place: Tag) -> int:
        """Returns the event before that of a text at which a place around the text is reached."""
        at = self._events[number][1]
        for kind, tag, _, _ in reversed(self._events[max(0, number - _NEAR) : number]):
            if at is place or kind != _OPEN:
                break
            number, at = number - 1, tag.around or NO_TAG
        return number - 1

    def _write_marks(self, number: int, place: Tag, *, goes_on: bool = False) -> None:
        """Writes the marks that come after an event, or after earlier ones, and belong to a place.

        Args:
            number: The number of the event.
            place: The place after it.
            goes_on: Whether a text follows there, as it does before another event with one.
        """
        for mark in self._after.pop(number, ()):
            self._waiting.setdefault(self._around.get(mark.place, mark.place), []).append(mark)
        goes_on = goes_on or (number + 1 < len(self._events) and self._events[number + 1][0] == _TEXT)
        if place.is_run and place.around in self._waiting and goes_on:
            self._written.append(self._flow.close(place))
            self._write_waiting(place.around)
            self._written.append(place.open)
            self._last = None, 0, ()
        self._write_waiting(place)

    def _write_waiting(self, place: Tag) -> None:
        """Writes the marks that belong to a place and wait for it."""
        if place not in self._waiting:
            return
        at, last = place, None
        for mark in self._waiting.pop(place):
            is_own = mark.is_fixed and mark.space is None
            is_spaced = (is_own, is_own) if mark.around is not None or not is_own else self._spaces(mark)
            is_beside = last is not None and mark.around is None and last.number == mark.number
            last = mark
            if is_spaced[0] and self._is_after_word and not is_beside:
                outer = mark.place.around or NO_TAG if mark.place.is_run else mark.place
                at = self._move(at, outer, self._space)
            at = self._move(at, mark.place, mark.space or "")
            if mark.is_fixed:
                self._is_after_word, self._is_after_fixed = True, is_spaced[1]
            self._written.append(_written(mark))
        self._move(at, place)
        self._leave_gap()

    def _leave_gap(self) -> None:
        """Leaves a place for a space where fixed text ends, before tags that begin."""
        if self._is_after_fixed:
            self._gap = len(self._written)
            self._written.append("")

    @property
    def _space(self) -> str:
        """A space beside a text, where there are runs in one of its own."""
        return f"{self._plain[0]} {self._plain[1]}"

    def _spaces(self, mark: Here) -> tuple[bool, bool]:
        """Returns whether a word needs a space before markup, and after it: not one that it is a part of.

        A picture or box of an office program may float: it needs them where the source has both.
        """
        texts = self._flow.pieces
        place = mark.number - self._flow.end_number + len(texts)
        before = texts[place - 1][0][-1:] if place else ""
        after = texts[place][0][:1] if place < len(texts) else ""
        if not self._flow.is_tight:
            is_between = before.isspace() and after.isspace()
            return is_between, is_between
        is_before, is_after = space_around(f"{before}%{after}", len(before), len(before) + 1)
        return bool(is_before), is_after

    @cached_property
    def _plain(self) -> tuple[str, str]:
        """The begin and the end of the first run with a text; both are empty if the flow has no runs."""
        texts = (token for token in self._flow.tokens if isinstance(token, Here) and token.place.is_run)
        for run, around in ((here.place, here.around) for here in texts):
            if around is not None and any(around):
                return run.open + around[0], around[1] + self._flow.close(run)
        return "", ""

    def _move(self, one: Tag, other: Tag, space: str = "") -> Tag:
        """Writes a space and the tags between two places, without those that had texts, and have none now."""
        closing, opening = between(one, other)
        is_before = any(tag.instead for tag in opening)
        for tag in closing:
            if tag.is_run or not tag.has_text:
                self._write_tag(tag, is_open=False)
        self._written += [space] * (is_before and bool(space))
        for tag in opening:
            if tag.is_run or not tag.has_text:
                self._write_tag(tag, is_open=True)
        self._written += [space] * (not is_before and bool(space))
        if opening:
            self._last = None, 0, ()
        return other

    def _write_tag(self, tag: Tag, *, is_open: bool) -> None:
        if tag.instead:
            self._emphases.append((len(self._written), tag, is_open))
        self._written.append(tag.open if is_open else self._flow.close(tag))


@dataclass(slots=True, eq=False)
class _Box(Here):
    """Markup with texts of its own, such as a note.

    Attributes:
        written: Returns what is written with these texts as they are then.
    """

    written: Callable[[], str] = str


def _written(part: str | Here | Tag | _Flow) -> str:
    if isinstance(part, _Box):
        return part.written()
    if isinstance(part, _Flow | Here):
        return part.markup() if isinstance(part, _Flow) else part.markup
    return part.open if isinstance(part, Tag) else part


def escaped_xml(text: str) -> str:
    """Returns a text as XML and HTML have it."""
    return html.escape(_NOT_XML.sub("", text), quote=False)


class Flows:
    """Cuts markup into flows, and adds a segment for each that has words. Owned by a document.

    Attributes:
        segments: Those of the flows that ended after the last part.
        tags: Those of the present string of a program, if it may have some as text.
        has_words: Whether the present flow has words.
    """

    def __init__(
        self,
        escape: Callable[[str], str] = escaped_xml,
        *,
        is_tight: bool = False,
        is_ordered: bool = False,
    ) -> None:
        self.tags: Tags | None = None
        self._escape = escape
        self._how = is_tight, is_ordered
        self.segments: list[Segment] = []
        self._parts: list[str | Here | Tag | _Flow] = []
        self._place = self._begin = NO_TAG
        self._extended = NO_TAG  # the last tag with properties
        self._end_of_link = -1  # the number of tokens, if the last one ends a link
        self._names: list[str] = []  # of the tags around the place
        self._num_open = Counter[str]()
        self._num_texts = self._num_before = 0  # of the document, and those before the flow
        self._tokens: list[Here | Tag | str] = []
        self._pieces: list[TextSpan] = []
        self._kept: list[range] = []
        self._closes: dict[Tag, str | Tag] = {}
        self._num_source = 0  # elements around the place that are written with the source only
        self._is_split = False  # whether the present flow begins within one
        self._goes_on: tuple[Tag | None, int] = None, 0  # see `add_of_source`
        self.has_words = False

    @property
    def is_ready(self) -> bool:
        """Whether enough has ended for a part."""
        return bool(self.segments) or len(self._parts) > _MOST_TOKENS

    @property
    def last_characters(self) -> str:
        """The last characters of the present flow; empty if it has only white space."""
        text = "".join(text[-4:] for text, _ in self._pieces[-4:])[-4:]
        return "" if len(self._pieces) == 1 and text.isspace() else text

    @property
    def is_within(self) -> bool:
        """Whether a picture or formula would stand within a sentence here, after a word and a space."""
        return self.has_words and self.last_characters[-1:].isspace()

    @property
    def place(self) -> Tag:
        """The tag around what follows."""
        return self._place

    def part(self, changed: Callable[[str], str] = str) -> Part:
        """Returns a part of what has ended after the last part.

        Args:
            changed: Returns what is written for the markup with the texts as they are then.
        """
        segments, tokens = self.segments, self._parts
        self.segments, self._parts = [], []
        return Part(segments, lambda: changed("".join(map(_written, tokens))))

    def add_text(self, markup: str, text: str, around: tuple[str, str] = ("", "")) -> None:
        """Adds a text, and what is written around its translations; a mark after a link ends it."""
        is_after_link = self._end_of_link == len(self._tokens)
        if is_after_link and self.has_words and self.tags is None and _BETWEEN.fullmatch(text):
            self.end(markup)
            return
        here = Here(markup, self._place, around, text, number=self._num_texts)
        self._add(here, goes_on=self._goes_on == (self._place, len(self._tokens)))
        self.has_words = self.has_words or has_words(text)
        if self._names and not text.isspace():
            self._place.has_text = True

    def add_picture(self, markup: str) -> None:
        """Adds markup without a text; a word beside it needs a space if it needs one in the source."""
        self._tokens.append(Here(markup, self._place, is_fixed=True, number=self._num_texts))

    def add_fixed(self, markup: str, text: str) -> Here:
        """Adds markup with a text that belongs to a sentence, but is not translated, such as code."""
        here = Here(markup, self._place, ("", ""), text, is_fixed=True, number=self._num_texts)
        self._add(here)
        return here

    def add_markup(self, markup: str, *, begins: bool | None = None) -> Here:
        """Adds markup that neither ends a text nor formats one, such as a comment.

        Args:
            markup: The markup.
            begins: Whether a range of texts, such as a bookmark, begins or ends there.
        """
        here = Here(markup, self._place, number=self._num_texts, begins=begins)
        self._tokens.append(here)
        return here

    def add_of_source(self, markup: str, change: int = 0) -> None:
        """Adds markup that is written with the source only, such as the reading of its characters.

        The text goes on after it with the same formatting.

        Args:
            markup: The markup.
            change: The number of elements that begin in it, less that of those that end.
        """
        last = self._tokens[-1] if self._tokens else None
        place = self._goes_on[0] if self._goes_on[1] == len(self._tokens) else None
        if isinstance(last, Here):
            place = last.place if last.around is not None and not last.is_fixed else None
        self._tokens.append(markup)
        self._num_source += change
        self._goes_on = place, len(self._tokens)

    def add_note(self, markup: str, after: str) -> Here:
        """Adds the number of a note, which is not sent, and stays beside the text before it.

        Args:
            markup: The markup.
            after: The text that follows.
        """
        here = Here(markup, self._place, number=self._num_texts)
        self._tokens.append(here)
        self._put_beside(here, after)
        return here

    def _put_beside(self, note: Here, after: str) -> None:
        """Lets a note stay beside the text before it; `after` is the text that follows."""
        last = self._pieces[-1][0][-1:] if self._pieces else ""
        note.space = last if last.isspace() else ""
        note.is_after_end = is_after_end(self.last_characters, after)

    def inner(self) -> Flows:
        """Returns what cuts markup inside of the present flow, with texts of its own."""
        return Flows(self._escape, is_tight=self._how[0], is_ordered=self._how[1])

    def add_inner_note(self, inner: Flows, after: str) -> None:
        """Adds a note, which was cut, and stays as `add_note` says."""
        self._put_beside(self.add_parts([inner.part()]), after)

    def add_parts(self, parts: Sequence[Part], *, is_spaced: bool = False) -> Here:
        """Adds markup with texts of its own that stands within a sentence.

        Args:
            parts: The parts of the markup.
            is_spaced: Whether it always stands between spaces.
        """
        self.segments += [segment for part in parts for segment in part.segments]

        def written() -> str:
            return "".join(part.written() for part in parts)

        box = _Box("", self._place, is_fixed=True, number=self._num_texts, written=written)
        if is_spaced:
            box.around = "", ""
            self._add(box)
        else:
            self._tokens.append(box)
        return box

    def open(self, markup: str, name: str, *, is_single: bool = False, is_run: bool = False) -> Tag:
        """Adds a tag that formats the texts inside; one that is single is never written twice."""
        found = _TAG_NAME.match(markup)
        close = f"</{found[1]}>" if found else markup
        depth = self._place.depth + 1
        self._place = Tag(markup, close, self._place, depth, is_single, is_run, self._num_texts)
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

    def close(self, markup: str | Tag, name: str) -> None:
        """Adds the end of a tag, which also ends those inside that lack one; as a tag if it may change."""
        if not self._num_open[name]:
            self.add_markup(_written(markup))
            return
        place = self._place
        is_empty = not place.has_text and not place.instead
        if is_empty and not (place.is_run and self._num_texts > place.first):
            self.add_markup("")  # for an element without a text, which stays
        while (innermost := self._names.pop()) != name:
            self._num_open[innermost] -= 1
            if self.tags is not None:  # a string has as many tags as before
                self._closes[self._place] = ""
            self._leave()
        self._num_open[name] -= 1
        if isinstance(markup, Tag) or self._place.first < self._num_before:
            self._closes[self._place] = markup  # which may change; and flows before may be written already
        else:
            self._place.close = markup
        self._leave()
        self._tokens.append(markup)
        self._end_of_link = len(self._tokens) if name in _LINKS else -1

    def close_all(self) -> None:
        """Adds the end of a string, in which tags may lack their ends."""
        while self._names:
            self.close("", self._names[-1])

    def end(self, markup: str | Tag = "") -> None:
        """Ends a flow: what follows belongs to other texts."""
        is_whole = not self._is_split and not self._num_source
        if self.has_words and is_whole and not has_choice(text_of(self._pieces)):
            tokens, pieces, kept = self._tokens, self._pieces, self._kept
            how = (self._escape if self.tags is None else self.tags.escaped, *self._how)
            flow = _Flow(self._begin, self._place, tokens, pieces, kept, self._num_texts, *how, self._closes)
            flow.tags = self.tags
            has_marks = any(isinstance(one, Here) and one.around is None and one.markup for one in tokens)
            with_tags = ""
            if self.tags is not None and not has_marks:
                with_tags = self.tags.whole([_written(token) for token in tokens])
            self._parts.append(flow)
            texts = (one for one in tokens if isinstance(one, Here) and one.around is not None)
            fixed = {number for (_, number), here in zip(pieces, texts, strict=True) if here.is_fixed}
            self.segments.append(Segment(pieces, flow.translate, kept, with_tags, fixed))
            self._tokens, self._pieces, self._kept, self._closes = [], [], [], {}
        else:
            self._parts += self._tokens
            self._tokens.clear()
            self._pieces.clear()
            self._kept.clear()
            self._closes.clear()
        self.has_words, self._num_before = False, self._num_texts
        self._is_split, self._goes_on = self._num_source > 0, (None, 0)
        self._begin = self._place
        self._parts.append(markup)

    def _add(self, here: Here, *, goes_on: bool = False) -> None:
        number = self._pieces[-1][1] if goes_on else len(self._pieces)
        self._pieces.append((here.text, number))
        self._tokens.append(here)
        self._num_texts += 1

    def _leave(self) -> None:
        """Goes to the tag around the place."""
        tag = self._place
        tag.end = self._num_texts
        first = max(tag.first - self._num_before, 0)
        if tag.is_single and tag.has_text and first < len(self._pieces):
            self._kept.append(range(first, len(self._pieces)))
        self._place = tag.around or NO_TAG
        if self._names:
            self._place.has_text = self._place.has_text or tag.has_text


def unescaped(text: str) -> str:
    """Returns a text of HTML without character references."""
    return html.unescape(_LONG_NUMBER.sub("\ufffd", text))
