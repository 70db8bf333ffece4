"""Marks of emphasis in Markdown: which of them count, and tags of HTML in place of those that do not.

https://spec.commonmark.org/0.31.2/#emphasis-and-strong-emphasis
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from string import punctuation

from seq2seq_serve.documents.spans import Tag


@dataclass(slots=True)
class _Mark:
    """A mark among the strings that are written.

    Attributes:
        place: Its number among them.
        tag: The emphasis that it begins or ends.
        is_open: Whether it begins it.
        before: The character before it and all marks of its kind that are beside it; empty at the begin.
        after: That after them.
        is_beside: Whether another mark of its kind is right before it.
    """

    place: int
    tag: Tag
    is_open: bool
    before: str = ""
    after: str = ""
    is_beside: bool = False

    @property
    def counts(self) -> bool:
        """Whether the mark begins or ends emphasis here, in all versions of the rules."""
        outer, inner = map(_kind, (self.before, self.after) if self.is_open else (self.after, self.before))
        is_flanking = inner == "word" or (inner != "space" and outer in ("space", "mark"))
        return is_flanking and (self.tag.open[0] != "_" or outer in ("space", "mark"))

    @property
    def is_clear(self) -> bool:
        """Whether it cannot do the opposite."""
        outer, inner = map(_kind, (self.before, self.after) if self.is_open else (self.after, self.before))
        return outer == "space" or (outer == "mark" and inner == "word")


def _kind(character: str) -> str:
    """Returns what a character is; versions of the rules differ in symbols, which are marks in some."""
    if not character or character.isspace():
        return "space"
    category = unicodedata.category(character)
    if character in punctuation or category[0] == "P":
        return "mark"
    return "symbol" if category[0] == "S" else "word"


def with_tags(written: list[str], marks: Sequence[tuple[int, Tag, bool]]) -> None:
    """Writes tags of HTML in place of marks that would not be emphasis, and of those in and around them.

    Args:
        written: The strings that are written.
        marks: The marks in their order: the place of each, its emphasis, and whether it begins it.
    """
    found = {place: _Mark(place, tag, is_open) for place, tag, is_open in marks}
    _look_around(written, found)
    for kind in {tag.open[0] for _, tag, _ in marks}:
        group, depth = list[_Mark](), 0
        for mark in (mark for mark in found.values() if mark.tag.open[0] == kind):
            if not depth and not mark.is_beside:
                _check(written, group)
                group = []
            group.append(mark)
            depth += 1 if mark.is_open else -1
        _check(written, group)


def _look_around(written: Sequence[str], found: dict[int, _Mark]) -> None:
    """Finds the characters beside marks."""
    for step in (1, -1):
        last, beside = "", None
        for place in range(len(written))[::step]:
            text, mark = written[place], found.get(place)
            if mark is None:
                beside = None if text else beside
                last = (text[-1] if step > 0 else text[0]) if text else last
                continue
            kind = mark.tag.open[0]
            is_beside = beside is not None and beside.tag.open[0] == kind
            if step > 0:
                before = beside.before if is_beside and beside else last
                mark.before, mark.is_beside = before, is_beside
            else:
                mark.after = beside.after if is_beside and beside else last
            last, beside = kind, mark


def _check(written: list[str], group: Sequence[_Mark]) -> None:
    """Writes tags for emphases that are in or right beside each other, unless all of their marks count."""
    is_alone = len(group) == 2
    if all(mark.counts and (is_alone or mark.is_clear) for mark in group) and not _is_doubled(group):
        return
    for mark in group:
        written[mark.place] = mark.tag.instead[not mark.is_open]


def _is_doubled(group: Sequence[_Mark]) -> bool:
    """Whether marks side by side may be read as those of other emphases."""
    num_beside = 0
    for one, other in pairwise(group):
        num_beside = num_beside + 1 if other.is_beside else 0
        if num_beside > 1 or (other.is_beside and one.tag.open == other.tag.open):
            return True
    return False
