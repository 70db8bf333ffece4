"""Finds the terms of a glossary in texts."""

from __future__ import annotations

import heapq
import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, count
from typing import NamedTuple

from seq2seq_serve.bundle.words import phrase

_WORDS_AT_ONCE = 64
_BYTES_OF_PHRASE = 128  # of memory, beside its strings: its places in two lists, a set and a tuple


class FoundTerm(NamedTuple):
    """A place where a term occurs.

    Attributes:
        begin: The number of its first word.
        end: That of the word after it.
        target: The translation of the term.
    """

    begin: int
    end: int
    target: str


class TermTable:
    """The terms of a glossary. It does not change.

    Args:
        exact: The translations of terms whose case matters, by `phrase` of their words.
        folded: Those of the others, by `phrase` of their words without case.

    Attributes:
        num_bytes: The memory that it takes.
    """

    def __init__(self, exact: Mapping[str, str], folded: Mapping[str, str]) -> None:
        self._exact, self._folded = _Phrases(exact), _Phrases(folded)
        self.num_bytes = self._exact.num_bytes + self._folded.num_bytes

    def __bool__(self) -> bool:
        return bool(self._exact) or bool(self._folded)

    def find(self, exact: Sequence[str], checkpoint: Callable[[], None] = lambda: None) -> list[FoundTerm]:
        """Returns the places where terms occur, the longest first.

        Where terms overlap, the longest counts, and of equally long ones the first.

        Args:
            exact: The words of a text.
            checkpoint: Is called before some of them; an error that it raises ends the work.
        """
        texts = _Words(exact), _Words([word.casefold() for word in exact])
        is_taken = bytearray(len(exact))
        matches: list[tuple[int, int, str]] = []
        for begin in range(len(exact)):
            if not begin % _WORDS_AT_ONCE:
                checkpoint()
            if (match := self._longest(texts, begin, is_taken)) is not None:
                matches.append(match)
        heapq.heapify(matches)
        found: list[FoundTerm] = []
        for number in count():
            if not matches:
                break
            if not number % _WORDS_AT_ONCE:
                checkpoint()
            minus_length, begin, target = heapq.heappop(matches)
            if any(is_taken[begin : begin - minus_length]):
                if (match := self._longest(texts, begin, is_taken)) is not None:
                    heapq.heappush(matches, match)
                continue
            is_taken[begin : begin - minus_length] = b"\1" * -minus_length
            found.append(FoundTerm(begin, begin - minus_length, target))
        return found

    def _longest(
        self, texts: tuple[_Words, _Words], begin: int, is_taken: bytearray
    ) -> tuple[int, int, str] | None:
        """Returns what `_Phrases.longest` does, with case and without; of equally long terms the former."""
        exact, folded = texts
        one, other = (
            self._exact.longest(exact, begin, is_taken),
            self._folded.longest(folded, begin, is_taken),
        )
        return one if other is None or (one is not None and one[0] <= other[0]) else other


class _Phrases:
    """Finds the longest term at a place of a text. It does not change.

    In the order of their strings, all terms from one that begins a text up to that text begin with it. So the
    longest one that begins the text is the last one before it, or begins that one.

    Args:
        targets: The target of each term, by `phrase` of its words.

    Attributes:
        num_bytes: The memory that it takes.
    """

    def __init__(self, targets: Mapping[str, str]) -> None:
        self._terms = sorted(targets)
        self._targets = [targets[term] for term in self._terms]
        self._first_words = {term[: term.index("\n")] for term in self._terms}
        self._beginnings = list[int]()  # the place of the longest other term that begins it; -1 for none
        open_places = [-1]
        for place, term in enumerate(self._terms):
            while open_places[-1] >= 0 and not term.startswith(self._terms[open_places[-1]]):
                open_places.pop()
            self._beginnings.append(open_places[-1])
            open_places.append(place)
        self._most_characters = max(map(len, self._terms), default=0)
        strings = (*self._terms, *self._targets, *self._first_words)
        self.num_bytes = sum(map(sys.getsizeof, strings)) + _BYTES_OF_PHRASE * len(self._terms)

    def __bool__(self) -> bool:
        return bool(self._terms)

    def longest(self, text: _Words, begin: int, is_taken: bytearray) -> tuple[int, int, str] | None:
        """Returns the longest term at a place, before the next taken word; None if there is none.

        It is minus its length, its place, and its target.
        """
        if text.words[begin] not in self._first_words:
            return None
        first = text.begins[begin]
        end = is_taken.find(1, begin, begin + self._most_characters)
        last = first + self._most_characters if end < 0 else text.begins[end]
        rest = text.phrase[first : min(last, first + self._most_characters)]
        place = bisect_right(self._terms, rest) - 1
        while place >= 0 and not rest.startswith(self._terms[place]):
            place = self._beginnings[place]
        if place < 0:
            return None
        return -self._terms[place].count("\n"), begin, self._targets[place]


class _Words:
    """The words of a text.

    Attributes:
        words: The words.
        phrase: The same as one string; see `phrase`.
        begins: Where each of them begins in it.
    """

    def __init__(self, its_words: Sequence[str]) -> None:
        self.words, self.phrase = its_words, phrase(its_words)
        self.begins = [0, *accumulate(len(word) + 1 for word in its_words)]
