"""Places in the markup around texts, and which of them the parts of a translation get."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from seq2seq_serve.bundle.characters import HAN, KANA
from seq2seq_serve.documents.alignment import count_words
from seq2seq_serve.documents.segments import LETTER

_FAR = 32  # tags between two words that are not looked at as parts of one span
_MAX_GAP = 4  # parts of a word between two words of one span, such as marks around it
_TAG = re.compile(r"<[^/][^>]*>")
_IN_WORD = re.compile(rf"[^\W_{HAN}{KANA}]{{2}}")  # two characters


@dataclass(slots=True, eq=False)
class Tag:
    """A tag and those around it, as a chain that the texts inside share.

    Attributes:
        open: As it is written.
        close: Its end.
        around: The next tag around it; None at the end of the chain.
        depth: The number of tags around it.
        is_single: Whether it is written once only.
        is_run: Whether it is a run of Word: a text stands in one, which has nothing but its formatting.
        first: The number of texts before it in the document.
        end: The number of texts before its end.
        has_text: Whether there are texts inside of it that are translated.
        instead: What is written where its marks would not count, as those of Markdown within a word.
    """

    open: str
    close: str
    around: Tag | None = None
    depth: int = 0
    is_single: bool = False
    is_run: bool = False
    first: int = 0
    end: float = float("inf")
    has_text: bool = False
    instead: tuple[str, str] | tuple[()] = ()


NO_TAG = Tag("", "")


def between(one: Tag, other: Tag) -> tuple[list[Tag], list[Tag]]:
    """Returns the tags that end, and those that begin, from a place inside of one tag to another."""
    closing, opening = [], []
    while one is not other:
        depths = one.depth, other.depth
        if depths[0] >= depths[1]:
            closing.append(one)
            one = one.around or NO_TAG
        if depths[1] >= depths[0]:
            opening.append(other)
            other = other.around or NO_TAG
    opening.reverse()
    return closing, opening


@dataclass(slots=True, eq=False)
class Here:
    """A text, or markup that belongs to no text, in the flow of a document.

    Attributes:
        markup: As it is written.
        place: The tag around it.
        around: What is written before a translation of the text, and after it; None for markup.
        text: The text.
        is_fixed: Whether it is written as it is, whatever its translation.
        number: The number of texts before it.
        begins: Whether it is markup where a range of texts begins or ends; None for other markup.
        space: White space before the number of a note, which stands after a word; None for other markup.
        is_after_end: Whether it is a note after the end of a sentence, or before its mark; None if neither.
    """

    markup: str
    place: Tag
    around: tuple[str, str] | None = None
    text: str = ""
    is_fixed: bool = False
    number: int = 0
    begins: bool | None = None
    space: str | None = None
    is_after_end: bool | None = None


Placed = tuple[str, Here]  # a part of a translation, and the text whose place and formatting it has


def close_gaps(parts: Sequence[Placed]) -> list[Placed]:
    """Returns parts of a translation, in which a span with a letter goes on over a gap of one word.

    This word has no formatting beyond that of the text around the span. White space between two words is
    inside of no other tags than those around one of them.
    """
    closed = list(parts)
    for begin, (text, one) in enumerate(parts):
        if not LETTER.search(text):  # a number may be raised, which is no formatting of words
            continue
        one, num_words = closed[begin][1], 0
        for end in range(begin + 1, min(begin + 2 + _MAX_GAP, len(parts))):
            text, other = closed[end]
            if not LETTER.search(text) and _IN_WORD.fullmatch(parts[end - 1][0][-1:] + text[:1]):
                break  # a number that ends a word, as in H₂O₂
            if text.strip() and end > begin + 1:
                inner = _common(one.place, other.place)
                if inner and all(_is_plain(here, inner, one) for _, here in closed[begin + 1 : end]):
                    its = _within(inner, one, other)
                    closed[begin + 1 : end] = [
                        (text, here if here.place is inner else its) for text, here in closed[begin + 1 : end]
                    ]
                    break
            num_words += count_words(text)
            if num_words > 1 or other.is_fixed:
                break
    return closed


def _within(inner: Tag, one: Here, other: Here) -> Here:
    """Returns a place between two texts, directly in the tag around both if texts may stand there."""
    if one.place.is_run:
        its = other if other.place is inner and not other.is_fixed else one
        return Here("", its.place, ("", "")) if its.is_fixed else its
    return Here("", inner, ("", ""))


def _is_plain(here: Here, inner: Tag, one: Here) -> bool:
    """Whether a text stands outside of a tag, and each of its formattings is also one of a text inside."""
    place = here.place
    if here.is_fixed:
        return False
    if place.is_run:
        if not _properties(place.open) <= _properties(one.place.open):
            return False
        place = place.around or NO_TAG
    return place is not inner and _is_around(place, inner)


@lru_cache(maxsize=2)  # for the texts of one run
def _properties(markup: str) -> frozenset[str]:
    return frozenset(_TAG.findall(markup)[1:])


def _common(one: Tag, other: Tag) -> Tag | None:
    """Returns the innermost tag around two places; None if it is far from them."""
    for _ in range(_FAR):
        if one is other:
            return one
        depths = one.depth, other.depth
        if depths[0] >= depths[1]:
            one = one.around or NO_TAG
        if depths[1] >= depths[0]:
            other = other.around or NO_TAG
    return None


def _is_around(outer: Tag, inner: Tag) -> bool:
    """Whether a tag is around another one, or is that one; False if it is far from it."""
    for _ in range(min(_FAR, inner.depth - outer.depth)):
        inner = inner.around or NO_TAG
    return inner is outer


def place_spaces(parts: Sequence[Placed], begin: Tag, end: Tag) -> Iterator[Placed]:
    """Yields parts of a translation, with spaces and the last mark inside of tags around their neighbours."""
    for number, (text, here) in enumerate(parts):
        is_space = not text.strip()
        is_last_mark = number + 1 == len(parts) and not LETTER.search(text) and LETTER.search(here.text)
        if len(parts) > 1 and not here.is_fixed and (is_space or is_last_mark):
            one = parts[number - 1][1] if number else None
            other = parts[number + 1][1] if number + 1 < len(parts) else None
            places = one.place if one else begin, other.place if other else end
            neighbour = next((each for each in (one, other) if each and not each.is_fixed), here)
            here = _moved(here, places, neighbour, is_space=is_space)
        yield text, here


def with_spaces_outside(parts: Sequence[Placed], begin: Tag, end: Tag) -> Iterator[Placed]:
    """Yields parts of a translation, with the white space between two words in the tags around both."""
    last, space, spaced = begin, "", None
    for text, here in [*parts, ("", None)]:
        shown = text.lstrip()
        space, spaced = space + text[: len(text) - len(shown)], spaced or here
        if not shown and here is not None:
            continue
        common = _common(last, end if here is None else here.place) or last
        if space and spaced is not None:
            is_there = spaced.place is common and not spaced.is_fixed
            yield space, spaced if is_there else Here("", common, ("", ""))
        if here is not None:
            word = text if here.is_fixed else shown.rstrip()
            yield word, here
            last, space = here.place, shown[len(word) :]
            spaced = here if space else None


def _moved(here: Here, places: tuple[Tag, Tag], neighbour: Here, *, is_space: bool) -> Here:
    """Returns where white space or a mark between two places is written: there, or between or beside them."""
    if here.place.is_run and is_space:
        return here if here.place in places else neighbour
    inner = _common(*places)
    place = here.place.around or NO_TAG if here.place.is_run else here.place
    is_outside = inner is None or _is_around(inner, place)
    if is_outside and any(_is_around(place, outer) for outer in places):
        return here
    return neighbour if here.place.is_run or inner is None else _within(inner, here, here)


def in_run(here: Here, runs: dict[tuple[Tag | None, frozenset[str]], Tag]) -> Here:
    """Returns a text, or markup beside one, in the first run with its formatting; `runs` has them by that."""
    if not here.place.is_run or ((here.around is None or here.is_fixed) and not here.place.has_text):
        return here
    key = here.place.around, _properties(here.place.open)
    run = runs.get(key, here.place) if here.around is None else runs.setdefault(key, here.place)
    return here if run is here.place else replace(here, place=run)
