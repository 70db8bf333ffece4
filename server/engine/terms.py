"""Follows the phrases that a target must have, token by token: which are there, and which tokens go on.

Lexically constrained beam search (Post & Vilar 2018, arXiv:1804.06609) over the prefixes of all phrases (Hu
et al. 2019, "Improved Lexically Constrained Decoding"). `tests/oracle.py` implements the same independently,
and tests compare the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from seq2seq_serve.bundle.words import begins_inside, opens

_MOST_KNOWN = 1024  # tokens after a progress


class Spelling(NamedTuple):
    """Token ids that write a term.

    Attributes:
        token_ids: At least one.
        begins_after_break: Whether they write it only at the beginning of a target, or after a token after
            which a word may stand, because they begin without a space.
        ends_before_break: Whether they write it only if the next token does not continue the word.
    """

    token_ids: tuple[int, ...]
    begins_after_break: bool = False
    ends_before_break: bool = False


class Term(NamedTuple):
    """A phrase that a target must have.

    Attributes:
        spellings: Any of them counts; at least one.
        number: How often the target must have it. A token of the target counts for one phrase only.
        is_exact: Whether the target must not have it more often.
    """

    spellings: tuple[Spelling, ...]
    number: int = 1
    is_exact: bool = False


@dataclass(eq=False, slots=True)
class Progress:
    """What a target so far has of the required terms. Owned by `RequiredTerms`: equal ones are one object.

    Attributes:
        missing: How often each term is still required.
        tail: The last tokens of the target, if they are a spelling of a missing term or begin one. A whole
            spelling counts when the next token shows that it is not the beginning of a longer one.
        is_after_break: Whether a spelling that begins without a space may stand where the tail begins.
        num_left: The fewest tokens that complete all terms.
        wanted: The tokens that begin a missing term, or continue the one that the target has begun.
        depends_on_next: Whether it matters where words begin and end in a next token that is not in any term.
        after: What was found of the progress with one more token: by a token of terms, or by what matters of
            others.
    """

    missing: tuple[int, ...]
    tail: tuple[int, ...]
    is_after_break: bool
    num_left: int
    wanted: tuple[int, ...]
    depends_on_next: bool
    after: dict[int, Progress] = field(default_factory=dict)


class RequiredTerms:
    """The phrases that the target of a request must have.

    It stores nothing about targets: each row of a beam has its own `Progress`.

    Args:
        terms: At least one.
        token_bytes: The bytes of each token, by its id; an id beyond the end has no bytes.

    Attributes:
        terms: The terms.
        token_bytes: The same; whoever unpickles terms sets it, because each process has the table.
        has_exact: Whether some term must not stand in a target too often.
    """

    def __init__(self, terms: Iterable[Term], token_bytes: Sequence[bytes]) -> None:
        self.terms = tuple(terms)
        self.token_bytes = token_bytes
        # The spellings, with the numbers of their terms, by each of their beginnings
        self._by_beginning: dict[tuple[int, ...], list[tuple[int, Spelling]]] = {}
        for number, term in enumerate(self.terms):
            for spelling in term.spellings:
                for length in range(1, len(spelling.token_ids) + 1):
                    beginning = spelling.token_ids[:length]
                    self._by_beginning.setdefault(beginning, []).append((number, spelling))
        self._firsts = {ids[0]: found for ids, found in self._by_beginning.items() if len(ids) == 1}
        spellings = [spelling for term in self.terms for spelling in term.spellings]
        self._ids = frozenset(token_id for spelling in spellings for token_id in spelling.token_ids)
        self._has_breaks = any(spelling.begins_after_break for spelling in spellings)
        self._has_word_ends = any(spelling.ends_before_break for spelling in spellings)
        self._costs = [_cost(term) for term in self.terms]
        self._exact: dict[int, list[tuple[int, list[int]]]] = {}  # by the last token
        for number, term in enumerate(self.terms):
            for spelling in term.spellings if term.is_exact else ():
                *before, last = spelling.token_ids
                self._exact.setdefault(last, []).append((number, before))
        self.has_exact = bool(self._exact)
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...], bool], Progress] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"token_bytes": (), "_known": {}}

    @property
    def start(self) -> Progress:
        """The progress of an empty target."""
        return self._progress(tuple(term.number for term in self.terms), (), is_after_break=True)

    @property
    def num_tokens(self) -> int:
        """The fewest tokens that write all terms."""
        return self.start.num_left

    def after(self, token_ids: Iterable[int]) -> Progress:
        """Returns the progress of a target."""
        progress = self.start
        for token_id in token_ids:
            progress = self.advance(progress, token_id)
        return progress

    def advance(self, progress: Progress, token_id: int) -> Progress:
        """Returns the progress of a target with one more token."""
        found = progress.after.get(token_id)
        if found is not None:
            return found
        key = token_id
        if token_id not in self._ids:
            # All tokens that are in no term lead to few places.
            token = self._bytes_of(token_id)
            key = -1 - 2 * begins_inside(token) - opens(token) if progress.depends_on_next else -1
            found = progress.after.get(key)
        if found is None:
            found = progress.after[key] = self._advanced(progress, token_id)
        if len(progress.after) < _MOST_KNOWN:
            progress.after[token_id] = found
        return found

    def _advanced(self, progress: Progress, token_id: int) -> Progress:
        missing, ids, is_after_break = progress.missing, (*progress.tail, token_id), progress.is_after_break
        if not progress.tail and token_id not in self._ids:
            is_after_break = not self._has_breaks or opens(self._bytes_of(token_id))
            return self._progress(missing, (), is_after_break=is_after_break)
        while ids and not self._begins(ids, missing, is_after_break=is_after_break):
            length, number = self._longest(ids, missing, is_after_break=is_after_break)
            if length:
                missing = _without(missing, number)
            last, ids = ids[max(length, 1) - 1], ids[max(length, 1) :]
            is_after_break = not self._has_breaks or opens(self._bytes_of(last))
        return self._progress(missing, ids, is_after_break=is_after_break)

    def _progress(self, missing: tuple[int, ...], tail: tuple[int, ...], *, is_after_break: bool) -> Progress:
        key = missing, tail, is_after_break
        if key not in self._known:
            self._known[key] = Progress(
                *key,
                self._num_left(missing, tail, is_after_break=is_after_break),
                tuple(self._wanted(missing, tail, is_after_break=is_after_break)),
                self._has_breaks or (self._has_word_ends and bool(tail)),
            )
        return self._known[key]

    def missing_at_end(self, progress: Progress) -> tuple[int, ...]:
        """Returns how often each term is missing in a target that has ended."""
        return self._without_tail(progress.missing, progress.tail, is_after_break=progress.is_after_break)

    def _without_tail(
        self, missing: tuple[int, ...], ids: tuple[int, ...], *, is_after_break: bool
    ) -> tuple[int, ...]:
        """Returns how often each term is missing in a target that ends with a tail."""
        while ids:
            length, number = self._longest(ids, missing, is_after_break=is_after_break, is_end=True)
            if length:
                missing = _without(missing, number)
            last, ids = ids[max(length, 1) - 1], ids[max(length, 1) :]
            is_after_break = opens(self._bytes_of(last))
        return missing

    def _wanted(
        self, missing: tuple[int, ...], tail: tuple[int, ...], *, is_after_break: bool
    ) -> dict[int, None]:
        wanted: dict[int, None] = {}
        for number, spelling in self._by_beginning.get(tail, ()):
            if len(spelling.token_ids) > len(tail) and _is_open(
                missing, number, spelling, is_after_break=is_after_break
            ):
                wanted[spelling.token_ids[len(tail)]] = None
        if tail:
            is_after_break = opens(self._bytes_of(tail[-1]))
        for first_id, spellings in self._firsts.items():
            if any(
                _is_open(missing, number, spelling, is_after_break=is_after_break)
                for number, spelling in spellings
            ):
                wanted[first_id] = None
        return wanted

    def repeats(self, progress: Progress, token_ids: list[int], token_id: int) -> bool:
        """Returns whether a token completes a term that its target must not have again.

        Args:
            progress: That of the target before it.
            token_ids: The same target.
            token_id: The token.
        """
        if token_id not in self._exact:
            return False
        missing = self.advance(progress, token_id).missing
        return any(
            not missing[number] and token_ids[len(token_ids) - len(before) :] == before
            for number, before in self._exact[token_id]
        )

    def _bytes_of(self, token_id: int) -> bytes:
        return self.token_bytes[token_id] if token_id < len(self.token_bytes) else b""

    def _begins(self, ids: tuple[int, ...], missing: tuple[int, ...], *, is_after_break: bool) -> bool:
        """Returns whether tokens are a spelling of a missing term, or begin one."""
        return any(
            _is_open(missing, number, spelling, is_after_break=is_after_break)
            for number, spelling in self._by_beginning.get(ids, ())
        )

    def _longest(
        self, ids: tuple[int, ...], missing: tuple[int, ...], *, is_after_break: bool, is_end: bool = False
    ) -> tuple[int, int]:
        """Returns the length and the term of the longest spelling at the beginning of tokens, or 0 and 0.

        All of them are not a spelling, unless `is_end`: then the target ends with them.
        """
        for length in range(len(ids) - (not is_end), 0, -1):
            for number, spelling in self._by_beginning.get(ids[:length], ()):
                if len(spelling.token_ids) != length:
                    continue
                goes_on = length < len(ids) and begins_inside(self._bytes_of(ids[length]))
                if not (spelling.ends_before_break and goes_on) and _is_open(
                    missing, number, spelling, is_after_break=is_after_break
                ):
                    return length, number
        return 0, 0

    def _num_left(self, missing: tuple[int, ...], tail: tuple[int, ...], *, is_after_break: bool) -> int:
        """Returns the fewest tokens that complete all terms, whether the tail goes on or not."""
        num_left = self._cost(missing)
        if not tail:
            return num_left
        gain = 0
        for number, spelling in self._by_beginning[tail]:
            if _is_open(missing, number, spelling, is_after_break=is_after_break):
                gain = max(gain, self._costs[number] - (len(spelling.token_ids) - len(tail)))
        ended = self._without_tail(missing, tail, is_after_break=is_after_break)
        return min(num_left - gain, self._cost(ended))

    def _cost(self, missing: tuple[int, ...]) -> int:
        return sum(map(int.__mul__, missing, self._costs))


def shares(counts: Mapping[int, int], size: int) -> dict[int, int]:
    """Divides the places of a beam among banks, by the number of tokens that their hypotheses still need.

    The banks get places in turn, those that need the fewest tokens first, as long as they have hypotheses. So
    each gets the same number, and the places that one does not need go to the others (Post & Vilar 2018,
    section 3.3).

    Args:
        counts: The number of hypotheses in each bank.
        size: The number of places.
    """
    taken = dict.fromkeys(sorted(counts), 0)
    open_banks = [bank for bank in taken if counts[bank]]
    while open_banks and size:
        for bank in open_banks[:size]:
            taken[bank] += 1
        size -= len(open_banks[:size])
        open_banks = [bank for bank in open_banks if taken[bank] < counts[bank]]
    return taken


def _is_open(missing: tuple[int, ...], number: int, spelling: Spelling, *, is_after_break: bool) -> bool:
    """Returns whether a spelling may stand at a place, and its term is missing."""
    return bool(missing[number]) and (is_after_break or not spelling.begins_after_break)


def _without(missing: tuple[int, ...], number: int) -> tuple[int, ...]:
    return *missing[:number], missing[number] - 1, *missing[number + 1 :]


def _cost(term: Term) -> int:
    """Returns the fewest tokens that write a term at any place, if some spelling may stand there."""
    anywhere = [spelling for spelling in term.spellings if not spelling.begins_after_break]
    return min(len(spelling.token_ids) for spelling in anywhere or term.spellings)
