"""When text becomes stable: two decodings in a row agree about it, or enough sound follows it.

LocalAgreement-2 (Macháček et al. 2023, arXiv:2307.14743, section 3.1), over whole words in any spelling.
Where decodings are rare, as on a busy server, the next one would come late to confirm what was said long
before the end of the sound: such words are stable at once, as words are whose attention is not on the last
frames in AlignAtt (Papi et al. 2023, arXiv:2305.11408). Stable words are the forced prefix of the next
decoding here, so that it cannot contradict them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_NOT_SPOKEN = re.compile(r"[\W_]+")


class Heard(NamedTuple):
    """A word that a decoding wrote.

    Attributes:
        ids: Its tokens.
        text: With the space and the marks around it.
        is_followed: Whether so much sound follows it that more would hardly change it.
    """

    ids: tuple[int, ...]
    text: str
    is_followed: bool

    @property
    def spoken(self) -> str:
        """Its text without case and marks."""
        return _NOT_SPOKEN.sub("", self.text).casefold()


class Agreement:
    """Keeps the words that the last decoding wrote after the stable ones. Owned by a segment's `Progress`."""

    def __init__(self) -> None:
        self._before: Sequence[Heard] = ()

    def agreed(self, words: Sequence[Heard]) -> int:
        """Returns how many words are stable from now on, in the spelling of the new decoding.

        Args:
            words: Those after the stable ones, by a new decoding.
        """
        num_stable = 0
        for place, word in enumerate(words):
            is_repeated = place < len(self._before) and self._before[place].spoken == word.spoken
            if not is_repeated and not word.is_followed:
                break
            num_stable += 1
        self._before = words[num_stable:]
        return num_stable

    def doubt(self) -> None:
        """Forgets the last decoding: its text is not good."""
        self._before = ()

    @property
    def draft_ids(self) -> tuple[int, ...]:
        """The tokens of the last decoding after the stable ones."""
        return tuple(token_id for word in self._before for token_id in word.ids)
