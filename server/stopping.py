"""A growing text that ends before the first of some stop sequences, wherever tokens have their borders."""

from __future__ import annotations

from collections.abc import Sequence

from bundle.tokenizer import TextStream


class StoppedText:
    """Turns token ids into pieces of text, none of which is ever taken back.

    Owned by who follows one target: the engine, which asks whether it has come to its end, and the handler,
    which sends the pieces. Invariant: the pieces joined, `finish()` included, are the text before the first
    stop sequence.

    Args:
        stream: A fresh one.
        stop_sequences: None of them empty; without any, this is the stream itself.
        num_prefix: Tokens at the beginning in which stop sequences are not looked for.

    Attributes:
        is_stopped: Whether a stop sequence has come.
    """

    def __init__(self, stream: TextStream, stop_sequences: Sequence[str], num_prefix: int) -> None:
        self.is_stopped = False
        self._stream = stream
        self._stop_sequences = stop_sequences
        self._num_prefix = num_prefix
        self._held = ""  # may be the beginning of a stop sequence

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now."""
        if self.is_stopped:
            return ""
        if not self._stop_sequences:
            return self._stream.push(token_ids)
        prefix, rest = token_ids[: self._num_prefix], token_ids[self._num_prefix :]
        self._num_prefix -= len(prefix)
        text = self._stream.push(prefix) if prefix else ""
        self._held += self._stream.push(rest)
        return text + self._release(is_final=False)

    def stops_with(self, token_id: int) -> bool:
        """Push one more token, and say whether it completed a stop sequence."""
        self.push([token_id])
        return self.is_stopped

    def finish(self) -> str:
        """What is left at the end."""
        if self.is_stopped:
            return ""
        self._held += self._stream.finish()
        return self._release(is_final=True)

    def _release(self, *, is_final: bool) -> str:
        held = self._held
        places = [place for stop in self._stop_sequences if (place := held.find(stop)) >= 0]
        if places:
            self.is_stopped = True
            return held[: min(places)]
        num_kept = 0 if is_final else self._num_uncertain()
        self._held = held[len(held) - num_kept :]
        return held[: len(held) - num_kept]

    def _num_uncertain(self) -> int:
        """The length of the longest end that is the beginning of a stop sequence."""
        longest = max(map(len, self._stop_sequences), default=1) - 1
        return next(
            (
                length
                for length in range(min(longest, len(self._held)), 0, -1)
                if any(stop.startswith(self._held[-length:]) for stop in self._stop_sequences)
            ),
            0,
        )
