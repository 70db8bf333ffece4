"""Keeps translations of terms whole in a formatted target, wherever alignment would begin a formatting."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from seq2seq_serve.bundle.terms import TermTable
from seq2seq_serve.bundle.words import phrase, placed_words, words
from seq2seq_serve.documents.alignment import innermost, text_of

if TYPE_CHECKING:
    from seq2seq_serve.documents.segments import TextSpan
    from seq2seq_serve.protos.seq2seq_v1_pb2 import Term

_MOST_PLACES = 16  # of terms in a source, whose formattings are compared with those of a target


class WholeTerms:
    """The terms of the texts of documents. It does not change.

    Args:
        terms: The terms of the options with which the texts are translated; blank ones do not count.
    """

    def __init__(self, terms: Iterable[Term]) -> None:
        exact, folded = dict[str, str](), dict[str, str]()
        for term in terms:
            if key := phrase(words(term.source)):
                its, key = (exact, key) if term.case_sensitive else (folded, key.casefold())
                its.setdefault(key, phrase(words(term.target)))
        self._table = TermTable(exact, folded)

    def joined(
        self, source: Sequence[TextSpan], target: Sequence[TextSpan], kept: Iterable[range] = ()
    ) -> list[TextSpan]:
        """Returns pieces of a target: none ends within the translation of a term.

        A term that has several formattings in the source may have these in the target. Otherwise, its
        translation has one that no other word has, as that of a link, or that of the term, or that of most of
        its letters.

        Args:
            source: The pieces of the source.
            target: Those of the target.
            kept: See `Segment`.
        """
        if not self._table or len(target) < 2:
            return [*target]
        found = self._found(source)
        text = text_of(target)
        formattings = [formatting for piece, formatting in target for _ in piece]  # of each character
        groups = {
            formatting: group
            for (_, formatting), group in zip(source, innermost(kept, len(source)), strict=True)
            if group is not None
        }
        sizes = _num_letters(formattings, text, groups)
        for begin, end, key in _places(found, text):
            inside, its = formattings[begin:end], found[key]
            if len(set(inside)) == 1 or any(set(inside) <= one for one in its):
                continue
            nearest = max(its, key=lambda one: sum(each in one for each in inside))
            votes = _num_letters(inside, text[begin:end], groups)
            chosen = max(
                [*inside, *sorted(nearest)],
                key=lambda one: (
                    *(0 < votes[each] == sizes[each] for each in (groups.get(one), one)),
                    one in nearest,
                    votes[one],
                ),
            )
            formattings[begin:end] = [chosen] * len(inside)
            sizes.subtract(votes)
            sizes.update(_num_letters([chosen] * len(inside), text[begin:end], groups))
        runs = groupby(zip(text, formattings, strict=True), key=lambda one: one[1])
        return [("".join(character for character, _ in run), formatting) for formatting, run in runs]

    def _found(self, source: Sequence[TextSpan]) -> dict[str, list[set[int]]]:
        """Returns the translations of the terms in a source, with the formattings of the places of each."""
        its_words, places = placed_words(text_of(source))
        starts = list(accumulate((len(text) for text, _ in source), initial=0))
        found = dict[str, list[set[int]]]()
        for term in self._table.find(its_words):
            numbers = {
                number
                for begin, end in places[term.begin : term.end]
                for number in range(bisect_right(starts, begin) - 1, bisect_right(starts, end - 1))
            }
            its, formattings = found.setdefault(term.target, []), {source[number][1] for number in numbers}
            if len(its) < _MOST_PLACES and formattings not in its:
                its.append(formattings)
        return found


NO_TERMS = WholeTerms(())


def _places(phrases: Iterable[str], text: str) -> Iterator[tuple[int, int, str]]:
    """Yields where phrases of whole words begin and end in a text, each with the phrase."""
    its_words, places = placed_words(text)
    whole = f"\n{phrase(its_words)}"
    begins = list(accumulate((len(word) + 1 for word in its_words), initial=0))
    for one in phrases:
        begin = whole.find(f"\n{one}") if one else -1
        while begin >= 0:
            first, end = bisect_left(begins, begin), bisect_left(begins, begin + len(one))
            yield places[first][0], places[end - 1][1], one
            begin = whole.find(f"\n{one}", begin + len(one))


def _num_letters(
    formattings: Sequence[int], text: str, groups: Mapping[int, range]
) -> Counter[int | range | None]:
    """Returns how many letters and digits of a text have each formatting, and those of each group."""
    its = [one for one, character in zip(formattings, text, strict=True) if character.isalnum()]
    return Counter[int | range | None](its) + Counter(groups[one] for one in its if one in groups)
