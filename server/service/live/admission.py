"""How many live streams a server takes: as many as it can decode in time."""

from __future__ import annotations

import time

from seq2seq_serve.server.errors import Overloaded
from seq2seq_serve.server.service.shares import Room, Shares

_NEWS = 1 / 8  # the weight of a decoding in the average
_MOST_SECONDS = 2.0  # of a decoding, its waiting included, beyond which text comes too late
_FORGOTTEN_SECONDS = 10.0  # after the last decoding, its time says nothing about the next one
_RETRY_SECONDS = 5.0
# A stream without sound for this time does not count, as nothing has to be decoded for it.
IDLE_SECONDS = 5.0


class LiveStreams:
    """The live streams of all callers. Owned by `Calls`; used on the event loop only.

    Args:
        most: The most of them, shared by the callers.
        interval_seconds: The new sound after which a stream is decoded again, unless its caller sets it.

    Attributes:
        interval_seconds: As given.
        open: The streams that sound comes from, by caller.
    """

    def __init__(self, most: int, interval_seconds: float) -> None:
        self.interval_seconds = interval_seconds
        self.open = Shares(most, "{} live streams are open")
        self._seconds = 0.0  # of a decoding, the average
        self._decoded_at = 0.0

    def admit(self, caller: str) -> Room:
        """Counts a stream, from its first sound on.

        Raises:
            Overloaded: There are too many, or with one more of them text would come too late.
        """
        num_open = self.open.held.total()
        is_known = time.monotonic() - self._decoded_at < _FORGOTTEN_SECONDS
        if num_open and is_known:
            expected = self._seconds * (num_open + 1) / num_open
            if expected > _MOST_SECONDS:
                raise Overloaded(
                    f"the {num_open} open live streams take what the server can decode in time: with one "
                    f"more, a decoding would take {expected:.1f} seconds",
                    retry_after_seconds=_RETRY_SECONDS,
                )
        return self.open.take(caller, 1, _RETRY_SECONDS)

    def record(self, seconds: float) -> None:
        """Counts the time of a decoding of an open segment, from its request to its result."""
        self._seconds += _NEWS * (seconds - self._seconds)
        self._decoded_at = time.monotonic()
