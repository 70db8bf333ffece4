"""Gives the words of a target the formattings of the source words that they belong to."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING

from seq2seq_serve.bundle.characters import HAN, KANA

if TYPE_CHECKING:
    from seq2seq_serve.documents.segments import TextSpan
    from seq2seq_serve.protos.seq2seq_v1_pb2 import WordAlignment

_Place = tuple[int, int]  # where a word begins and ends in its text

_WORD = re.compile(r"\S+")
_SHORT_WORD = re.compile(rf"[{HAN}{KANA}][^\w\s]*|[^\s{HAN}{KANA}]+")
_NOTE_CHARACTERS = 16  # of the number of a note with the marks around it
_IN_WORD = re.compile(r"\w")
_LETTER_OR_DIGIT = re.compile(r"[^\W_]")


def count_words(text: str) -> int:
    """Returns the number of words of a text; a character of a script without spaces counts as one."""
    return len(_SHORT_WORD.findall(text))


def text_of(pieces: Iterable[tuple[str, object]]) -> str:
    """Returns the text of pieces in their order."""
    return "".join(text for text, _ in pieces)


def longest(pieces: Sequence[TextSpan]) -> int:
    """Returns the formatting of the longest piece."""
    return max(pieces, key=lambda piece: len(piece[0].strip()))[1]


def formatted(
    pieces: Sequence[TextSpan],
    target: str,
    kept: Iterable[range] = (),
    alignments: Iterable[WordAlignment] = (),
) -> list[TextSpan]:
    """Returns a target in pieces: a word has the formatting of the source word that it belongs to.

    Without an alignment that fits, the words of the target belong to those of the source in their order.

    Args:
        pieces: The source, which has words.
        target: The target.
        kept: The numbers of pieces that belong together, such as those of a link; the inner of two is first.
            One of them gets a word of the target, as far as there are enough words.
        alignments: Those of the sentences of the target.
    """
    source = _Source(pieces)
    words, links = source.linked(target, alignments)
    if not words:
        return [(target, longest(pieces))]
    owners = [source.owners[link] for link in links]
    targets = [target[begin:end] for begin, end in words]
    cuts = _keep(kept, source, targets, links, owners)
    spaced = [text != text.strip() for text, _ in pieces]
    loose = next((number for number, is_spaced in enumerate(spaced) if is_spaced), None)
    blank = next((number for number, (text, _) in enumerate(pieces) if not text.strip()), loose)
    parts: list[tuple[str, int]] = []  # with the numbers of pieces
    end, marks = 0, ""  # where the last word ends, and the marks after it that its source word does not have
    for number, ((begin, stop), link) in enumerate(zip(words, links, strict=True)):
        its, more = source.parts(targets[number], link, owners[number], cuts.get(number))
        space = target[end:begin]
        if marks or space:
            one, other = (parts or its)[-1][1] if parts else its[0][1], its[0][1]
            between = one
            if one != other and space:
                same = source.space_after(link - 1) if link == links[number - 1] + 1 else None
                # That of the same space in the source, or of a piece with space at its ends
                at_end = (p for p in (one, other, blank) if p is not None and spaced[p])
                between = next(at_end, one) if same is None else same
            parts += [(marks, between), (space, between)]
        parts += its
        end, marks = stop, more
    if marks or target[end:]:
        parts.append((marks + target[end:], source.last_mark(parts[-1][1]) if marks else parts[-1][1]))
    groups = groupby((part for part in parts if part[0]), key=lambda part: part[1])
    return [(text_of(group), pieces[number][1]) for number, group in groups]


class _Source:
    """A source in pieces.

    Attributes:
        words: The places of its words.
        owners: For each word the piece with the most of its letters.
    """

    words: list[_Place]
    owners: list[int]

    def __init__(self, pieces: Sequence[TextSpan]) -> None:
        self.text = text_of(pieces)
        self._starts = list(accumulate((len(text) for text, _ in pieces), initial=0))

    def piece_at(self, place: int) -> int:
        """Returns the number of the piece at a place of the text."""
        return bisect_right(self._starts, place) - 1

    def start(self, piece: int) -> int:
        """Returns the place where a piece begins."""
        return self._starts[piece]

    def core(self, pieces: range) -> str:
        """Returns the text of pieces without the marks around it; empty if it is longer than a short word."""
        begin, end = self._starts[pieces.start], self._starts[pieces.stop]
        return _core(self.text[begin:end].strip())[1] if end - begin <= _NOTE_CHARACTERS else ""

    def linked(self, target: str, alignments: Iterable[WordAlignment]) -> tuple[list[_Place], list[int]]:
        """Finds the words; returns those of a target, and for each the source word that it belongs to."""
        source_words, target_words, links = list[str](), list[str](), list[int]()
        for alignment in alignments:
            links += [len(source_words) + link.source_word for link in alignment.links]
            source_words += alignment.source_words
            target_words += alignment.target_words
        sources, targets = _located(source_words, self.text), _located(target_words, target)
        if sources is None or targets is None or len(links) != len(targets):
            sources, targets = (
                [word.span() for word in _SHORT_WORD.finditer(text)] for text in (self.text, target)
            )
            links = [(2 * n + 1) * len(sources) // (2 * len(targets)) for n in range(len(targets))]
        self.words = sources
        self.owners = [self._owner(*word) for word in sources]
        return targets, links

    def parts(
        self, word: str, link: int, owner: int, cut: tuple[int, int] | None = None
    ) -> tuple[list[tuple[str, int]], str]:
        """Returns the parts of a target word with the pieces whose formattings they have.

        The marks after it that its source word does not have are apart. `cut` is the number of characters at
        its end that belong to another piece, and this piece.
        """
        begin, end = self.words[link]
        if owner == self.owners[link] and self.has(word, link):
            parts = [(word[one - begin : other - begin], p) for one, other, p in self._pieces(begin, end)]
            return parts, ""
        before, inside, after = _core(word)
        first, core, last = _core(self.text[begin:end])
        more = after.removeprefix(last) if inside and after.startswith(last) else ""
        after = after.removesuffix(more)
        num_cut, other = cut or (0, owner)
        parts = [
            *self._marks(before, range(begin, begin + len(first)), begin),
            (inside[: len(inside) - num_cut], owner),
            (inside[len(inside) - num_cut :], other),
            *self._marks(after, range(begin + len(first + core), end), end - 1),
        ]
        return [part for part in parts if part[0]], more

    def _marks(self, marks: str, places: range, place: int) -> list[tuple[str, int]]:
        """Returns the marks of a target word with the pieces of those of its source word, or of a place."""
        if len(marks) == len(places):
            return [(mark, self.piece_at(each)) for mark, each in zip(marks, places, strict=True)]
        return [(marks, self.piece_at(place))]

    def has(self, word: str, link: int) -> bool:
        """Whether a word is the same as one of the source, but for capital letters."""
        its = self.text[slice(*self.words[link])]
        return len(word) == len(its) and word.casefold() == its.casefold()

    def last_mark(self, piece: int) -> int:
        """Returns the piece of the mark at its end; the given one if there is no mark."""
        last = len(self.text.rstrip()) - 1
        return piece if _IN_WORD.match(self.text, last) else self.piece_at(last)

    def space_after(self, word: int) -> int | None:
        """Returns the piece of the white space after a word; None if there is none."""
        end = self.words[word][1]
        return self.piece_at(end) if self.text[end : end + 1].isspace() else None

    def _pieces(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yields where each piece begins and ends between two places, and its number."""
        piece = self.piece_at(begin)
        while begin < end:
            stop = min(end, self._starts[piece + 1])
            if stop > begin:
                yield begin, stop, piece
            begin, piece = stop, piece + 1

    def _owner(self, begin: int, end: int) -> int:
        parts = list(self._pieces(begin, end))
        if len(parts) == 1:
            return parts[0][2]
        letters = [len(_LETTER_OR_DIGIT.findall(self.text, one, other)) for one, other, _ in parts]
        return parts[letters.index(max(letters))][2]


