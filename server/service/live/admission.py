"""How many live streams a server takes: as many as it can decode in time. And whose turn it is."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

from seq2seq_serve.server.engine.async_engine import AsyncEngine
from seq2seq_serve.server.errors import Overloaded
from seq2seq_serve.server.service.shares import Room, Shares

_NEWS = 1 / 8  # the weight of a decoding in the average
_MOST_SECONDS = 2.0  # of a decoding, its waiting included, beyond which text comes too late
_FORGOTTEN_SECONDS = 10.0  # after the last decoding, its time says nothing about the next one
_RETRY_SECONDS = 5.0
_AT_ONCE_SECONDS = 0.1  # in which all segments are decoded that are decoded at once
_IDLE_SECONDS = 5.0  # without sound, after which a stream does not count: nothing is decoded for it


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
        self._decoded_at = -math.inf
        self._lines: WeakKeyDictionary[AsyncEngine, DecodingLine] = WeakKeyDictionary()

    def admit(self, caller: str) -> Room:
        """Counts a stream, from its first sound on.

        Raises:
            Overloaded: There are too many, or with one more of them text would come too late.
        """
        num_open = self.open.held.total()
        if num_open and self._is_known:
            expected = self._seconds * (num_open + 1) / num_open
            if expected > _MOST_SECONDS:
                raise Overloaded(
                    f"the {num_open} open live streams take what the server can decode in time: with one "
                    f"more, a decoding would take {expected:.1f} seconds",
                    retry_after_seconds=_RETRY_SECONDS,
                )
        return self.open.take(caller, 1, _RETRY_SECONDS)

    def record(self, seconds: float) -> None:
        """Counts the time of a decoding, from its request to its result."""
        self._seconds += (_NEWS if self._is_known else 1) * (seconds - self._seconds)
        self._decoded_at = time.monotonic()

    def line(self, engine: AsyncEngine) -> DecodingLine:
        """Returns the line in front of an engine."""
        if engine not in self._lines:
            self._lines[engine] = DecodingLine(len(engine.cores))
        return self._lines[engine]

    @property
    def _is_known(self) -> bool:
        """Whether the average says something about the next decoding."""
        return time.monotonic() - self._decoded_at < _FORGOTTEN_SECONDS


class DecodingLine:
    """Streams that wait for an engine before they take the sound that they decode.

    What is said while a request waits in the engine's own queue is only heard by the next one. As many
    segments are decoded at once as are decoded in a tenth of a second, one for each core at least: one on a
    CPU, where sounds are encoded one after the other, and many on a GPU, where they share the steps. Owned by
    `LiveStreams`.

    Args:
        num_cores: Of the engine.
    """

    def __init__(self, num_cores: int) -> None:
        self._least = self._most = num_cores
        self._places = asyncio.Semaphore(self._most)
        self._num_taken = 0
        self._seconds = 0.0  # in which one is decoded, the average

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Waits for the stream's turn; the place is given back at exit, when its segment is decoded."""
        await self._places.acquire()
        self._num_taken += 1
        began, num_at_once = time.monotonic(), self._num_taken
        try:
            yield
            self._record((time.monotonic() - began) / num_at_once)
        finally:
            self._num_taken -= 1
            wanted = round(_AT_ONCE_SECONDS / self._seconds) if self._seconds else self._least
            # At most one more or less, so that an exceptional decoding does not matter
            most = min(max(wanted, self._least, self._most - 1), self._most + 1)
            for _ in range(1 + most - self._most):
                self._places.release()
            self._most = most

    def _record(self, seconds: float) -> None:
        self._seconds += (_NEWS if self._seconds else 1) * (seconds - self._seconds)


class Presence:
    """The place of a stream among those that sound comes from. Owned by the stream.

    Args:
        streams: All of them.
        caller: The name of its caller.
    """

    def __init__(self, streams: LiveStreams, caller: str) -> None:
        self._streams, self._caller = streams, caller
        self._room: Room | None = None
        self._idle: asyncio.TimerHandle | None = None  # gives that back

    def come(self) -> None:
        """Counts the stream for some seconds, as sound has come; raises Overloaded at the first sound."""
        if self._idle is None:
            self._room = self._streams.admit(self._caller)
        elif self._room is None:
            self._room = self._streams.open.add(self._caller, 1)
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(_IDLE_SECONDS, self._leave)

    def end(self) -> None:
        """Gives the place back."""
        if self._idle is not None:
            self._idle.cancel()  # it would keep the stream in memory
        self._leave()

    def _leave(self) -> None:
        if self._room is not None:
            self._room.close()
            self._room = None
