"""The metrics port: /metrics for Prometheus, /healthz and /readyz for who restarts and routes.

A small threaded WSGI server, so that it answers even while the event loop is busy.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app

_POLL_SECONDS = 0.1  # how soon the thread notices that it should end

Probe = Callable[[], str | None]


class _ThreadingServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _ThreadingServer6(_ThreadingServer):
    address_family = socket.AF_INET6


class _QuietHandler(WSGIRequestHandler):
    timeout = 10.0  # a client that says nothing holds a thread no longer

    def log_message(self, *args: object) -> None:
        """Say nothing: a scrape every few seconds would fill the log."""


class HttpServer:
    """Serves the metrics port from a thread of its own.

    Owned by the app.

    Args:
        registry: What /metrics shows.
        unhealthy: Why /healthz should answer 503, or None when all is well.
        unready: The same of /readyz.

    Raises:
        OSError: Another process listens there, or the address cannot be used; the message says which.
    """

    def __init__(
        self, host: str, port: int, *, registry: CollectorRegistry, unhealthy: Probe, unready: Probe
    ) -> None:
        self._metrics = make_wsgi_app(registry)
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