def _located(words: Sequence[str], text: str) -> list[_Place] | None:
    """Returns the places of words in their text; None if the words are not those of the text."""
    places = [word.span() for word in _WORD.finditer(text)]
    if len(places) == len(words):
        return places
    letters = [place for begin, end in places for place in range(begin, end)]
    ends = list(accumulate(map(len, words), initial=0))
    if ends[-1] != len(letters) or "" in words:
        return None
    # Words of a script without spaces
    return [(letters[begin], letters[end - 1] + 1) for begin, end in pairwise(ends)]


def _keep(
    kept: Iterable[range], source: _Source, targets: Sequence[str], links: Sequence[int], owners: list[int]
) -> dict[int, tuple[int, int]]:
    """Gives pieces that belong together a word of the target if they have none, from a neighbour.

    Where their text is the end of a word, such as the number of a note, they get only that. Returns by the
    number of such a word how many of its characters they get, and the piece.
    """
    kept, cuts = list(kept), dict[int, tuple[int, int]]()
    if not kept:
        return cuts
    present = sorted(owners)
    inner = innermost(kept, source.piece_at(len(source.text)) + 1)
    nearest: tuple[list[int], list[int]] | None = None
    free: list[int] | None = None  # the numbers of words that may be, in their order

    def num_words(group: range) -> int:
        return bisect_left(present, group.stop) - bisect_left(present, group.start)

    def is_free(number: int) -> bool:
        its = inner[owners[number]]
        return its is None or num_words(its) > 1

    for group in kept:
        if num_words(group):
            continue
        nearest = nearest or _nearest(len(source.words), links)
        first = bisect_left(source.owners, group.start)
        last = bisect_left(source.owners, group.stop) - 1
        piece = source.owners[first] if first <= last else group.start
        if first > last:  # it is within a word
            first = bisect_right(source.words, (source.start(group.start), len(source.text))) - 1
            last = first = max(first, 0)
            number = nearest[0][first]
            if links[number] == first and source.has(targets[number], first):
                continue
        neighbours = [nearest[0][last], nearest[1][first]]
        neighbours.sort(key=lambda number: min(abs(links[number] - first), abs(links[number] - last)))
        text = source.core(group)
        ends = [number for number in neighbours if _core(targets[number])[1].endswith(text)]
        if text and ends and _core(targets[ends[0]])[1] != text and ends[0] not in cuts:
            cuts[ends[0]] = len(text), piece
            insort(present, piece)
            continue
        found = next(filter(is_free, neighbours), None)
        if found is None:
            free = list(range(len(owners))) if free is None else free
            found = _nearest_free(free, neighbours[0], is_free)
        if found is not None:
            del present[bisect_left(present, owners[found])]
            owners[found] = piece
            insort(present, piece)
    return cuts


