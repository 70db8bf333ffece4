"""The HTTP port: /metrics for Prometheus, /healthz and /readyz for orchestrators, and routes for callers.

It is on the server's one event loop, so a probe without an answer shows that the loop does not turn.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import select
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import h11
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import Frame
from websockets.http11 import Request as OpeningRequest

from seq2seq_serve.origins import is_address, named_host, own_names

_MAX_CONNECTIONS = 512
_SILENT_SECONDS = 5  # a client has to send something, or a connection without a request is closed
_BACKLOG = 4096  # a burst of new connections, as the gRPC port takes it; the system may allow fewer
_MAX_HEADER_BYTES = 2**16
# A body may have the first number of chunks, and one more for each of these bytes.
_FREE_CHUNKS, _LEAST_CHUNK_BYTES = 1000, 256
# A connection is closed after a body of this length; pages refuse what is longer than their own limits.
_MAX_BODY_BYTES = 2**26
_LINGER_SECONDS = 1.0  # for a client to stop sending after a refusal
MAX_MESSAGE_BYTES = 2**22  # of a WebSocket; a longer message closes it
# A message may have the first number of frames, and one more for each of these bytes.
_FREE_FRAMES, _LEAST_FRAME_BYTES = 1000, 256
_READ_BYTES = 2**14  # of a WebSocket at once: its frames are parsed in one turn of the event loop
# What the system receives ahead. Clients' own pings come after it, and have to be answered in time.
_AHEAD_BYTES = 2**16
_LOOK_SECONDS = 0.5  # between two looks whether a client that is not read has left
_GONE = select.POLLHUP | getattr(select, "POLLRDHUP", 0)
_PING_SECONDS = 20.0  # between pings, and for a client to answer one
_CLOSE_SECONDS, _POLL_SECONDS = 3.0, 0.01  # for the callers to take their answers
_PROBES = ("/healthz", "/readyz")  # a load balancer may send any name as `Host`
_KEPT_SECONDS = 1.0  # how long scrapes get the same text
_REST = 4  # after a text was written, times the seconds that this took, before the next one
_PACE_SECONDS = 0.005  # between two answers to scrapes

Probe = Callable[[], str | None]


@dataclass(frozen=True)
class ErrorForm:
    """The form of the errors of a protocol's pages.

    Attributes:
        paths: The paths of the pages, and the first parts of the paths of others.
        content: Returns the body of a refusal from its text, code and reason.
        hint: What to send in place of a request for an unknown page.
    """

    paths: Collection[str]
    content: Callable[[str, str, str], dict[str, Any]]
    hint: str


def error_content(text: str, code: str, reason: str) -> dict[str, Any]:
    """Returns the body of a refusal, as that of an error of this server's own pages."""
    return {"error": text, "code": code, "reason": reason}


class _Refusals:
    """Writes the answers to requests that reach no call, in the form of the page that the path belongs to.

    Args:
        forms: The forms.
    """

    def __init__(self, forms: Sequence[ErrorForm]) -> None:
        self._forms = forms

    def form_of(self, path: str) -> ErrorForm | None:
        """Returns the form of a page, known or not; None if the path belongs to no protocol."""
        for form in self._forms:
            if any(path == one or path.startswith(f"{one}/") for one in form.paths):
                return form
        return None

    def answer(self, path: str, status: int, code: str, reason: str, text: str) -> JSONResponse:
        """Returns the answer to a request for a path."""
        form = self.form_of(path)
        content = error_content if form is None else form.content
        return JSONResponse(content(text, code, reason), status)


class _Parser(h11.Connection):
    """Bounds the bodies of requests, also those that their pages do not read, and what reading them takes.

    A chunk of a body (`Transfer-Encoding`) takes ten microseconds, however short it is. A body that also has
    a length may hide another request.

    Attributes:
        problem: Why it has refused a request, if the reason is one of its own.
        path: The path of the last request.
    """

    problem = path = ""
    _num_bytes = _num_chunks = 0  # of the body

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_bytes = self._num_chunks = 0
            self.path = event.target.decode("ascii").partition("?")[0]
            names = {name for name, _ in event.headers}
            if {b"transfer-encoding", b"content-length"} <= names:
                self._refuse("the body has both Content-Length and Transfer-Encoding: send one of them")
        elif isinstance(event, h11.Data):
            self._num_bytes += len(event.data)
            self._num_chunks += event.chunk_start
            if self._num_chunks > _FREE_CHUNKS + self._num_bytes // _LEAST_CHUNK_BYTES:
                self._refuse(
                    f"the body has {self._num_chunks} chunks in {self._num_bytes} bytes: send larger chunks"
                )
            if self._num_bytes > _MAX_BODY_BYTES:
                self._refuse(f"the body has more than {_MAX_BODY_BYTES} bytes: send less")
        return event

    def _refuse(self, problem: str) -> NoReturn:
        self.problem = problem
        raise h11.RemoteProtocolError(problem)


