"""Which pairs of a corpus are not trained on, and how many each reason dropped."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from bundle.tokenizer import Tokenizer
from training.text_files import SentencePair

# Control characters that are no white space (those above 7F are the mark of a wrongly decoded Windows text),
# what decoders write for bytes that they did not understand, and what is no character.
_BROKEN = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\ufffd\ufffe\uffff]")

_REASONS = "empty", "broken characters", "duplicate", "too long", "length ratio", "untranslated"


@dataclass
class FilterReport:
    """How many pairs came, and how many each filter dropped. Owned by whoever applies the filters."""

    num_given: int = 0
    dropped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_REASONS, 0))

    @property
    def num_kept(self) -> int:
        """How many pairs are left."""
        return self.num_given - sum(self.dropped.values())

    def table(self) -> str:
        """The counts, a line each."""
        rows = [("pairs given", self.num_given)]
        rows += [(f"  dropped: {reason}", count) for reason, count in self.dropped.items()]
        rows.append(("pairs kept", self.num_kept))
        return "\n".join(f"{label:<32}{count:>10,}" for label, count in rows)


@dataclass(frozen=True)
class CorpusFilters:
    """Which pairs are not trained on. A pair counts for the first filter that it fails.

    Attributes:
        max_source_length: In tokens, with eos.
        max_target_length: In tokens, with eos.
        max_length_ratio: Tokens of the longer side over the other's; None keeps all.
        are_copies_dropped: Whether a pair is dropped whose source is its target.
    """

    max_source_length: int
    max_target_length: int
    max_length_ratio: float | None = None
    are_copies_dropped: bool = False

    def reason(self, pair: SentencePair, source_length: int, target_length: int) -> str | None:
        """Why a pair is dropped whatever the others are; None: it is not.

        Args:
            pair: The pair.
            source_length: Its tokens, with eos.
            target_length: Its tokens, with eos.
        """
        if not pair.source.strip() or not pair.target.strip():
            return "empty"
        if _BROKEN.search(pair.source) or _BROKEN.search(pair.target):
            return "broken characters"
        if source_length > self.max_source_length or target_length > self.max_target_length:
            return "too long"
        shorter, longer = sorted((source_length, target_length))
        if self.max_length_ratio is not None and longer > self.max_length_ratio * shorter:
            return "length ratio"
        if self.are_copies_dropped and pair.source == pair.target:
            return "untranslated"
        return None

    def apply(
        self, pairs: Collection[SentencePair], tokenizer: Tokenizer
    ) -> tuple[list[SentencePair], FilterReport]:
        """The pairs that pass, in their order, and what was dropped."""
        source_lengths = [len(ids) + 1 for ids in tokenizer.encode_batch([pair.source for pair in pairs])]
        target_lengths = [len(ids) + 1 for ids in tokenizer.encode_batch([pair.target for pair in pairs])]
        report = FilterReport(len(pairs))
        kept: dict[SentencePair, None] = {}
        for pair, *lengths in zip(pairs, source_lengths, target_lengths, strict=True):
            reason = "duplicate" if pair in kept else self.reason(pair, *lengths)
            if reason:
                report.dropped[reason] += 1
            else:
                kept[pair] = None
        return list(kept), report
