"""The messages of unary calls that are on their way: how many of them take memory at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from grpc import aio

from seq2seq_serve.server.errors import InvalidRequest, Overloaded, TooLarge, Unavailable
from seq2seq_serve.server.service.shares import Room, Shares

_PROMPT_SECONDS = 0.02  # a message that was sent together with its call comes within this time
_LATE_SECONDS = 0.5  # for which a message is waited for although too many are late
_MESSAGE_SECONDS, _DRAINING_SECONDS = 30.0, 1.0  # for a caller to send a message
_LEAVING_SECONDS = 0.1
SHUTTING_DOWN = "the server is shutting down"


@dataclass(eq=False)
class _Places:
    """The places of a caller. The newest call that waits gets the next one: it may have its message."""

    num_free: int
    waiting: dict[asyncio.Future[None], None] = field(default_factory=dict)

    async def turn(self) -> None:
        """Waits for a place."""
        turn = asyncio.get_running_loop().create_future()
        self.waiting[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            self.waiting.pop(turn, None)
            if turn.done() and not turn.cancelled():
                self.pass_on()
            raise

    def pass_on(self) -> None:
        """Gives a place to a call that waits, or back."""
        while self.waiting:
            turn, _ = self.waiting.popitem()
            if not turn.done():
                turn.set_result(None)
                return
        self.num_free += 1


@dataclass(eq=False)
class _Arrival:
    """A message that a call has asked for.

    Attributes:
        limit: Ends the waiting.
        places: It has one of them; None before, and once it is late.
        late: Its share of the late ones.
        timer: Ends its time in its place.
        refusal: Why it is not waited for any longer.
    """

    caller: str
    limit: asyncio.Timeout
    places: _Places | None = None
    late: Room | None = None
    timer: asyncio.TimerHandle | None = None
    refusal: Overloaded | None = None


class Arrivals:
    """Receives the messages of unary calls, and bounds how many are received at once.

    gRPC keeps all that has come of a message for which a call has asked, and cannot tell how much that is. So
    a call asks when one of its caller's places is free, and has it only for the moment that a message takes
    that was sent together with its call. A message that has not come by then is late, and takes no place.
    If too many are late, it keeps its place for a while, as it may have waited for this server, and is
    refused then. Those that are late already are not refused in its stead: callers who come again would
    otherwise end each other's long messages before any of them is complete.

    Owned by `Calls`; used on the event loop only.

    Args:
        most_bytes: The longest message.
        most_prompt: The places of each caller.
        most_late: The late messages, shared by the callers.
    """

    def __init__(self, most_bytes: int, most_prompt: int, most_late: int) -> None:
        self._most_bytes = most_bytes
        self._most_prompt = most_prompt
        self._places = WeakValueDictionary[str, _Places]()
        self._late = Shares(most_late, "{} messages have not come in time")
        self._limits = set[asyncio.Timeout]()
        self._is_draining = False

    async def only_message(self, receive: Callable[[], Awaitable[Any]], caller: str) -> bytes:
        """Returns the only message of a unary call. Messages after it are not read.

        Args:
            receive: Returns the call's next message; `aio.EOF` without one.
            caller: The name of its caller.

        Raises:
            InvalidRequest: The call has no message, or a longer one, or it does not come in time.
            Overloaded: The message is late, as are too many others.
            Unavailable: The server drains.
        """
        loop = asyncio.get_running_loop()
        places = self._places.setdefault(caller, _Places(self._most_prompt))
        limit = asyncio.timeout(_DRAINING_SECONDS if self._is_draining else None)
        arrival = _Arrival(caller, limit)
        try:
            async with limit:
                self._limits.add(limit)
                if places.num_free:
                    places.num_free -= 1
                else:
                    await places.turn()
                arrival.places = places
                arrival.timer = loop.call_later(_PROMPT_SECONDS, self._be_late, arrival)
                message = await receive()
        except TimeoutError:
            if arrival.refusal is not None:
                raise arrival.refusal from None
            if self._is_draining:
                raise Unavailable(SHUTTING_DOWN) from None
            raise InvalidRequest(
                f"the message did not arrive within {_MESSAGE_SECONDS:g} seconds", field=""
            ) from None
        finally:
            self._limits.discard(limit)
            if arrival.timer is not None:
                arrival.timer.cancel()
            if arrival.late is not None:
                arrival.late.close()
            elif places.waiting and arrival.places is not None:
                places.pass_on()
            elif arrival.places is not None:
                places.num_free += 1
            del arrival  # the frames of a refusal refer to it
        if message is aio.EOF:
            await asyncio.sleep(_LEAVING_SECONDS)  # gRPC ends the messages before it cancels the handler
            raise InvalidRequest("the call must have a message", field="")
        if len(message) > self._most_bytes:
            raise TooLarge(
                f"the message has {len(message)} bytes, and this method takes at most {self._most_bytes}",
                field="",
            )
        received: bytes = message
        return received

    def drain(self) -> None:
        """Ends the calls that wait for their message."""
        self._is_draining = True
        for limit in self._limits:
            end_now(limit)

    def _be_late(self, arrival: _Arrival, *, is_last: bool = False) -> None:
        """Counts a message that has not come in time as late, which frees its place, or refuses it."""
        assert arrival.places is not None
        loop = asyncio.get_running_loop()
        try:
            arrival.late = self._late.take(arrival.caller, 1)
        except Overloaded as error:
            if is_last:
                arrival.refusal = error
                end_now(arrival.limit)
            else:
                arrival.timer = loop.call_later(_LATE_SECONDS, partial(self._be_late, arrival, is_last=True))
            return
        arrival.places.pass_on()
        arrival.places = None
        if not arrival.limit.expired() and not self._is_draining:
            arrival.limit.reschedule(loop.time() + _MESSAGE_SECONDS - _PROMPT_SECONDS)


def end_now(limit: asyncio.Timeout) -> None:
    """Ends a block with `asyncio.timeout`, unless it ends already."""
    if not limit.expired():
        limit.reschedule(asyncio.get_running_loop().time())