class _Socket(WebSocketsSansIOProtocol, asyncio.BufferedProtocol):
    """A WebSocket, after the request that opens it. All its messages are bytes.

    A client is read no further while its messages wait, or while it does not take the answers. It is alive
    while anything comes from it. Otherwise it must answer a ping, once it is read.

    Attributes:
        left: Whether the client has closed the socket as it should, once it has left; the page finds it in
            the state of its scope.
    """

    is_busy = True

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any]) -> None:
        super().__init__(config, server_state, app_state)
        self._buffer = bytearray(_READ_BYTES)
        self._num_bytes = 0  # of the message so far
        self._heard_at = self._full_at = 0.0
        self.left: asyncio.Future[bool] = self.loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.opened = self.loop.time()
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _AHEAD_BYTES)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._leave(False)

    def handle_connect(self, event: OpeningRequest) -> None:
        super().handle_connect(event)
        if not self.close_sent:
            self.scope["state"]["left"] = self.left

    def handle_close(self, event: Frame) -> None:
        super().handle_close(event)
        self._leave(True)

    def handle_parser_exception(self) -> None:
        super().handle_parser_exception()
        self._leave(False)

    def _leave(self, is_closed: bool) -> None:
        if not self.left.done():
            self.left.set_result(is_closed)
            self.loop.call_later(_LINGER_SECONDS, self.transport.abort)

    def _look(self) -> None:
        """Sees also that a client has left of which nothing is read."""
        if self.left.done():
            return
        if self.read_paused and _GONE:
            poll = select.poll()
            poll.register(self.transport.get_extra_info("socket").fileno(), _GONE)
            if poll.poll(0):
                self.transport.abort()
        self.loop.call_later(_LOOK_SECONDS, self._look)

    @property
    def client_host(self) -> str:
        """The address of the other end."""
        return self.client[0] if self.client else ""

    def get_buffer(self, _sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        self._heard_at = self.loop.time()
        super().data_received(data)
        if not self.handshake_initiated:  # the library cannot read a request that h11 has read
            self.transport.write(
                b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            )
            self.transport.close()

    def handle_text(self, event: Frame) -> None:
        self.handle_bytes(event)

    def handle_cont(self, event: Frame) -> None:
        if self.close_sent:
            return
        self._num_bytes += len(event.data)
        if len(self.frames) > _FREE_FRAMES + self._num_bytes // _LEAST_FRAME_BYTES:
            self.conn.fail(1009, "the message has too many frames: send longer ones")
            self.handle_parser_exception()
            return
        super().handle_cont(event)

    def handle_bytes(self, event: Frame) -> None:
        self._num_bytes = len(event.data)
        super().handle_bytes(event)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._full_at = self.loop.time()
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.read_paused:
            self.transport.resume_reading()

    async def receive(self) -> Any:
        await self.writable.wait()  # otherwise a client that takes nothing could cause pongs without end
        return await super().receive()

    async def send(self, message: Any) -> None:
        if message["type"] == "websocket.send" and self.transport.is_closing():
            raise ClientDisconnected  # uvicorn sees it in a later turn of the loop
        await super().send(message)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True  # or uvicorn (0.54) logs an error for each refused caller
        if message["type"] == "websocket.close":
            self.loop.call_later(self.close_timeout, self.transport.abort)

    def keepalive_timeout(self) -> None:
        if self.writable.is_set():
            is_alive = self.read_paused or self._heard_at >= self.ping_sent_at
        else:
            is_alive = self.loop.time() - self._full_at < _PING_SECONDS
        if is_alive:
            self.pending_ping_payload = None
            self.schedule_ping()
            return
        super().keepalive_timeout()
        self._leave(False)


class _Connection(H11Protocol):
    """Closes itself if it is silent. Beyond a limit a new one closes one of the client that has most.

    Only requests for `sockets` become WebSockets.
    """

    def __init__(
        self, config: Config, state: ServerState, refusals: _Refusals, sockets: Collection[str]
    ) -> None:
        super().__init__(config, state, {})
        self.conn: _Parser = _Parser(h11.SERVER, _MAX_HEADER_BYTES)
        self._refusals = refusals
        self._sockets = sockets
        self._is_refused = self._is_socket = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.opened = self.loop.time()
        self._close_if_silent()
        if len(self.connections) > _MAX_CONNECTIONS:
            others = [
                one for one in self.connections if isinstance(one, (_Connection, _Socket)) and one is not self
            ]
            counts = Counter(other.client_host for other in others)
            worst = min(others, key=lambda one: (-counts[one.client_host], one.is_busy, one.opened))
            worst.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        if not self._is_socket:
            self._close_if_silent()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._is_socket = True
        super().handle_websocket_upgrade(event)

    def _should_upgrade_to_ws(self) -> bool:
        return self.conn.path in self._sockets

    def send_400_response(self, msg: str) -> None:
        """Refuses bytes that are not a request, and closes the connection.

        What the client sends meanwhile is thrown away for a moment: it would lose the answer otherwise.
        """
        self._is_refused = True
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # the page answers already
            self.transport.close()
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        answer = self._refusals.answer(
            self.conn.path, 400, "INVALID_ARGUMENT", "INVALID_REQUEST", self.conn.problem or msg
        )
        headers = [*answer.raw_headers, (b"connection", b"close")]
        for event in (
            h11.Response(status_code=400, headers=headers),
            h11.Data(data=bytes(answer.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(_LINGER_SECONDS, self.transport.close)

    @property
    def client_host(self) -> str:
        """The address of the other end."""
        return self.client[0] if self.client else ""

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _close_if_silent(self) -> None:
        if not self.is_busy and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )


class _Guard:
    """Refuses requests of web pages in a browser, which would use its user's way to the server.

    A page of another site sends its own `Origin`. It may also point a name of its own here (DNS rebinding),
    but not an address. Requests without `Origin` may have any name as `Host`, unless the server listens for
    its own machine only.

    Args:
        host: The address that the server listens on.
        origins: Other sites whose pages are answered.
        refusals: Writes the refusals.
    """

    def __init__(self, app: ASGIApp, host: str, origins: Collection[str], refusals: _Refusals) -> None:
        self._app = app
        self._refusals = refusals
        self._origins = origins
        self._names = own_names(host)
        self._is_local = host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        is_allowed = headers.get("origin") in self._origins
        is_answered = is_allowed or scope["path"] in _PROBES or self._is_own(headers)
        text = "pages of other sites, and foreign names as Host, may not be used with this server"
        if is_answered:
            await self._app(scope, receive, send)
        else:
            answer = self._refusals.answer(scope["path"], 403, "PERMISSION_DENIED", "FORBIDDEN", text)
            await answer(scope, receive, send)

    def _is_own(self, headers: Headers) -> bool:
        name = named_host(headers)
        return name is not None and (
            name in self._names
            or is_address(name)
            or ("origin" not in headers and not (self._is_local and name))
        )


class _Scrapes:
    """Answers /metrics, so that any number of scrapes takes a small part of the processor from callers.

    Owned by the server. One scrape is answered at a time. Its text is kept for a second, and texts in other
    forms are written in a fifth of the time at most.

    Args:
        registry: The metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._turn = asyncio.Lock()
        self._kept: dict[str, tuple[bytes, float]] = {}  # a text and its end, by the media type
        self._rested_at = 0.0

    async def answer(self, request: Request) -> Response:
        """Answers with all metrics, in the form that the request accepts."""
        loop = asyncio.get_running_loop()
        try:
            encode, media_type = choose_encoder(request.headers.get("accept", ""))
        except TypeError:  # a version that is not a number
            encode, media_type = choose_encoder("")
        async with self._turn:
            self._kept = {name: kept for name, kept in self._kept.items() if kept[1] > loop.time()}
            if media_type not in self._kept:
                await asyncio.sleep(self._rested_at - loop.time())
                begin = loop.time()
                text = await asyncio.to_thread(encode, self._registry)
                self._kept[media_type] = text, begin + _KEPT_SECONDS
                self._rested_at = loop.time() + _REST * (loop.time() - begin)
            text, _ = self._kept[media_type]
            await asyncio.sleep(_PACE_SECONDS)
        return Response(text, headers={"Content-Type": media_type})


class HttpServer:
    """Serves the HTTP port.

    Owned by the app; used on the event loop only.

    Args:
        registry: The metrics of /metrics.
        unhealthy: Returns why /healthz should answer 503, or None.
        unready: Returns the same for /readyz.
        routes: Other pages.
        origins: Other sites whose pages are answered.
        error_forms: The forms of the errors of pages.

    Raises:
        OSError: Another process uses the port, or the address cannot be used; the message names the case.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        registry: CollectorRegistry,
        unhealthy: Probe,
        unready: Probe,
        routes: Sequence[BaseRoute] = (),
        origins: Collection[str] = (),
        error_forms: Sequence[ErrorForm] = (),
    ) -> None:
        refusals = self._refusals = _Refusals(error_forms)
        scrapes = _Scrapes(registry)
        pages = [
            Route("/metrics", scrapes.answer),
            Route("/metrics/", scrapes.answer),  # as programs ask that follow the redirection of others
            Route("/healthz", _page(unhealthy)),
            Route("/readyz", _page(unready)),
            *routes,
        ]
        paths = sorted({f"/{page.path.split('/')[1]}" for page in pages if isinstance(page, Route)})
        middleware = [Middleware(_Guard, host=host, origins=origins, refusals=refusals)]
        if origins:
            answer_pages = Middleware(
                CORSMiddleware,
                allow_origins=list(origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
            middleware.append(answer_pages)
        app = Starlette(
            routes=pages,
            exception_handlers={
                HTTPException: partial(_refuse, refusals=refusals, hint=f"try {', '.join(paths)}")
            },
            middleware=middleware,
        )
        app.router.redirect_slashes = False
        self._sockets = {page.path for page in pages if isinstance(page, WebSocketRoute)}
        self._config = Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            proxy_headers=False,  # a header must not choose the name of a caller
            timeout_keep_alive=_SILENT_SECONDS,
            ws=_Socket,
            ws_max_size=MAX_MESSAGE_BYTES,
            ws_ping_interval=_PING_SECONDS,
            ws_ping_timeout=_PING_SECONDS,
            ws_per_message_deflate=False,
        )
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # callers can cause its warnings
        self._state = ServerState()
        self._listener = _listener(host, port)
        self._server: asyncio.Server | None = None
        self.port: int = self._listener.getsockname()[1]

    async def start(self) -> None:
        """Starts to answer."""
        connect = partial(_Connection, self._config, self._state, self._refusals, self._sockets)
        self._server = await asyncio.get_running_loop().create_server(
            connect, sock=self._listener, backlog=_BACKLOG
        )

    def close(self) -> None:
        """Closes the port: further connections are refused."""
        (self._server or self._listener).close()

    async def stop(self) -> None:
        """Closes the port and its connections; answers that are on their way get a moment."""
        self.close()
        if self._state.tasks:
            await asyncio.wait(set(self._state.tasks), timeout=_CLOSE_SECONDS)
        for connection in list(self._state.connections):
            connection.transport.close()
        loop = asyncio.get_running_loop()
        end = loop.time() + _CLOSE_SECONDS
        while self._state.connections and loop.time() < end:
            await asyncio.sleep(_POLL_SECONDS)
        for connection in list(self._state.connections):  # of callers who do not read
            connection.transport.abort()
        if self._state.tasks:  # they see that their callers are gone
            await asyncio.wait(set(self._state.tasks), timeout=_CLOSE_SECONDS)


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections inherit it. Otherwise the end of an answer waits for the acknowledgement of its
        # beginning, which clients delay by 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise OSError(f"port {port} on {host} is in use: choose another --metrics-port") from error
        raise OSError(f"cannot listen on port {port} of {host}: {error.strerror}") from error
    return listener


def _page(probe: Probe) -> Callable[[Request], Awaitable[Response]]:
    async def page(_request: Request) -> Response:
        problem = probe()
        return PlainTextResponse(f"{problem or 'ok'}\n", 200 if problem is None else 503)

    return page


async def _refuse(request: Request, error: Exception, *, refusals: _Refusals, hint: str) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:100]
    if error.status_code == 404:
        form = refusals.form_of(path)
        if form is None:
            return PlainTextResponse(f"{hint}\n", 404)
        text = f"there is no page {path}: {form.hint}"
        return refusals.answer(path, 404, "NOT_FOUND", "UNKNOWN_PAGE", text)
    allowed = (error.headers or {}).get("Allow", "another method")
    text = f"{request.method} is not possible for {path}: send {allowed}"
    answer = refusals.answer(path, error.status_code, "UNIMPLEMENTED", "METHOD_NOT_ALLOWED", text)
    answer.headers.update(error.headers or {})
    return answer
