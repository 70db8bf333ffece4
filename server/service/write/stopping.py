"""The text of a target, which ends before a stop sequence."""

from __future__ import annotations

from collections.abc import Sequence

from seq2seq_serve.bundle.tokenizer import TextStream
from seq2seq_serve.server.engine.stops import StopSequences


class StoppedText:
    """Turns token ids into pieces of text that stay valid whatever tokens follow.

    Owned by the handler that sends the pieces. Invariant: all pieces, joined with the text of `finish()`, are
    the text before the stop sequence that is complete first.

    Args:
        stream: A new stream of the target tokenizer.
        stops: The stop sequences; None for none.
        num_prefix: The number of tokens at the beginning that are not searched for stop sequences.

    Attributes:
        is_stopped: Whether a stop sequence is complete.
        text: All pieces so far, joined.
    """

    def __init__(self, stream: TextStream, stops: StopSequences | None, num_prefix: int) -> None:
        self.is_stopped = False
        self.text = ""
        self._stream = stream
        self._stops = stops
        self._num_prefix = num_prefix
        self._held = b""  # may be the beginning of a stop sequence

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that is certain with these tokens."""
        piece = self._stream.push(token_ids) if self._stops is None else self._push(token_ids, self._stops)
        self.text += piece
        return piece

    def finish(self) -> str:
        """Returns the rest of the text after the last token."""
        rest = self._stream.push_bytes(self._held) + self._stream.finish()
        self.text += rest
        return rest

    def _push(self, token_ids: Sequence[int], stops: StopSequences) -> str:
        if self.is_stopped:
            return ""
        prefix, rest = token_ids[: self._num_prefix], token_ids[self._num_prefix :]
        self._num_prefix -= len(prefix)
        num_searched = len(self._held)
        data = self._held + self._stream.bytes_of(rest)
        begin = stops.find(data, num_searched)
        self.is_stopped = begin is not None
        num_certain = len(data) - stops.num_uncertain(data) if begin is None else begin
        self._held = b"" if self.is_stopped else data[num_certain:]
        return self._stream.push(prefix) + self._stream.push_bytes(data[:num_certain])
