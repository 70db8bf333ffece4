"""Finds stop sequences in targets, also where they begin or end inside a token.

Stop sequences and tokens are compared as bytes. A stop sequence is valid UTF-8, so its bytes match only at
the borders of characters, which are the places where the target's text contains it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_SOUGHT_BYTES = 4  # of the beginning of a stop sequence, which most texts have at few places


class StopSequences:
    """Finds the stop sequence that is complete first.

    It stores nothing about targets: each row holds its own tail, the last bytes, which may begin a
    stop sequence. The children of a beam's hypothesis continue from the tail of their parent.

    Args:
        texts: The stop sequences; none is empty.
        token_bytes: The bytes of each token, by its id; an id beyond the end has no bytes.

    Attributes:
        token_bytes: The same; whoever unpickles stop sequences sets it, because each process has the table.
    """

    def __init__(self, texts: Iterable[str], token_bytes: tuple[bytes, ...]) -> None:
        self._stops = tuple(sorted((text.encode() for text in texts), key=len, reverse=True))
        self._num_kept = len(self._stops[0]) - 1
        self.token_bytes = token_bytes

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"token_bytes": ()}

    def advance(self, tail: bytes, token_id: int) -> bytes | None:
        """Returns the tail after one more token, or None if a stop sequence is complete."""
        window = tail + self.token_bytes[token_id] if token_id < len(self.token_bytes) else tail
        for end in range(len(tail) + 1, len(window) + 1):  # few: faster than a search for each sequence
            if window.endswith(self._stops, 0, end):
                return None
        return window[max(len(window) - self._num_kept, 0) :]

    def find(self, data: bytes, num_searched: int) -> int | None:
        """Returns where the first complete stop sequence begins; it ends after `num_searched` bytes."""
        begins = ((data.find(stop, max(num_searched + 1 - len(stop), 0)), stop) for stop in self._stops)
        # Of those that end at the same place, the longest
        first = min(((begin + len(stop), begin) for begin, stop in begins if begin >= 0), default=None)
        return None if first is None else first[1]

    def num_uncertain(self, data: bytes) -> int:
        """Returns how many bytes at the end of `data` may begin a stop sequence."""
        return max(_num_begun(data, stop) for stop in self._stops)


def _num_begun(data: bytes, stop: bytes) -> int:
    """Returns how many bytes at the end of `data` begin a stop sequence, which is longer."""
    if data[-2:] not in stop:  # so that it is not more than one byte
        return int(data[-1:] == stop[:1] != stop)
    begin = max(len(data) - len(stop) + 1, 0)
    while (begin := data.find(stop[:_SOUGHT_BYTES], begin)) >= 0:
        if stop.startswith(data[begin:]):
            return len(data) - begin
        begin += 1
    longest = min(len(data), len(stop) - 1, _SOUGHT_BYTES - 1)
    return next((length for length in range(longest, 0, -1) if data.endswith(stop[:length])), 0)
