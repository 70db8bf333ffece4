"""The metrics port: /metrics for Prometheus, /healthz and /readyz for orchestrators and load balancers.

It is a small threaded WSGI server, so that it answers even while the event loop is busy.
"""

from __future__ import annotations

import errno
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app

from seq2seq_serve.server.descriptors import Descriptors

_MAX_CONNECTIONS = 64
_POLL_SECONDS = 0.1  # the thread checks this often whether it should end

_log = logging.getLogger(__name__)

Probe = Callable[[], str | None]


class _ThreadingServer(ThreadingMixIn, WSGIServer):
    """Has one thread for each connection; beyond a limit a new connection closes the oldest one."""

    daemon_threads = True
    request_queue_size = 128
    descriptors: Descriptors

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._open: dict[socket.socket, None] = {}  # in the order of their arrival
        self._lock = threading.Lock()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection, even if gRPC callers use all other descriptors."""
        with self.descriptors.reserved():
            connection, address = super().get_request()
        with self._lock:
            if len(self._open) >= _MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):  # its client has closed it already
                    oldest.shutdown(socket.SHUT_RDWR)  # this ends its thread
            self._open[connection] = None
        return connection, address

    def handle_error(self, *_: Any) -> None:
        """Log a bug; an error of the connection is not one."""
        if not isinstance(sys.exception(), OSError):
            _log.exception("the metrics port: a bug")

    def close_request(self, request: Any) -> None:
        """Remove a connection before the system can reuse its descriptor."""
        with self._lock:
            self._open.pop(request, None)
        super().close_request(request)


class _ThreadingServer6(_ThreadingServer):
    address_family = socket.AF_INET6


class _QuietHandler(WSGIRequestHandler):
    timeout = 5.0  # seconds in which a client has to send something

    def log_message(self, *args: object) -> None:
        """Log nothing: a scrape every few seconds would fill the log."""


class HttpServer:
    """Serves the metrics port from a thread of its own.

    Owned by the app.

    Args:
        registry: The metrics of /metrics.
        descriptors: Their reserve is for this port.
        unhealthy: Returns why /healthz should answer 503, or None.
        unready: Returns the same for /readyz.

    Raises:
        OSError: Another process uses the port, or the address cannot be used; the message names the case.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        registry: CollectorRegistry,
        descriptors: Descriptors,
        unhealthy: Probe,
        unready: Probe,
    ) -> None:
        self._metrics = make_wsgi_app(registry)
        self._descriptors = descriptors
        self._probes = {"/healthz": unhealthy, "/readyz": unready}
        server_class = _ThreadingServer6 if ":" in host else _ThreadingServer
        try:
            self._server = make_server(
                host, port, self._answer, server_class=server_class, handler_class=_QuietHandler
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise OSError(f"port {port} on {host} is in use: choose another --metrics-port") from error
            raise OSError(f"cannot listen on port {port} of {host}: {error.strerror}") from error
        self._server.descriptors = descriptors
        self.port = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="metrics-http", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Close the port and end the thread. Blocks for a moment."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        if path == "/metrics":
            with self._descriptors.reserved():  # the process metrics are read from files
                body: Iterable[bytes] = self._metrics(environ, start_response)
            return body
        if path not in self._probes:
            return _text(start_response, "404 Not Found", "try /metrics, /healthz or /readyz")
        problem = self._probes[path]()
        if problem is None:
            return _text(start_response, "200 OK", "ok")
        return _text(start_response, "503 Service Unavailable", problem)


def _text(start_response: StartResponse, status: str, text: str) -> list[bytes]:
    body = (text + "\n").encode()
    start_response(
        status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))]
    )
    return [body]
