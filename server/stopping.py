"""Ends targets before the first of some stop sequences, wherever the borders of tokens are.

Stop sequences and tokens are compared as bytes. A stop sequence is text, and so is found in the bytes of a
target just where it is found in the target's text: bytes that are no character stand between characters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bundle.tokenizer import TextStream


class StopSequences:
    """Finds the first of some stop sequences that is complete.

    Immutable. It keeps nothing of a target: each row holds its own tail, the bytes that may begin a stop
    sequence, so that the children of a beam's hypothesis go on from the tail of their parent.

    Args:
        texts: None of them empty.
        token_bytes: The bytes of every token id; an unknown id adds none.
    """

    def __init__(self, texts: Iterable[str], token_bytes: Sequence[bytes]) -> None:
        self._stops = tuple(sorted((text.encode() for text in texts), key=len, reverse=True))
        self._num_kept = len(self._stops[0]) - 1
        self._token_bytes = token_bytes

    def advance(self, tail: bytes, token_id: int) -> bytes | None:
        """The tail after one more token, or None where a stop sequence is complete."""
        window = tail + self._token_bytes[token_id] if token_id < len(self._token_bytes) else tail
        if self.find(window, len(tail)) is not None:
            return None
        return window[max(len(window) - self._num_kept, 0) :]

    def find(self, data: bytes, num_searched: int) -> int | None:
        """Where the stop sequence begins that is complete first, after some bytes with none."""
        for end in range(num_searched + 1, len(data) + 1):
            if data.endswith(self._stops, 0, end):
                return end - next(len(stop) for stop in self._stops if data.endswith(stop, 0, end))
        return None

    def num_uncertain(self, data: bytes) -> int:
        """The length of the longest end of `data` that is the beginning of a stop sequence."""
        longest = min(self._num_kept, len(data))
        return next(
            (
                length
                for length in range(longest, 0, -1)
                if any(stop.startswith(data[-length:]) for stop in self._stops)
            ),
            0,
        )


class StoppedText:
    """Turns token ids into pieces of text, none of which is ever taken back.

    Owned by the handler that sends the pieces. Invariant: the pieces joined, `finish()` included, are the
    text before the stop sequence that is complete first.

    Args:
        stream: A fresh one.
        stops: None where nothing stops the text: then this is the stream itself.
        num_prefix: Tokens at the beginning in which stop sequences are not looked for.

    Attributes:
        is_stopped: Whether a stop sequence has come.
    """

    def __init__(self, stream: TextStream, stops: StopSequences | None, num_prefix: int) -> None:
        self.is_stopped = False
        self._stream = stream
        self._stops = stops
        self._num_prefix = num_prefix
        self._held = b""  # may be the beginning of a stop sequence

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now."""
        if self.is_stopped:
            return ""
        if self._stops is None:
            return self._stream.push(token_ids)
        prefix, rest = token_ids[: self._num_prefix], token_ids[self._num_prefix :]
        self._num_prefix -= len(prefix)
        num_searched = len(self._held)
        data = self._held + self._stream.bytes_of(rest)
        begin = self._stops.find(data, num_searched)
        self.is_stopped = begin is not None
        num_certain = len(data) - self._stops.num_uncertain(data) if begin is None else begin
        self._held = b"" if self.is_stopped else data[num_certain:]
        return self._stream.push(prefix) + self._stream.push_bytes(data[:num_certain])

    def finish(self) -> str:
        """What is left at the end."""
        return self._stream.push_bytes(self._held) + self._stream.finish()
