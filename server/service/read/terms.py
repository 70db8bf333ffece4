"""Finds the terms and placeholders of a text, and requires their translations of its target."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from seq2seq_serve.bundle.normalization import is_blank
from seq2seq_serve.bundle.placeholders import placeholders
from seq2seq_serve.bundle.words import is_inside, needs_space, words
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateOptions
from seq2seq_serve.server.engine.request import Beam
from seq2seq_serve.server.engine.terms import RequiredTerms, Spelling, Term
from seq2seq_serve.server.errors import InvalidRequest
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.service.fair_thread import YieldPoint

_BEAM_SIZE = 5  # of a request that asks for none
_MAX_LENGTH = 256  # characters of a term
_MAX_FOUND = 64  # terms that occur in the source of a request
_WORDS_AT_ONCE = 512


@dataclass(slots=True)
class _Node:
    """What follows some words at the beginning of terms.

    Attributes:
        after: What follows one more word.
        targets: The targets of the terms that end here: by their words if case matters, otherwise by None.
    """

    after: dict[str, _Node] = field(default_factory=dict)
    targets: dict[tuple[str, ...] | None, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Required:
    """What the target of a text must have.

    Attributes:
        terms: What the tokenizer writes of it; None for nothing.
        texts: The text of each of them.
        unwritable: The placeholders that the tokenizer cannot write.
    """

    terms: RequiredTerms | None
    texts: tuple[str, ...]
    unwritable: tuple[str, ...]

    def missing(self, numbers: Iterable[int]) -> list[str]:
        """Returns the texts that a target lacks, from `Hypothesis.missing`."""
        return [text for text, number in zip(self.texts, numbers, strict=False) if number] + [
            *self.unwritable
        ]


class Glossary:
    """The terms of a message, and whether placeholders are kept. It does not change.

    Args:
        options: The options of the message.
        model: The model that it names.

    Attributes:
        beam: The search of a target with terms, if the message does not ask for one.

    Raises:
        InvalidRequest: A term is empty or too long, has two translations, or cannot be written.
    """

    def __init__(self, options: GenerateOptions, model: ServedModel) -> None:
        defaults, size = model.manifest.generation, max(options.num_hypotheses, _BEAM_SIZE)
        self.beam = Beam(
            min(size, model.sizing.num_slots),
            defaults.length_penalty,
            defaults.length_penalty_formula,
            defaults.early_stopping,
        )
        self._tokenizer, self._keeps = model.target_tokenizer, options.keep_placeholders
        self._root = _Node()
        for place, term in enumerate(options.terms):
            for name, text in (("source", term.source), ("target", term.target)):
                if len(text) > _MAX_LENGTH or is_blank(text):
                    raise InvalidRequest(
                        f"the {name} of a term has {len(text)} characters: send 1 to {_MAX_LENGTH}, some of "
                        "them visible",
                        field=f"options.terms[{place}].{name}",
                    )
            node, its_words = self._root, tuple(words(term.source))
            for word in its_words:
                node = node.after.setdefault(word.casefold(), _Node())
            other = node.targets.setdefault(its_words if term.case_sensitive else None, term.target)
            if other != term.target:
                raise InvalidRequest(
                    f"the term {term.source!r} has two translations, {other!r} and {term.target!r}: send one",
                    field=f"options.terms[{place}].target",
                )
        targets = list(dict.fromkeys(term.target for term in options.terms))
        self._spellings = dict(zip(targets, self._written(targets), strict=True))
        for place, term in enumerate(options.terms):
            if not self._spellings[term.target]:
                raise InvalidRequest(
                    f"{model.name} cannot write the target {term.target!r} of a term with its tokens: leave "
                    "the term out, or spell it in another way",
                    field=f"options.terms[{place}].target",
                )

    def required(self, text: str, checkpoint: YieldPoint) -> Required | None:
        """Returns what the target of a text must have; None for nothing.

        Args:
            text: A whole source, or one of its sentences.
            checkpoint: Is called before some of its words; an error that it raises ends the work.
        """
        targets, kept = self._found(text, checkpoint)
        texts = [*dict.fromkeys((*targets, *kept))]
        if not texts:
            return None
        others = [one for one in texts if one not in self._spellings]
        spellings = self._spellings | dict(zip(others, self._written(others), strict=True))
        writable = tuple(one for one in texts if spellings[one])
        terms = [Term(spellings[one], targets[one] + kept[one], is_exact=one in kept) for one in writable]
        required = RequiredTerms(terms, self._tokenizer.token_bytes) if terms else None
        return Required(required, writable, tuple(one for one in texts if not spellings[one]))

    def check_number(self, text: str, field: str, checkpoint: YieldPoint) -> None:
        """Refuses a source, whose field is given, in which too many terms occur."""
        targets, _ = self._found(text, checkpoint)
        if len(targets) > _MAX_FOUND:
            raise InvalidRequest(
                f"the source has {len(targets)} terms, and at most {_MAX_FOUND} can be required: send a "
                "shorter source, or fewer terms",
                field=field,
            )

    def _written(self, texts: Sequence[str]) -> list[tuple[Spelling, ...]]:
        """Returns how each of some texts is written; in no way if the tokenizer cannot."""
        table = self._tokenizer.token_bytes
        return [
            tuple(
                Spelling(
                    ids,
                    begins_after_break=needs_space(text) and not table[ids[0]].startswith(b" "),
                    ends_before_break=is_inside(text.rstrip()[-1:]),
                )
                for ids in ways
            )
            for text, ways in zip(texts, self._tokenizer.spellings(texts) if texts else [], strict=True)
        ]

    def _found(self, text: str, checkpoint: YieldPoint) -> tuple[Counter[str], Counter[str]]:
        """Returns the targets of the terms in a text, and its placeholders, with their numbers.

        No term is inside of a placeholder.
        """
        targets, kept, begin = Counter[str](), Counter[str](), 0
        for first, end in placeholders(text) if self._keeps else ():
            kept[text[first:end]] += 1
            targets.update(self._translated(text[begin:first], checkpoint))
            begin = end
        targets.update(self._translated(text[begin:], checkpoint))
        return targets, kept

    def _translated(self, text: str, checkpoint: YieldPoint) -> list[str]:
        """Returns the target of each place where a term occurs.

        Where terms overlap, the longest counts, and of equally long ones the first.
        """
        if not self._root.after:
            return []
        exact = words(text)
        folded = [word.casefold() for word in exact]
        is_taken = bytearray(len(exact))
        matches: list[tuple[int, int, str]] = []
        for begin in range(len(exact)):
            if not begin % _WORDS_AT_ONCE:
                checkpoint()
            matches += self._longest(exact, folded, begin, is_taken)
        heapq.heapify(matches)
        found: list[str] = []
        while matches:
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
        node: _Node | None = self._root
        found: list[tuple[int, int, str]] = []
        for end in range(begin, len(exact)):
            assert node is not None
            node = None if is_taken[end] else node.after.get(folded[end])
            if node is None:
                break
            if node.targets:
                target = node.targets.get(tuple(exact[begin : end + 1]), node.targets.get(None))
                if target is not None:
                    found = [(begin - end - 1, begin, target)]
        return found
