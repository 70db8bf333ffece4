"""The page `/v1/realtime`: opens, counts and ends the WebSocket of a session.

Where it differs from OpenAI's is said in docs/speech.md.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from starlette.requests import HTTPConnection
from starlette.routing import WebSocketRoute
from starlette.types import Receive, Scope, Send

from seq2seq_serve.server.config import OpenAINames
from seq2seq_serve.server.errors import InvalidRequest, Unavailable
from seq2seq_serve.server.service.arrivals import SHUTTING_DOWN
from seq2seq_serve.server.service.calls import Calls, RemoteCall
from seq2seq_serve.server.service.openai import check_model, error_content, named_model
from seq2seq_serve.server.service.realtime.session import Session
from seq2seq_serve.server.service.realtime.settings import Settings
from seq2seq_serve.server.service.realtime.socket import Inbox, Outbox
from seq2seq_serve.server.service.rest import error_response, peer_of
from seq2seq_serve.server.service.shares import Shares
from seq2seq_serve.server.service.status import REQUEST_ID

PATH = "/v1/realtime"
_SERVICE, _METHOD = "http", "Transcribe"
_RIGHT = f"/seq2seq.v1.Seq2Seq/{_METHOD}"
_INTENT = "transcription"
# Sessions, or as many as there may be live streams, if those are more. A session may have a message of 4 MiB
# that is not complete, and one that waits.
_MOST_SESSIONS = 64
# Subprotocols: what is spoken, the caller's token, and the older form of the API
_REALTIME, _TOKEN, _OLDER = "realtime", "openai-insecure-api-key.", "openai-beta."
_OLDER_HEADER = "openai-beta"
# Codes of WebSockets
_GOING_AWAY, _INTERNAL_ERROR = 1001, 1011


class RealtimePage:
    """Owned by the app; used on the event loop only.

    Args:
        calls: Opens and counts the sessions.
        names: Which names of models are known.
    """

    def __init__(self, calls: Calls, names: OpenAINames) -> None:
        self._calls, self._names = calls, names
        self._open = Shares(max(_MOST_SESSIONS, calls.live.open.limit), "{} sessions are open")

    def route(self) -> WebSocketRoute:
        """Returns its route."""
        return WebSocketRoute(PATH, self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection, calls = HTTPConnection(scope), self._calls
        protocols: list[str] = scope["subprotocols"]
        metadata = tuple(connection.headers.items())
        for name in protocols:
            if name.startswith(_TOKEN) and "authorization" not in connection.headers:
                metadata += (("authorization", f"Bearer {name.removeprefix(_TOKEN)}"),)
        call = calls.open(
            _SERVICE,
            _METHOD,
            metadata=metadata,
            peer=peer_of(connection),
            remaining_seconds=None,
            write=_write_nothing,
        )
        has_opened = False

        async def work() -> None:
            nonlocal has_opened
            calls.access.check(_RIGHT, call.caller)
            if call.refusal is not None:
                raise call.refusal
            settings = await self._settings(connection, call)
            call.held.append(self._open.take(call.caller.name, 1))
            calls.let_last(call)
            calls.live.admit(call.caller.name).close()  # the first sound is counted
            await receive()  # the wish to connect, which is the first message
            has_opened = True
            accept: dict[str, Any] = {"type": "websocket.accept", "subprotocol": None}
            if _REALTIME in protocols:
                accept["subprotocol"] = _REALTIME
            await send(accept | {"headers": [(REQUEST_ID.encode(), call.request_id.encode())]})
            is_older = _OLDER_HEADER in connection.headers or any(one.startswith(_OLDER) for one in protocols)
            make = partial(Session, call, self._names, settings, is_older=is_older)
            await _hold(make, receive, send, scope["state"]["left"])

        try:
            try:
                outcome = await calls.run(call, work())
            finally:
                calls.close_call(call)
            if isinstance(outcome, Exception):
                if has_opened:
                    is_drained = isinstance(outcome, Unavailable) and calls.is_draining
                    code = _GOING_AWAY if is_drained else _INTERNAL_ERROR
                    reason = SHUTTING_DOWN if is_drained else error_content(outcome)["error"]["message"][:100]
                    await send({"type": "websocket.close", "code": code, "reason": reason})
                else:
                    response = error_response(outcome, error_content(outcome))
                    response.headers[REQUEST_ID] = call.request_id
                    await response(scope, receive, send)
        except (asyncio.CancelledError, OSError):  # the caller has left
            return
        finally:
            calls.let_go(call)

    async def _settings(self, connection: HTTPConnection, call: RemoteCall) -> Settings:
        """Returns the settings that the query has.

        Raises:
            ServerError: The model cannot be used, or another kind of session is asked for.
        """
        query = connection.query_params
        if (intent := query.get("intent", _INTENT)) != _INTENT:
            raise InvalidRequest(
                f"intent is {intent[:100]!r}, and must be {_INTENT}: there are no other sessions",
                field="intent",
            )
        name = query.get("model", "")
        if name:
            async with call.calls.models.use(call, named_model(name, call, self._names)) as model:
                check_model(model, "transcribe", call)
        return Settings(model=name)


async def _hold(make: partial[Session], receive: Receive, send: Send, left: asyncio.Future[bool]) -> None:
    """Holds a session until the caller leaves.

    Args:
        make: Makes it.
        receive: Returns the next message of the socket.
        send: Sends a message.
        left: Whether the caller has closed the socket as it should, once it has left.

    Raises:
        CancelledError: The caller has left without closing the socket.
        Unavailable: The server drains; all events were sent.
    """
    inbox, outbox = Inbox(receive), Outbox(send)
    running = asyncio.create_task(make(inbox=inbox, outbox=outbox).run())
    filling, emptying = asyncio.create_task(inbox.fill()), asyncio.create_task(outbox.empty())
    flushing: asyncio.Task[None] | None = None
    ends: set[asyncio.Future[Any]] = {emptying, left}
    try:
        await asyncio.wait({running, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            flushing = asyncio.create_task(outbox.flush())
            await asyncio.wait({flushing, *ends}, return_when=asyncio.FIRST_COMPLETED)
            running.result()
        if not (left.done() and left.result()):
            raise asyncio.CancelledError
    finally:
        tasks = [task for task in (running, filling, emptying, flushing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _write_nothing(_message: object) -> None:
    raise AssertionError("a session has events of its own")
