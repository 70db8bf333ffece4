"""When text becomes stable: two decodings in a row agree about it.

LocalAgreement-2 (Macháček et al. 2023, arXiv:2307.14743, section 3.1), over whole words. Stable words are the
forced prefix of the next decoding here, so that it cannot contradict them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

Ids = tuple[int, ...]  # of one word


class Agreement:
    """Keeps the words that the last decoding wrote after the stable ones. Owned by a segment's `Progress`."""

    def __init__(self) -> None:
        self._before: Sequence[Ids] = ()

    def agreed(self, words: Sequence[Ids]) -> int:
        """Returns how many words are stable from now on, as the last two decodings begin with them.

        Args:
            words: The tokens of each word after the stable ones, by a new decoding.
        """
        pairs = zip(self._before, words, strict=False)
        num_stable = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._before = words[num_stable:]
        return num_stable

    def doubt(self) -> None:
        """Forgets the last decoding: its text is not good."""
        self._before = ()

    @property
    def draft_ids(self) -> Ids:
        """The tokens of the last decoding after the stable ones."""
        return tuple(token_id for word in self._before for token_id in word)
