"""The two directions of a WebSocket, each with a bound."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from typing import Any

from starlette.types import Receive, Send

_MOST_AHEAD_BYTES = 2**16  # of messages that wait beside the last one
_MOST_EVENTS = 64  # that wait to be sent, beyond which nobody adds one who can wait


class Inbox:
    """Reads the messages of a caller, a few of them ahead. Owned by its call.

    Args:
        receive: Returns the next message of the socket.

    Attributes:
        is_over: Whether no message is needed any more: what comes is thrown away.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages = deque[bytes]()
        self._num_bytes = 0
        self._changed = asyncio.Condition()
        self.is_over = False

    async def fill(self) -> None:
        """Reads until the caller leaves."""
        while (message := await self._receive())["type"] != "websocket.disconnect":
            content: bytes = message.get("bytes") or b""
            async with self._changed:
                await self._changed.wait_for(lambda: self.is_over or self._num_bytes <= _MOST_AHEAD_BYTES)
                if not self.is_over:
                    self._messages.append(content)
                    self._num_bytes += len(content)
                    self._changed.notify_all()

    async def end(self) -> None:
        """Throws away what comes from now on."""
        async with self._changed:
            self.is_over = True
            self._changed.notify_all()

    def __aiter__(self) -> Inbox:
        return self

    async def __anext__(self) -> bytes:
        async with self._changed:
            await self._changed.wait_for(lambda: self._messages)
            message = self._messages.popleft()
            self._num_bytes -= len(message)
            self._changed.notify_all()
            return message


class Outbox:
    """The events for a caller. Owned by its call.

    Args:
        send: Sends a message, as soon as the socket has room for it.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._events = asyncio.Queue[dict[str, Any]]()
        self._has_room = asyncio.Event()
        self._has_room.set()

    def put(self, event: dict[str, Any]) -> None:
        """Adds an event, however many wait."""
        self._events.put_nowait(event)
        if self._events.qsize() > _MOST_EVENTS:
            self._has_room.clear()

    async def room(self) -> None:
        """Waits until few events wait."""
        await self._has_room.wait()

    async def flush(self) -> None:
        """Waits until all events are sent."""
        await self._events.join()

    async def empty(self) -> None:
        """Sends the events, for ever; raises OSError once the caller has left."""
        while True:
            text = json.dumps(await self._events.get(), ensure_ascii=False)
            await self._send({"type": "websocket.send", "text": text})
            self._events.task_done()
            if self._events.qsize() <= _MOST_EVENTS:
                self._has_room.set()
