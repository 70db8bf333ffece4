"""The filters that drop pairs of a corpus before training, and the report of how many each one dropped."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from seq2seq_serve.training.data.sources import TOKENS
from seq2seq_serve.training.data.text_files import SentencePair

# Control characters that are not white space (those above 7F mark a wrongly decoded Windows text), the
# character that decoders write for unknown bytes, and code points that are not characters.
_BROKEN = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\ufffd\ufffe\uffff]")

_REASONS = "empty", "broken characters", "copies", "too long", "length ratio", "duplicate"


@dataclass
class FilterReport:
    """Counts the pairs given and the pairs that each filter dropped. Owned by the caller of the filters."""

    num_given: int = 0
    dropped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_REASONS, 0))

    @property
    def num_kept(self) -> int:
        return self.num_given - sum(self.dropped.values())

    def drop(self, reason: str, count: int = 1) -> None:
        self.dropped[reason] += count

    def table(self) -> str:
        """The counts, one per line."""
        rows = [("pairs given", self.num_given)]
        rows += [(f"  dropped: {reason}", count) for reason, count in self.dropped.items()]
        rows.append(("pairs kept", self.num_kept))
        return "\n".join(f"{label:<32}{count:>10,}" for label, count in rows)


@dataclass(frozen=True)
class CorpusFilters:
    """The limits of pairs; lengths are in tokens with eos. A pair counts for the first filter that it fails.

    Attributes:
        max_length_ratio: Tokens of the longer side divided by those of the other; None keeps all pairs.
        are_copies_dropped: Whether pairs with equal source and target are dropped.
        max_characters: The most characters of a source per unit of its length; None for names of files.
    """

    max_source_length: int
    max_target_length: int
    max_length_ratio: float | None = None
    are_copies_dropped: bool = False
    max_characters: int | None = TOKENS.max_characters

    def text_reason(self, pair: SentencePair) -> str | None:
        """Why a pair is dropped before it is cut into tokens; None keeps it."""
        if not pair.source.strip() or not pair.target.strip():
            return "empty"
        if _BROKEN.search(pair.source) or _BROKEN.search(pair.target):
            return "broken characters"
        source_limit = (
            math.inf if self.max_characters is None else self.max_characters * self.max_source_length
        )
        target_limit = TOKENS.max_characters * self.max_target_length
        if len(pair.source) > source_limit or len(pair.target) > target_limit:
            return "too long"
        return "copies" if self.are_copies_dropped and pair.source == pair.target else None

    def length_reason(self, source_length: int, target_length: int) -> str | None:
        """Why a pair of these lengths is dropped; None keeps it."""
        if not source_length:
            return "empty"  # a question without a story
        if source_length > self.max_source_length or target_length > self.max_target_length:
            return "too long"
        shorter, longer = sorted((source_length, target_length))
        is_uneven = self.max_length_ratio is not None and longer > self.max_length_ratio * shorter
        return "length ratio" if is_uneven else None
