"""Counts the targets of a command that a reader should correct, by what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from seq2seq_serve.bundle.placeholders import is_kept, is_placeholder
from seq2seq_serve.client.files.glossary import TermFinder
from seq2seq_serve.client.output import length_advice, one_line
from seq2seq_serve.client.rpcs import Translated
from seq2seq_serve.documents.segments import with_tags
from seq2seq_serve.protos.seq2seq_v1_pb2 import FINISH_REASON_LENGTH, GenerateOptions, GenerateResponse

_SHOWN_TERMS = 10  # that targets lack, and placeholders that are not as in their sources
_MANY_TRANSLATIONS = 3  # in sources, which may be there by chance if they are fewer


@dataclass
class _Texts:
    """Some texts.

    Attributes:
        number: How many they are.
        first: The file and the number of the first one.
    """

    number: int = 0
    first: tuple[str, int] = ("", 0)

    def add(self, other: _Texts) -> None:
        """Adds texts that follow these."""
        self.first = self.first if self.number else other.first
        self.number += other.number


@dataclass
class Flaws:
    """Counts of flawed targets, by their flaws. Owned by a command, or by one shard of its work."""

    _at_limit: _Texts = field(default_factory=_Texts)
    _incomplete: _Texts = field(default_factory=_Texts)
    _changed: _Texts = field(default_factory=_Texts)  # other placeholders
    _truncated: _Texts = field(default_factory=_Texts)
    _reversed: _Texts = field(default_factory=_Texts)  # with translations of terms
    _missing: dict[str, None] = field(default_factory=dict)  # terms of incomplete targets
    _different: dict[str, None] = field(default_factory=dict)  # placeholders of changed ones
    _translations: dict[str, None] = field(default_factory=dict)  # of terms, in sources
    _has_terms: bool = False  # in a source
    _num_left_out: int = 0  # tokens of truncated sources

    def add(self, file: str, number: int, result: Translated, *, keeps_placeholders: bool) -> None:
        """Counts the flaws of a target, also of one of a memory.

        Args:
            file: The name of the file of the text.
            number: The number of the text in it.
            result: The target.
            keeps_placeholders: Whether it has to have those of its source.
        """
        if isinstance(result.source, str) and not _has_alignment(result.answer):
            result = replace(result, source=with_tags(result.source))
        self.add_limits(file, number, result.answer)
        best = result.answer.hypotheses[:1] if keeps_placeholders else ()
        for one in best:
            is_counted = any(map(is_placeholder, one.missing_terms))
            if not is_counted and not is_kept(str(result.source), one.text):
                self._changed.add(_Texts(1, (file, number)))

    def add_limits(self, file: str, number: int, answer: GenerateResponse) -> None:
        """Counts what an answer says: a length limit, terms and placeholders that are wrong, truncation."""
        one = _Texts(1, (file, number))
        if any(hypothesis.finish_reason == FINISH_REASON_LENGTH for hypothesis in answer.hypotheses):
            self._at_limit.add(one)
        names = [term for best in answer.hypotheses[:1] for term in best.missing_terms]
        if different := list(filter(is_placeholder, names)):
            self._changed.add(one)
            self._different |= dict.fromkeys(different)
        if missing := [name for name in names if name not in different]:
            self._incomplete.add(one)
            self._missing |= dict.fromkeys(missing)
        if num_tokens := answer.usage.truncated_source_tokens:
            self._truncated.add(one)
            self._num_left_out += num_tokens

    def add_terms(self, file: str, number: int, text: str, finder: TermFinder) -> None:
        """Counts a text with translations of terms, as long as no text has a term."""
        if self._has_terms:
            return
        terms, translations = finder.find(text)
        self._has_terms = bool(terms)
        if translations:
            self._reversed.add(_Texts(1, (file, number)))
            self._translations |= dict.fromkeys(translations)

    def merge(self, other: Flaws) -> None:
        """Adds the flaws of other texts."""
        for its, others in zip(self._texts(), other._texts(), strict=True):
            its.add(others)
        self._missing |= other._missing
        self._different |= other._different
        self._translations |= other._translations
        self._has_terms |= other._has_terms
        self._num_left_out += other._num_left_out

    def warnings(self, options: GenerateOptions) -> Iterator[tuple[str, int, int, str]]:
        """Yields for each flaw the file and number of its first text, the number of others, and a message."""
        missing, different, translations = (
            ", ".join(map(one_line, list(names)[:_SHOWN_TERMS]))
            for names in (self._missing, self._different, self._translations)
        )
        are_few = len(self._translations) < min(_MANY_TRANSLATIONS, len(options.terms))
        problems = (
            "the target ended at its length limit: it may repeat itself or lack its end "
            f"({length_advice(options)})",
            f"the target lacks terms that it has to have: {missing}",
            "the target has other placeholders than the source, or a tag not around a text: correct it"
            + f" ({different})" * bool(different),
            f"the source is too long, and {self._num_left_out} tokens at its end were left out "
            "(--long-source split_always translates each sentence of a source with several)",
            f"the source has translations of terms ({translations}), and no source has a term: exchange them "
            "if they are in the wrong order",
        )
        for texts, problem in zip(self._texts(), problems, strict=True):
            if texts.number and not (texts is self._reversed and (self._has_terms or are_few)):
                yield (*texts.first, texts.number - 1, problem)

    def _texts(self) -> tuple[_Texts, ...]:
        return self._at_limit, self._incomplete, self._changed, self._truncated, self._reversed


def _has_alignment(answer: GenerateResponse) -> bool:
    """Whether an answer says which words belong together, so that its text was sent without tags."""
    parts = answer.sentences or [answer]
    return any(one.HasField("word_alignment") for part in parts for one in part.hypotheses)
