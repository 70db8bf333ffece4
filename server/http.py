"""The HTTP port: /metrics for Prometheus, /healthz and /readyz for orchestrators, and routes for callers.

It has a thread and an event loop of its own, so that it answers probes even while the loop of gRPC is busy.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, make_asgi_app
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

_MAX_CONNECTIONS = 512
_SILENT_SECONDS = 5  # a client has to send something, or a connection without a request is closed
_BACKLOG = 128
_CLOSE_SECONDS, _POLL_SECONDS = 3.0, 0.01  # for the callers to take their answers

Probe = Callable[[], str | None]


class _Connection(H11Protocol):
    """Closes itself if it is silent. Beyond a limit a new one closes the oldest, if possible an idle one."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.opened = self.loop.time()
        self._close_if_silent()
        if len(self.connections) > _MAX_CONNECTIONS:
            others = (one for one in self.connections if isinstance(one, _Connection) and one is not self)
            min(others, key=lambda other: (other.is_busy, other.opened)).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._close_if_silent()

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _close_if_silent(self) -> None:
        if not self.is_busy and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )


class _MetricsPage:
    """An object, because Starlette takes a function for a handler of requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._page: Any = make_asgi_app(registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._page(scope, receive, send)


class HttpServer:
    """Serves the HTTP port from a thread of its own.

    Owned by the app.

    Args:
        registry: The metrics of /metrics.
        unhealthy: Returns why /healthz should answer 503, or None.
        unready: Returns the same for /readyz.
        routes: Other pages.

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
    ) -> None:
        pages = [
            Route("/metrics", _MetricsPage(registry)),
            Route("/healthz", _page(unhealthy)),
            Route("/readyz", _page(unready)),
            *routes,
        ]
        app = Starlette(routes=pages, exception_handlers={HTTPException: _refuse})
        app.router.redirect_slashes = False
        self._config = Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            proxy_headers=False,  # a header must not choose the name of a caller
            timeout_keep_alive=_SILENT_SECONDS,
            ws="none",
        )
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # callers can cause its warnings
        self._listener = _listener(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close the port and its connections, and end the thread. Blocks for a moment."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        state = ServerState()
        server = await self._loop.create_server(
            lambda: _Connection(self._config, state, {}), sock=self._listener, backlog=_BACKLOG
        )
        await self._stopping.wait()
        server.close()
        if state.tasks:  # answers that are on their way
            await asyncio.wait(state.tasks, timeout=_CLOSE_SECONDS)
        for connection in list(state.connections):
            connection.transport.close()
        end = self._loop.time() + _CLOSE_SECONDS
        while state.connections and self._loop.time() < end:
            await asyncio.sleep(_POLL_SECONDS)


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
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


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    hint = "try /metrics, /healthz, /readyz or /v2" if error.status_code == 404 else error.detail
    if request.url.path.startswith("/v2"):
        return JSONResponse({"error": hint}, error.status_code, error.headers)
    return PlainTextResponse(f"{hint}\n", error.status_code, error.headers)
