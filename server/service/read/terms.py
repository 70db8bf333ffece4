"""Finds the terms and placeholders of a text, and requires their translations of its target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from seq2seq_serve.bundle.characters import is_blank
from seq2seq_serve.bundle.placeholders import (
    IN_PLACEHOLDERS,
    count_placeholders,
    is_after_space_in_bracket,
    placeholders,
    space_around,
)
from seq2seq_serve.bundle.terms import TermTable
from seq2seq_serve.bundle.words import MAX_TERM_LENGTH, is_inside, needs_space, phrase, words
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateOptions
from seq2seq_serve.server.engine.request import Beam
from seq2seq_serve.server.engine.terms import Spelling, Term
from seq2seq_serve.server.errors import InvalidRequest
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.service.fair_thread import YieldPoint

_BEAM_SIZE = 5  # of a request that asks for none
_MAX_FOUND = 64  # different terms and placeholders that occur in a source, or in a sentence of a split one
_TERMS_AT_ONCE = 16
_PLACEHOLDERS_AT_ONCE = 64
_LOOKED_THROUGH = 2**12  # characters of a text; the reading of a longer one costs more than its placeholders


class _Place(NamedTuple):
    """The breaks around a placeholder of a text.

    Attributes:
        before: As of `space_around`, like the next one.
        after: Whether it needs one after it.
        is_in_bracket: Whether it may have a space after an opening bracket.
    """

    before: bool | None
    after: bool
    is_in_bracket: bool


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

    def missing(self, numbers: Sequence[int], target: str) -> list[str]:
        """Returns the terms that a target lacks, and the placeholders that it has too rarely or too often.

        Its text decides about placeholders: the tokens beside one may make it another (`{{name}}`).

        Args:
            numbers: `Hypothesis.missing` of the target.
            target: Its text.
        """
        numbers = numbers or [0] * len(self.texts)
        lacking = [text for text, number in zip(self.texts, numbers, strict=True) if number]
        if self.kept is None:
            return lacking
        found = count_placeholders(target)
        changed = [one for one in dict.fromkeys((*self.kept, *found)) if self.kept[one] != found[one]]
        return [text for text in lacking if text not in self.kept] + changed


@final
class Glossary:
    """The terms of a message, and whether placeholders are kept. It does not change.

    Args:
        options: The options of the message.
        model: The model that it names.
        checkpoint: Is called before some of the terms; an error that it raises ends the work.

    Attributes:
        beam: The search of a target with terms, if the message does not ask for one.
        num_bytes: The memory that its terms take.

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
        exact, folded = dict[str, str](), dict[str, str]()  # by their words, and by these without case
        for place, term in enumerate(options.terms):
            if not place % _TERMS_AT_ONCE:
                checkpoint()
            for name, text in (("source", term.source), ("target", term.target)):
                if len(text) > MAX_TERM_LENGTH or is_blank(text):
                    raise InvalidRequest(
                        f"the {name} of term {place + 1} has {len(text)} characters: send 1 to "
                        f"{MAX_TERM_LENGTH}, some of them visible",
                        field=f"options.terms[{place}].{name}",
                    )
            key, target = phrase(words(term.source)), term.target.strip()
            if term.case_sensitive:
                known = exact.setdefault(key, target)
            else:
                known = folded.setdefault(key.casefold(), target)
            if known != target:
                raise InvalidRequest(
                    f"the term {term.source!r} has two translations, {known!r} and {target!r}: send one",
                    field=f"options.terms[{place}].target",
                )
        targets = list(dict.fromkeys(term.target.strip() for term in options.terms))
        is_written = dict(zip(targets, map(bool, self._written(targets, checkpoint)), strict=True))
        for place, term in enumerate(options.terms):
            if not is_written[term.target.strip()]:
                raise InvalidRequest(
                    f"{model.name} cannot write the target {term.target!r} of a term with its tokens: leave "
                    "the term out, or spell it in another way",
                    field=f"options.terms[{place}].target",
                )
        self._terms = TermTable(exact, folded)
        self.num_bytes = self._terms.num_bytes

    def num_found_bytes(self, num_characters: int) -> int:
        """Returns the largest size of the terms that are in a text of a length."""
        return min(self._num_bytes, self._most_bytes * min(num_characters, _MAX_FOUND))

    def num_placeholders(self, text: str) -> int:
        """Returns the largest number of placeholders that the beginning of a text may require."""
        if not self._keeps:
            return 0
        return min(sum(map(text[:_LOOKED_THROUGH].count, IN_PLACEHOLDERS)), _MAX_FOUND)

    def required(self, text: str, field: str, checkpoint: YieldPoint) -> Required | None:
        """Returns what the target of a text must have; None if it may have anything.

        Args:
            text: A whole source, or one of its sentences.
            field: That of the source.
            checkpoint: Is called before some of its words; an error that it raises ends the work.

        Raises:
            InvalidRequest: The text has too many terms and placeholders.
        """
        targets, kept = self._found(text, checkpoint)
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
        spellings = dict(zip(texts, self._written(texts, checkpoint), strict=True))
        writable = tuple(one for one in texts if spellings[one])
        terms = [
            Term(
                self._spaced(spellings[one], kept[one]) if one in kept else spellings[one],
                targets[one] + len(kept.get(one, ())),
                is_exact=one in kept,
            )
            for one in writable
        ]
        numbers = Counter({one: len(its) for one, its in kept.items()})
        for target, number in targets.items():
            for one in count_placeholders(target).elements():
                numbers[one] += number
        return Required(tuple(terms), writable, numbers if self._keeps else None)

    def _spaced(self, ways: Sequence[Spelling], places: Sequence[_Place]) -> tuple[Spelling, ...]:
        """Returns how a placeholder is written, by the breaks that it needs at each of its places."""
        before, after, is_in_bracket = zip(*places, strict=True)
        if all(one is None for one in before):
            ways = [each for each in ways if not self._begins_with_space(each)] or ways
        return tuple(
            Spelling(
                each.token_ids,
                begins_after_break=all(before) and not self._begins_with_space(each),
                ends_before_break=all(after),
                follows_bracket=any(is_in_bracket) or not self._begins_with_space(each),
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

    def _found(self, text: str, checkpoint: YieldPoint) -> tuple[Counter[str], dict[str, list[_Place]]]:
        """Returns the targets of the terms in a text with their numbers, and the places of its placeholders.

        No term is inside of a placeholder.
        """
        targets, kept, begin = Counter[str](), dict[str, list[_Place]](), 0

        def add_terms(part: str) -> None:
            if self._terms:
                targets.update(found.target for found in self._terms.find(words(part), checkpoint))

        for number, (first, end) in enumerate(placeholders(text) if self._keeps else ()):
            if not number % _PLACEHOLDERS_AT_ONCE:
                checkpoint()
            place = _Place(*space_around(text, first, end), is_after_space_in_bracket(text, first))
            kept.setdefault(text[first:end], []).append(place)
            add_terms(text[begin:first])
            begin = end
        add_terms(text[begin:])
        return targets, kept
