"""Finds the terms and placeholders of a text, and requires their translations of its target."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from seq2seq_serve.bundle.normalization import INVISIBLE, is_blank
from seq2seq_serve.bundle.placeholders import count_placeholders, placeholders, space_around
from seq2seq_serve.bundle.words import is_inside, needs_space, words
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateOptions
from seq2seq_serve.server.engine.request import Beam
from seq2seq_serve.server.engine.terms import Spelling, Term
from seq2seq_serve.server.errors import InvalidRequest
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.service.fair_thread import YieldPoint

_BEAM_SIZE = 5  # of a request that asks for none
_MAX_LENGTH = 256  # characters of a term
_MAX_FOUND = 64  # different terms and placeholders that occur in a source, or in a sentence of a split one
_WORDS_AT_ONCE = 64
_TERMS_AT_ONCE = 16


_WITHOUT_INVISIBLE = dict.fromkeys(map(ord, INVISIBLE))


@dataclass(slots=True)
class _Node:
    """A node of a trie of terms: the words on the way to it begin one or more terms.

    Attributes:
        after: What follows one more word.
        target: The target of the term that ends here; None if none does.
    """

    after: dict[str, _Node] = field(default_factory=dict)
    target: str | None = None


@dataclass(frozen=True)
class Required:
    """The terms and placeholders that the target of a text must have.

    Attributes:
        terms: What the tokenizer writes of it.
        texts: The text of each of them.
        kept: How often the target must have each placeholder, also those that the tokenizer cannot write;
            None if placeholders are not kept.
    """

    terms: tuple[Term, ...]
    texts: tuple[str, ...]
    kept: Counter[str] | None

    def missing(self, numbers: Iterable[int], target: str) -> list[str]:
        """Returns the terms that a target lacks, and the placeholders that it has too rarely or too often.

        Its text decides about placeholders: the tokens beside one may make it another (`{{name}}`).

        Args:
            numbers: `Hypothesis.missing` of the target.
            target: Its text.
        """
        lacking = [text for text, number in zip(self.texts, numbers, strict=False) if number]
        if self.kept is None:
            return lacking
        found = count_placeholders(target)
        changed = [one for one in dict.fromkeys((*self.kept, *found)) if self.kept[one] != found[one]]
        return [text for text in lacking if text not in self.kept] + changed


class Glossary:
    """The terms of a message, and whether placeholders are kept. It does not change.

    Args:
        options: The options of the message.
        model: The model that it names.
        checkpoint: Is called before some of the terms; an error that it raises ends the work.

    Attributes:
        beam: The search of a target with terms, if the message does not ask for one.

    Raises:
        InvalidRequest: A term is empty or too long, has two translations, or cannot be written.
    """

    def __init__(self, options: GenerateOptions, model: ServedModel, checkpoint: YieldPoint) -> None:
        defaults, size = model.manifest.generation, max(options.num_hypotheses, _BEAM_SIZE)
        self.beam = Beam(
            min(size, model.sizing.num_slots),
            defaults.length_penalty,
            defaults.length_penalty_formula,
            defaults.early_stopping,
        )
        self._num_bytes = sum(term.ByteSize() for term in options.terms)
        self._most_bytes = max((term.ByteSize() for term in options.terms), default=0)
        self._tokenizer, self._keeps = model.target_tokenizer, options.keep_placeholders
        self._exact, self._folded = _Node(), _Node()  # by their words, and by these without case
        for place, term in enumerate(options.terms):
            if not place % _TERMS_AT_ONCE:
                checkpoint()
            for name, text in (("source", term.source), ("target", term.target)):
                if len(text) > _MAX_LENGTH or is_blank(text):
                    raise InvalidRequest(
                        f"the {name} of a term has {len(text)} characters: send 1 to {_MAX_LENGTH}, some of "
                        "them visible",
                        field=f"options.terms[{place}].{name}",
                    )
            node, target = self._exact if term.case_sensitive else self._folded, term.target.strip()
            for word in _words(term.source):
                node = node.after.setdefault(word if term.case_sensitive else word.casefold(), _Node())
            if node.target not in (None, target):
                raise InvalidRequest(
                    f"the term {term.source!r} has two translations, {node.target!r} and {target!r}: "
                    "send one",
                    field=f"options.terms[{place}].target",
                )
            node.target = target
        targets = list(dict.fromkeys(term.target.strip() for term in options.terms))
        self._spellings = dict(zip(targets, self._written(targets, checkpoint), strict=True))
        for place, term in enumerate(options.terms):
            if not self._spellings[term.target.strip()]:
                raise InvalidRequest(
                    f"{model.name} cannot write the target {term.target!r} of a term with its tokens: leave "
                    "the term out, or spell it in another way",
                    field=f"options.terms[{place}].target",
                )

    def num_found_bytes(self, num_characters: int) -> int:
        """Returns the largest size of the terms that are in a text of a length."""
        return min(self._num_bytes, self._most_bytes * min(num_characters, _MAX_FOUND))

    def required(self, text: str, field: str, checkpoint: YieldPoint) -> Required | None:
        """Returns what the target of a text must have; None if it may have anything.

        Args:
            text: A whole source, or one of its sentences.
            field: That of the source.
            checkpoint: Is called before some of its words; an error that it raises ends the work.

        Raises:
            InvalidRequest: The text has too many terms and placeholders.
        """
        targets, places = self._found(text, checkpoint)
        kept = {one: [space_around(text, *place) for place in its] for one, its in places.items()}
        texts = [*dict.fromkeys((*targets, *kept))]
        if len(texts) > _MAX_FOUND:
            what = "terms and placeholders" if kept else "terms"
            raise InvalidRequest(
                f"the source has {len(texts)} {what}, and at most {_MAX_FOUND} can be required: send a "
                "shorter source, or fewer terms",
                field=field,
            )
        if not texts and not self._keeps:
            return None
        known = self._spellings
        others = [one for one in texts if one not in known]
        spellings = {one: known[one] for one in texts if one in known}
        spellings |= zip(others, self._written(others, checkpoint), strict=True)
        writable = tuple(one for one in texts if spellings[one])
        terms = [
            Term(
                self._spaced(spellings[one], kept[one]) if one in kept else spellings[one],
                targets[one] + len(kept.get(one, ())),
                is_exact=one in kept,
            )
            for one in writable
        ]
        numbers = Counter({one: len(its) for one, its in places.items()})
        for target, number in targets.items():
            for one in count_placeholders(target).elements():
                numbers[one] += number
        return Required(tuple(terms), writable, numbers if self._keeps else None)

    def _spaced(
        self, ways: Sequence[Spelling], spaces: Sequence[tuple[bool | None, bool]]
    ) -> tuple[Spelling, ...]:
        """Returns how a placeholder is written, by the breaks that it needs at each of its places."""
        before, after = [each[0] for each in spaces], [each[1] for each in spaces]
        if all(one is None for one in before):
            ways = [each for each in ways if not self._begins_with_space(each)] or ways
        return tuple(
            Spelling(
                each.token_ids,
                begins_after_break=all(before) and not self._begins_with_space(each),
                ends_before_break=all(after),
            )
            for each in ways
        )

    def _begins_with_space(self, spelling: Spelling) -> bool:
        table, first = self._tokenizer.token_bytes, spelling.token_ids[0]
        return first < len(table) and table[first].startswith(b" ")

    def _written(self, texts: Sequence[str], checkpoint: YieldPoint) -> list[tuple[Spelling, ...]]:
        """Returns how each of some texts is written; in no way if the tokenizer cannot."""
        written = list[tuple[Spelling, ...]]()
        for begin in range(0, len(texts), _TERMS_AT_ONCE):
            checkpoint()
            some = texts[begin : begin + _TERMS_AT_ONCE]
            for text, ways in zip(some, self._tokenizer.spellings(some), strict=True):
                needs_break, is_word = needs_space(text), is_inside(text.rstrip()[-1:])
                each = [Spelling(ids, ends_before_break=is_word) for ids in ways]
                written.append(
                    tuple(
                        one._replace(begins_after_break=needs_break and not self._begins_with_space(one))
                        for one in each
                    )
                )
        return written

    def _found(
        self, text: str, checkpoint: YieldPoint
    ) -> tuple[Counter[str], dict[str, list[tuple[int, int]]]]:
        """Returns the targets of the terms in a text with their numbers, and the places of its placeholders.

        No term is inside of a placeholder.
        """
        targets, kept, begin = Counter[str](), dict[str, list[tuple[int, int]]](), 0
        for first, end in placeholders(text) if self._keeps else ():
            kept.setdefault(text[first:end], []).append((first, end))
            targets.update(self._translated(text[begin:first], checkpoint))
            begin = end
        targets.update(self._translated(text[begin:], checkpoint))
        return targets, kept

    def _translated(self, text: str, checkpoint: YieldPoint) -> list[str]:
        """Returns the target of each place where a term occurs.

        Where terms overlap, the longest counts, and of equally long ones the first.
        """
        if not self._exact.after and not self._folded.after:
            return []
        exact = _words(text)
        folded = [word.casefold() for word in exact]
        is_taken = bytearray(len(exact))
        matches: list[tuple[int, int, str]] = []
        for begin in range(len(exact)):
            if not begin % _WORDS_AT_ONCE:
                checkpoint()
            matches += self._longest(exact, folded, begin, is_taken)
        heapq.heapify(matches)
        found: list[str] = []
        for number in count():
            if not matches:
                break
            if not number % _WORDS_AT_ONCE:
                checkpoint()
            minus_length, begin, target = heapq.heappop(matches)
            if any(is_taken[begin : begin - minus_length]):
                for match in self._longest(exact, folded, begin, is_taken):
                    heapq.heappush(matches, match)
                continue
            is_taken[begin : begin - minus_length] = b"\1" * -minus_length
            found.append(target)
        return found

    def _longest(
        self, exact: list[str], folded: list[str], begin: int, is_taken: bytearray
    ) -> list[tuple[int, int, str]]:
        """Returns the longest term at a place, before the next taken word, if there is one.

        It is minus its length, its place, and its target.
        """
        longest, found = 0, list[tuple[int, int, str]]()
        for root, its_words in ((self._exact, exact), (self._folded, folded)):
            node: _Node | None = root
            for place in range(begin, len(exact)):
                assert node is not None
                node = None if is_taken[place] else node.after.get(its_words[place])
                if node is None:
                    break
                length = place + 1 - begin
                if node.target is not None and length > longest:
                    longest, found = length, [(-length, begin, node.target)]
        return found


def _words(text: str) -> list[str]:
    return words(text.translate(_WITHOUT_INVISIBLE))