def innermost(kept: Iterable[range], num_pieces: int) -> list[range | None]:
    """Returns for each piece the innermost of the pieces that belong together around it."""
    found, around = list[range | None](), list[range]()
    waiting = sorted(kept, key=lambda group: (-group.start, group.stop))  # the next one is last
    for piece in range(num_pieces):
        while waiting and waiting[-1].start <= piece:
            around.append(waiting.pop())
        while around and around[-1].stop <= piece:
            around.pop()
        found.append(around[-1] if around else None)
    return found


def _nearest_free(free: list[int], place: int, is_free: Callable[[int], bool]) -> int | None:
    """Returns the word nearest to a place that is free, and removes those that are not, which stay so."""
    while free:
        after = bisect_left(free, place)
        if after == len(free) or (after and place - free[after - 1] <= free[after] - place):
            after -= 1
        if is_free(free[after]):
            return free[after]
        del free[after]
    return None


def _nearest(num_words: int, links: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns for each source word the nearest target word of it or those before it, and after it."""
    before, after = [-1] * num_words, [-1] * num_words
    for number, link in enumerate(links):
        before[link] = number
    for number, link in reversed(list(enumerate(links))):
        after[link] = number
    for one, step in ((before, 1), (after, -1)):
        for word in range(num_words)[::step]:
            if one[word] < 0 and 0 <= word - step < num_words:
                one[word] = one[word - step]
    found = [number if number >= 0 else other for number, other in zip(before, after, strict=True)]
    others = [number if number >= 0 else other for number, other in zip(after, before, strict=True)]
    return found, others


def _core(word: str) -> tuple[str, str, str]:
    """Returns the marks before a word, the word, and the marks after it; a word may have only marks."""
    first = _IN_WORD.search(word)
    if first is None:
        return "", "", word
    end = len(word)
    while not _IN_WORD.match(word, end - 1):
        end -= 1
    return word[: first.start()], word[first.start() : end], word[end:]
