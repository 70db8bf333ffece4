"""Which pairs of a corpus are not trained on, and how many each reason dropped."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from training.text_files import SentencePair

# Control characters that are no white space (those above 7F are the mark of a wrongly decoded Windows text),
# what decoders write for bytes that they did not understand, and what is no character.
_BROKEN = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\ufffd\ufffe\uffff]")

# Hardly any text of words has more a token. What has is not worth cutting: without spaces that takes long.
_MAX_TOKEN_CHARACTERS = 16

_REASONS = "empty", "broken characters", "copies", "too long", "length ratio", "duplicate"


@dataclass
class FilterReport:
    """How many pairs came, and how many each filter dropped. Owned by whoever applies the filters."""

    num_given: int = 0
    dropped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_REASONS, 0))

    @property
    def num_kept(self) -> int:
        """How many pairs are left."""
        return self.num_given - sum(self.dropped.values())

    def drop(self, reason: str, count: int = 1) -> None:
        """Count pairs that are not kept."""
        self.dropped[reason] += count

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

    def text_reason(self, pair: SentencePair) -> str | None:
        """Why a pair is dropped before it is cut into tokens, whatever the others are; None: it is not."""
        if not pair.source.strip() or not pair.target.strip():
            return "empty"
        if _BROKEN.search(pair.source) or _BROKEN.search(pair.target):
            return "broken characters"
        limits = self.max_source_length, self.max_target_length
        if any(len(text) > _MAX_TOKEN_CHARACTERS * limit for text, limit in zip(pair, limits, strict=True)):
            return "too long"
        return "copies" if self.are_copies_dropped and pair.source == pair.target else None

    def length_reason(self, source_length: int, target_length: int) -> str | None:
        """Why a pair of so many tokens is dropped, eos counted; None: it is not."""
        if source_length > self.max_source_length or target_length > self.max_target_length:
            return "too long"
        shorter, longer = sorted((source_length, target_length))
        is_uneven = self.max_length_ratio is not None and longer > self.max_length_ratio * shorter
        return "length ratio" if is_uneven else None
