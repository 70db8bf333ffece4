"""Follows the phrases that a target must have, token by token: which are there, and which tokens go on.

Lexically constrained beam search (Post & Vilar 2018, arXiv:1804.06609) over the prefixes of all phrases (Hu
et al. 2019, "Improved Lexically Constrained Decoding"). `tests/oracle.py` implements the same independently,
and tests compare the two.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from seq2seq_serve.bundle.placeholders import stays
from seq2seq_serve.bundle.words import (
    admits_placeholder,
    begins_inside,
    begins_with_mark,
    ends_with_bracket,
    marked_beginning,
    opens,
)

# Of memory, with the objects around them: of all terms, of a spelling, what an exact one takes besides, of a
# token in it, and of each different token
_LEAST_BYTES, _BYTES_OF_SPELLING, _BYTES_OF_EXACT, _BYTES_OF_PLACE, _BYTES_OF_TOKEN = 2048, 512, 896, 56, 96
_MOST_BESIDE = 16  # tokens before a placeholder that may make it another
_MOST_KEPT = 2**14  # progresses, and steps from one to the next


class Spelling(NamedTuple):
    """Token ids that write a term.

    Attributes:
        token_ids: At least one.
        begins_after_break: Whether they write it only at the beginning of a target, or after a token after
            which a word may stand, because they begin without a space.
        ends_before_break: Whether they write it only if the next token does not continue the word.
        follows_bracket: Whether an exact term may have them directly after an opening bracket; not if they
            begin with a space that the source does not have there.
    """

    token_ids: tuple[int, ...]
    begins_after_break: bool = False
    ends_before_break: bool = False
    follows_bracket: bool = True


class Term(NamedTuple):
    """A phrase that a target must have.

    Attributes:
        spellings: Any of them counts; at least one.
        number: How often the target must have it. A token of the target counts for one phrase only.
        is_exact: Whether the target must not have it more often, or without the breaks that its spellings
            need.
    """

    spellings: tuple[Spelling, ...]
    number: int = 1
    is_exact: bool = False


class _Beginning(NamedTuple):
    """The first tokens of some spellings, which stand side by side in the order of all.

    Attributes:
        first: The place of the first of these spellings.
        end: The place behind the last one.
        length: The number of tokens.
    """

    first: int
    end: int
    length: int


@dataclass(eq=False, slots=True)
class Progress:
    """The required terms that a target has so far. Owned by `RequiredTerms`.

    It refers only to what it settles as, so that all are freed with the last row of their search.

    Attributes:
        missing: How often each term is still required.
        begun: The last tokens of the target, if they are a spelling of a missing term or begin one. A whole
            spelling counts when the next token shows that it is not the beginning of a longer one.
        is_after_break: Whether a spelling that begins without a space may stand where these tokens begin.
        settled: The progress if these tokens turn out to be no spelling; None without such tokens.
        num_missing_tokens: The fewest tokens that write what is missing.
        num_left: The fewest tokens that complete all terms.
        at_end: How often each term is missing if the target ends here.
        num_at_end: The fewest tokens that write these.
        wanted: What `RequiredTerms.wanted` returns; None if it was not asked for.
        left_after_others: The fewest tokens that complete all terms after a token that is not wanted, and
            after one of these that continues the last word; None if `left_after` did not need them.
        ended: The exact term that the target ends with, and whether the next token must not continue its
            last word; None if that was not asked for.
        first_repeated: Where a term that the target must not have again is in what it has begun; None if that
            is not known, and behind all of it if there is none.
    """

    missing: tuple[int, ...]
    begun: _Beginning
    is_after_break: bool
    settled: Progress | None
    num_missing_tokens: int
    num_left: int
    at_end: tuple[int, ...]
    num_at_end: int
    wanted: dict[int, int] | None = None  # few of the progresses that are ranked go on
    left_after_others: tuple[int, int] | None = None
    ended: tuple[int | None, bool] | None = None
    first_repeated: int | None = None


class RequiredTerms:
    """The phrases that the target of a request must have.

    It stores nothing about targets: each row of a beam has its own `Progress`. What it found is kept, up to
    a bound, so that equal ones are mostly one object.

    Args:
        terms: At least one.
        token_bytes: The bytes of each token, by its id; an id beyond the end has no bytes.

    Attributes:
        terms: The terms.
        token_bytes: The same; whoever unpickles terms sets it, because each process has the table.
        has_exact: Whether some term is exact.
        num_bytes: At least the memory that it takes, without what a search finds.
    """

    def __init__(self, terms: Iterable[Term], token_bytes: Sequence[bytes]) -> None:
        self.terms = tuple(terms)
        self.token_bytes = token_bytes
        # With the numbers of their terms, sorted by their tokens: a beginning is a range of them
        self._spellings = sorted(
            ((number, spelling) for number, term in enumerate(self.terms) for spelling in term.spellings),
            key=lambda each: (each[1].token_ids, each[0]),
        )
        self._nothing = _Beginning(0, len(self._spellings), 0)
        spellings = [spelling for _, spelling in self._spellings]
        self._ids = frozenset(token_id for spelling in spellings for token_id in spelling.token_ids)
        num_exact = sum(len(term.spellings) for term in self.terms if term.is_exact)
        num_places = sum(len(spelling.token_ids) for spelling in spellings)
        self.num_bytes = (
            _LEAST_BYTES
            + _BYTES_OF_SPELLING * len(spellings)
            + _BYTES_OF_EXACT * num_exact
            + _BYTES_OF_PLACE * num_places
            + _BYTES_OF_TOKEN * len(self._ids)
        )
        self._has_breaks = any(spelling.begins_after_break for spelling in spellings)
        self._has_word_ends = any(spelling.ends_before_break for spelling in spellings)
        self._costs = [_cost(term) for term in self.terms]
        # What each spelling of a range saves, the number of its term, and whether it begins after a break
        self._ways: dict[tuple[int, int], list[tuple[int, int, bool]]] = {}
        self._continuations: dict[_Beginning, dict[int, _Beginning]] = {}
        # Exact ones with their tokens before the last one, by the last two
        self._exact: dict[tuple[int, ...], list[tuple[int, list[int], Spelling]]] = {}
        self._exact_after: dict[int | None, set[int]] = {}  # last tokens, by the tokens before them
        # Exact ones that may not stand after every token, by the first one
        self._bound: dict[int, list[tuple[int, Spelling]]] = {}
        for number, term in enumerate(self.terms):
            for spelling in term.spellings if term.is_exact else ():
                *before, last = spelling.token_ids
                self._exact.setdefault(spelling.token_ids[-2:], []).append((number, before, spelling))
                self._exact_after.setdefault(before[-1] if before else None, set()).add(last)
                if spelling.begins_after_break or not spelling.follows_bracket:
                    self._bound.setdefault(spelling.token_ids[0], []).append((number, spelling))
        self.has_exact = bool(self._exact)
        # Next tokens that may spoil, by the last one if a term ends so after it, and by what may follow it
        self._suspects: dict[tuple[int | None, bool, bool], frozenset[int]] = {}
        self._known: dict[tuple[tuple[int, ...], _Beginning, bool], Progress] = {}
        # With one more token: one of terms, or what matters of others
        self._after: dict[tuple[Progress, int], Progress] = {}

    def __reduce__(self) -> tuple[type[RequiredTerms], tuple[tuple[Term, ...], tuple[bytes, ...]]]:
        return RequiredTerms, (self.terms, ())

    @property
    def start(self) -> Progress:
        """The progress of an empty target."""
        missing = tuple(term.number for term in self.terms)
        return self._progress(missing, num_tokens(self.terms), self._nothing, is_after_break=True)

    def after(self, token_ids: Iterable[int]) -> Progress:
        """Returns the progress of a target."""
        progress = self.start
        for token_id in token_ids:
            progress = self.advance(progress, token_id)
        return progress

    def advance(self, progress: Progress, token_id: int) -> Progress:
        """Returns the progress of a target with one more token."""
        key = token_id
        if token_id not in self._ids:
            # All tokens that are in no term lead to few places.
            key = -1
            if self._has_breaks or (self._has_word_ends and progress.begun.length):
                token = self._bytes_of(token_id)
                key -= 2 * begins_inside(token) + opens(token)
        found = self._after.get((progress, key))
        if found is None:
            found = self._advanced(progress, token_id)
            if len(self._after) + len(self._known) > _MOST_KEPT:
                self.forget()
            self._after[progress, key] = found
        return found

    def left_after(self, progress: Progress, token_ids: Iterable[int]) -> list[int]:
        """Returns the fewest tokens that complete all terms after each of some next tokens."""
        if progress.left_after_others is None:
            other = going_on = self._decided_wholly(progress, goes_on=False).num_missing_tokens
            if self._has_word_ends:
                going_on = self._decided_wholly(progress, goes_on=True).num_missing_tokens
            progress.left_after_others = other, going_on
        wanted, (other, going_on) = self.wanted(progress), progress.left_after_others
        if going_on == other:
            return [wanted.get(token_id, other) for token_id in token_ids]
        return [
            wanted.get(token_id, going_on if self._goes_on(token_id) else other) for token_id in token_ids
        ]

    def _goes_on(self, token_id: int) -> bool:
        """Returns whether a token continues the last word, and that matters."""
        return self._has_word_ends and begins_inside(self._bytes_of(token_id))

    def forget(self) -> None:
        """Drops what was found. Rows keep their progress."""
        for found in (self._known, self._after, self._ways, self._continuations, self._suspects):
            found.clear()

    def _advanced(self, progress: Progress, token_id: int) -> Progress:
        going_on: list[tuple[Progress, _Beginning]] = []  # each settles as the next one
        while (found := self._after.get((progress, token_id))) is None:
            begun = self._continued(progress, token_id) if token_id in self._ids else None
            if begun is not None:
                going_on.append((progress, begun))
            if not progress.begun.length:
                found = self._progress(
                    progress.missing,
                    progress.num_missing_tokens,
                    self._nothing,
                    is_after_break=not self._has_breaks or opens(self._bytes_of(token_id)),
                )
                break
            progress = self._decided(progress, goes_on=self._goes_on(token_id))
        for before, begun in reversed(going_on):
            found = self._progress(
                before.missing,
                before.num_missing_tokens,
                begun,
                is_after_break=before.is_after_break,
                settled=found,
            )
        return found

    def _continued(self, progress: Progress, token_id: int) -> _Beginning | None:
        """Returns what a target has begun with one more token, if that goes on with what it has begun."""
        begun = self._longer(progress.begun).get(token_id)
        if begun is None:
            return None
        saved = self._saved(progress.missing, begun, is_after_break=progress.is_after_break)
        return None if saved is None else begun

    def _longer(self, begun: _Beginning) -> dict[int, _Beginning]:
        """Returns a beginning with one more token, for each token that some spelling has there."""
        found = self._continuations.get(begun)
        if found is None:
            found = self._continuations[begun] = {}
            first, end, length = begun

            def next_id(each: tuple[int, Spelling]) -> int:
                ids = each[1].token_ids
                return ids[length] if len(ids) > length else -1

            while first < end:
                token_id = next_id(self._spellings[first])
                behind = bisect_right(self._spellings, token_id, first, end, key=next_id)
                if token_id >= 0:
                    found[token_id] = _Beginning(first, behind, length + 1)
                first = behind
        return found

    def _saved(self, missing: tuple[int, ...], begun: _Beginning, *, is_after_break: bool) -> int | None:
        """Returns how many of the tokens that write what is missing need not follow a beginning.

        It may be negative, because a spelling may be long. None if no missing term may begin so.
        """
        key = begun.first, begun.end
        ways = self._ways.get(key)
        if ways is None:
            ways = self._ways[key] = sorted(
                (
                    (self._costs[number] - len(spelling.token_ids), number, spelling.begins_after_break)
                    for number, spelling in self._spellings[begun.first : begun.end]
                ),
                reverse=True,
            )
        for saved, number, begins_after_break in ways:
            if missing[number] and (is_after_break or not begins_after_break):
                return saved + begun.length
        return None

    def _decided(self, progress: Progress, *, goes_on: bool) -> Progress:
        """Returns the progress of a target if what it has begun does not go on, before the next token.

        That token `goes_on` if it continues the last word.
        """
        number = self._ended(progress, goes_on=goes_on)
        if number is None:
            assert progress.settled is not None
            return progress.settled
        return self._progress(
            _without(progress.missing, number),
            progress.num_missing_tokens - self._costs[number],
            self._nothing,
            is_after_break=not self._has_breaks or opens(self._bytes_of(self.tail(progress)[-1])),
        )

    def _decisions(self, progress: Progress, *, goes_on: bool) -> list[Progress]:
        """Returns a progress, that which decides it, and so on, up to one that has begun nothing."""
        decisions = [progress]
        while decisions[-1].begun.length:
            decisions.append(self._decided(decisions[-1], goes_on=goes_on))
        return decisions

    def _decided_wholly(self, progress: Progress, *, goes_on: bool) -> Progress:
        """Returns the progress of a target if nothing of what it has begun goes on, before the next token."""
        return self._decisions(progress, goes_on=goes_on)[-1]

    def _ended(self, progress: Progress, *, goes_on: bool) -> int | None:
        """Returns the number of the term that a target has written whole if the next token does not go on."""
        begun, is_after_break = progress.begun, progress.is_after_break
        return self._whole(progress.missing, begun, is_after_break=is_after_break, goes_on=goes_on)

    def _progress(
        self,
        missing: tuple[int, ...],
        num_missing_tokens: int,
        begun: _Beginning,
        *,
        is_after_break: bool,
        settled: Progress | None = None,
    ) -> Progress:
        key = missing, begun, is_after_break
        found = self._known.get(key)
        if found is None:
            num_left, at_end, num_at_end = num_missing_tokens, missing, num_missing_tokens
            if settled is not None:
                number = self._whole(missing, begun, is_after_break=is_after_break)
                if number is None:
                    at_end, num_at_end = settled.at_end, settled.num_at_end
                else:
                    at_end, num_at_end = _without(missing, number), num_missing_tokens - self._costs[number]
                saved = self._saved(missing, begun, is_after_break=is_after_break) or 0
                num_left = min(num_missing_tokens - max(0, saved), num_at_end)
            found = self._known[key] = Progress(
                missing,
                begun,
                is_after_break,
                settled,
                num_missing_tokens,
                num_left,
                at_end,
                num_at_end,
            )
        return found

    def tail(self, progress: Progress) -> tuple[int, ...]:
        """Returns the tokens of what a target has begun."""
        first, _, length = progress.begun
        return self._spellings[first][1].token_ids[:length]

    def wanted(self, progress: Progress) -> dict[int, int]:
        """Returns the next tokens that begin a term or go on with it.

        With the fewest tokens that complete all terms after each of them.
        """
        if progress.wanted is None:
            progress.wanted = self._wanted(progress)
        return progress.wanted

    def _wanted(self, progress: Progress) -> dict[int, int]:
        wanted: dict[int, int] = {}
        if not progress.begun.length:
            for token_id, begun in self._longer(self._nothing).items():
                saved = self._saved(progress.missing, begun, is_after_break=progress.is_after_break)
                if saved is not None:
                    wanted[token_id] = progress.num_missing_tokens - max(0, saved)
            return wanted
        its: Progress | None = progress
        next_ids = dict[int, None]()  # of what it has begun, and of the ends of that
        while its is not None and its.begun.length:
            next_ids |= dict.fromkeys(self._longer(its.begun))
            its = its.settled
        other = self._decisions(progress, goes_on=False)
        going_on = self._decisions(progress, goes_on=True) if self._has_word_ends else other
        wanted |= self.wanted(other[-1])
        if going_on != other:
            wanted = {token_id: left for token_id, left in wanted.items() if not self._goes_on(token_id)}
            begins = self.wanted(going_on[-1])
            wanted |= {token_id: left for token_id, left in begins.items() if self._goes_on(token_id)}
        for token_id in next_ids:
            decisions = going_on if going_on != other and self._goes_on(token_id) else other
            num_left = self._left_after_term(decisions, token_id)
            if num_left is not None:
                wanted[token_id] = num_left
        return wanted

    def _left_after_term(self, decisions: list[Progress], token_id: int) -> int | None:
        """Returns `num_left` after a token of terms; None if the target has begun nothing then.

        The decisions are those of the progress before the token.
        """
        num_left, num_at_end = None, decisions[-1].num_missing_tokens
        for before in reversed(decisions):
            begun = self._longer(before.begun).get(token_id)
            if begun is None:
                continue
            missing, is_after_break = before.missing, before.is_after_break
            saved = self._saved(missing, begun, is_after_break=is_after_break)
            if saved is None:
                continue
            number = self._whole(missing, begun, is_after_break=is_after_break)
            if number is not None:
                num_at_end = before.num_missing_tokens - self._costs[number]
            num_left = min(before.num_missing_tokens - max(0, saved), num_at_end)
        return num_left

    def spoiling(
        self, progress: Progress, token_ids: list[int], next_ids: Callable[[], list[int]]
    ) -> list[int]:
        """Returns the places of those of some next tokens that spoil a target, as `spoils` has it."""
        last = token_ids[-1] if token_ids else None
        token = b"" if last is None else self._bytes_of(last)
        key = last if last in self._exact_after else None, admits_placeholder(token), ends_with_bracket(token)
        suspects = self._suspects.get(key)
        if suspects is None:
            marks = {each for each in self._bound if self._misplaced(token_ids, each)}
            ends = (self._exact_after.get(each, set()) for each in (None, key[0]))
            suspects = self._suspects[key] = frozenset(marks.union(*ends))
        number, must_break = self._exact_ended(progress)
        sides = None if number is None else self._sides(token_ids, progress.begun.length)
        is_any = self._first_repeated(progress) is not None
        if not (suspects or sides or is_any):
            return []
        places = list[int]()
        for place, token_id in enumerate(next_ids()):
            if is_any or token_id in suspects or (sides and token_id in self._ids):
                if self.spoils(progress, token_ids, token_id):
                    places.append(place)
            elif sides and self._is_beside(token_id, *sides, must_break=must_break):
                places.append(place)
        return places

    def spoils(self, progress: Progress, token_ids: list[int], token_id: int) -> bool:
        """Returns whether a token leaves the target with an exact term too often, or without its breaks.

        The term may stand again inside of a longer one that is missing, so a token that does not go on with
        that one leaves it, too.

        Args:
            progress: That of the target before it.
            token_ids: The same target.
            token_id: The token.
        """
        if self._is_glued(progress, token_ids, token_id):
            return True
        first, goes_on = self._first_repeated(progress), self._goes_on(token_id)
        ends = [
            (number, len(before), self._is_glued_to(spelling, token_ids))
            for number, before, spelling in self._exact_ending((*token_ids[-1:], token_id))
            if token_ids[len(token_ids) - len(before) :] == before
        ]
        if ends:
            missing = self._decided_wholly(progress, goes_on=goes_on).missing
            ends = [end for end in ends if end[2] or not missing[end[0]]]
        if first is None and not ends:
            return False
        after = self.advance(progress, token_id)
        num_decided = progress.begun.length + 1 - after.begun.length
        if first is not None and first < num_decided and self._ended(progress, goes_on=goes_on) is None:
            return True
        return any(
            (not after.missing[number] and length >= after.begun.length)
            or (is_glued and length + 1 >= after.begun.length)  # not inside of a longer one
            for number, length, is_glued in ends
        )

    def _exact_ending(self, token_ids: tuple[int, ...]) -> list[tuple[int, list[int], Spelling]]:
        """Returns what `_exact` has of the spellings that may end with the last of some tokens."""
        return [*self._exact.get(token_ids[-1:], ()), *self._exact.get(token_ids[-2:], ())]

    def _is_glued(self, progress: Progress, token_ids: list[int], token_id: int) -> bool:
        """Returns whether a token continues a word with an exact term, or an exact term with a word."""
        numbers = self._misplaced(token_ids, token_id)
        if any(progress.missing[number] for number in numbers) and not self._may_begin(
            progress, token_ids, token_id
        ):
            return True
        number, must_break = self._exact_ended(progress)
        if number is None or self._continued(progress, token_id) is not None:
            return False
        sides = self._sides(token_ids, progress.begun.length)
        return self._is_beside(token_id, *sides, must_break=must_break)

    def _misplaced(self, token_ids: list[int], token_id: int) -> list[int]:
        """Returns the numbers of the exact terms that begin with a token, but may not stand after a target.

        A word may go on with the letters that begin a term. So only terms that begin with a mark, or a space
        and a mark, are found at their first token, the others when they are whole.
        """
        bound, token = self._bound.get(token_id), self._bytes_of(token_id)
        if bound is None or not (token == b" " or begins_with_mark(token.removeprefix(b" "))):
            return []
        return [number for number, spelling in bound if not self._may_follow(spelling, token_ids)]

    def _exact_ended(self, progress: Progress) -> tuple[int | None, bool]:
        """Returns the exact term that a target ends with, and whether only a break may follow it."""
        if not progress.begun.length:
            return None, False
        if progress.ended is None:
            number = self._ended(progress, goes_on=False)
            is_exact = number is not None and self.terms[number].is_exact
            must_break = is_exact and self._ended(progress, goes_on=True) is None
            progress.ended = number if is_exact else None, must_break
        return progress.ended

    def _is_beside(self, token_id: int, before: str, term: str, *, must_break: bool) -> bool:
        """Returns whether a token after an exact term continues its last word, or makes it another."""
        token = self._bytes_of(token_id)
        if begins_inside(token):
            return must_break
        after = marked_beginning(token)
        return bool(after) and not stays(before, term, after)

    def _is_glued_to(self, spelling: Spelling, token_ids: list[int]) -> bool:
        """Returns whether an exact term may not be spelled so after a target, which may make it another.

        Args:
            spelling: Its tokens.
            token_ids: The target with all of them but the last one.
        """
        length = len(spelling.token_ids) - 1
        if not self._may_follow(spelling, token_ids, length):
            return True
        if length == len(token_ids) or self._bytes_of(spelling.token_ids[0])[:1].isspace():
            return False
        before, term = self._sides([*token_ids[-_MOST_BESIDE - length :], spelling.token_ids[-1]], length + 1)
        return bool(before) and not stays(before, term, "")

    def _sides(self, token_ids: list[int], length: int) -> tuple[str, str]:
        """Returns what is directly before the last tokens of a target, and the text of these."""
        term = b"".join(map(self._bytes_of, token_ids[-length:])).decode(errors="replace")
        if term[:1].isspace() or length == len(token_ids):
            return "", term.strip()
        before_ids = token_ids[-length - _MOST_BESIDE : -length]
        before = b"".join(map(self._bytes_of, before_ids)).decode(errors="replace")
        return "" if before[-1:].isspace() else "".join(before.split()[-1:]), term.strip()

    def _may_begin(self, progress: Progress, token_ids: list[int], token_id: int) -> bool:
        """Returns whether a token goes on with what a target has begun, or begins a term that fits."""
        if progress.begun.length and self._continued(progress, token_id) is not None:
            return True
        first, end, _ = self._longer(self._nothing)[token_id]
        return any(
            progress.missing[number] and self._may_follow(spelling, token_ids)
            for number, spelling in self._spellings[first:end]
        )

    def _may_follow(self, spelling: Spelling, token_ids: list[int], length: int = 0) -> bool:
        """Returns whether an exact term may be spelled so after a target without some last tokens."""
        if length == len(token_ids):
            return True
        token = self._bytes_of(token_ids[-length - 1])
        is_glued = spelling.begins_after_break and not admits_placeholder(token)
        return not is_glued and (spelling.follows_bracket or not ends_with_bracket(token))

    def _first_repeated(self, progress: Progress) -> int | None:
        """Returns where the first term that a target must not have again is in what it has begun."""
        length = progress.begun.length
        if progress.first_repeated is None:
            tail = list(self.tail(progress)) if length else []
            places = (
                place - len(before)
                for place, token_id in enumerate(tail)
                for number, before, _ in self._exact_ending((*tail[max(place - 1, 0) : place], token_id))
                if not progress.missing[number] and tail[max(place - len(before), 0) : place] == before
            )
            progress.first_repeated = min(places, default=length)
        return progress.first_repeated if progress.first_repeated < length else None

    def _bytes_of(self, token_id: int) -> bytes:
        return self.token_bytes[token_id] if token_id < len(self.token_bytes) else b""

    def _whole(
        self, missing: tuple[int, ...], begun: _Beginning, *, is_after_break: bool, goes_on: bool = False
    ) -> int | None:
        """Returns the number of the missing term that a beginning writes whole, if there is one.

        The next token `goes_on` if it continues the last word.
        """
        for place in range(begun.first, begun.end):
            number, spelling = self._spellings[place]
            if len(spelling.token_ids) > begun.length:
                break
            if not missing[number] or (goes_on and spelling.ends_before_break):
                continue
            if is_after_break or not spelling.begins_after_break:
                return number
        return None


def num_tokens(terms: Iterable[Term]) -> int:
    """Returns the fewest tokens that write some terms."""
    return sum(term.number * _cost(term) for term in terms)


def _without(missing: tuple[int, ...], number: int) -> tuple[int, ...]:
    return *missing[:number], missing[number] - 1, *missing[number + 1 :]


def _cost(term: Term) -> int:
    """Returns the fewest tokens that write a term at any place, if some spelling may stand there."""
    anywhere = [spelling for spelling in term.spellings if not spelling.begins_after_break]
    return min(len(spelling.token_ids) for spelling in anywhere or term.spellings)
