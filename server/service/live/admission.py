"""How many live streams a server takes, as many as it can decode in time, and in which order it decodes."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from seq2seq_serve.server.engine.async_engine import AsyncEngine
from seq2seq_serve.server.errors import Overloaded
from seq2seq_serve.server.service.shares import Room, Shares

_NEWS = 1 / 8  # the weight of a decoding in the average
_MOST_SECONDS = 2.0  # of a decoding, its waiting included, beyond which text comes too late
_FORGOTTEN_SECONDS = 10.0  # after the last decoding, its time says nothing about the next one
_RETRY_SECONDS = 5.0
_AT_ONCE_SECONDS = 0.1  # in which segments that share the engine are decoded
_LEAST_SECONDS = 1e-3
_MOST_SERVED = 1000  # callers
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


@dataclass(eq=False)
class _Waiter:
    """A stream in the line.

    Attributes:
        caller: The name of its caller.
        priority: As for requests: the lowest goes first.
        number: Its place by arrival.
        turn: Is done when it is the stream's turn.
    """

    caller: str
    priority: float
    number: int
    turn: asyncio.Future[None]


class DecodingLine:
    """Streams that wait for an engine before they take the sound that they decode.

    A request that waits in the engine's queue has the sound of the moment at which it was made, so what is
    said while it waits would be decoded one round later. The line lets as many streams decode at once as end
    in a tenth of a second, and at least one for each core: one on a CPU, which encodes the sounds one after
    the other, and many on a GPU, where they share the steps. As in the queue, the lowest priority goes first,
    and callers of one priority take turns. Owned by `LiveStreams`.

    Args:
        num_cores: Of the engine.
    """

    def __init__(self, num_cores: int) -> None:
        self._least = self._most = num_cores
        self._num_taken = 0
        self._waiting: list[_Waiter] = []
        self._numbers = itertools.count()
        self._served: dict[str, int] = {}  # the number of each caller's last turn, the oldest first
        self._seconds = 0.0  # in which one is decoded, the average

    @asynccontextmanager
    async def place(self, caller: str, priority: float) -> AsyncIterator[None]:
        """Waits for the stream's turn; its place is free again at exit."""
        waiter = _Waiter(caller, priority, next(self._numbers), asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._serve()
        try:
            await waiter.turn
            yield
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            else:
                self._num_taken -= 1
                self._serve()

    def record(self, seconds: float) -> None:
        """Counts the time of a decoding in a place; how many there are follows the average."""
        seconds /= max(self._num_taken, 1)
        self._seconds += (_NEWS if self._seconds else 1) * (seconds - self._seconds)
        wanted = round(_AT_ONCE_SECONDS / max(self._seconds, _LEAST_SECONDS))
        self._most = max(min(wanted, self._most + 1), self._least)

    def _serve(self) -> None:
        """Gives the free places to those whose turn it is."""
        while self._waiting and self._num_taken < self._most:
            first = min(
                self._waiting,
                key=lambda each: (each.priority, self._served.get(each.caller, -1), each.number),
            )
            self._waiting.remove(first)
            self._served.pop(first.caller, None)
            self._served[first.caller] = next(self._numbers)
            if len(self._served) > _MOST_SERVED:
                del self._served[next(iter(self._served))]
            self._num_taken += 1
            if not first.turn.done():
                first.turn.set_result(None)


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
