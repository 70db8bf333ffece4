"""The gRPC port: its services, and the settings of its connections."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor
from grpc import aio
from grpc_reflection.v1alpha import reflection, reflection_pb2  # type: ignore[import-untyped]

from seq2seq_serve.server.config import ServerConfig
from seq2seq_serve.server.models.repository import Repository
from seq2seq_serve.server.service.calls import MAX_ANSWER_BYTES, MAX_REQUEST_BYTES, Calls
from seq2seq_serve.server.service.health import (
    HEALTH,
    INFERENCE,
    REPOSITORY,
    SEQ2SEQ,
    SERVICE_NAMES,
    Health,
    HealthService,
)
from seq2seq_serve.server.service.open_inference.service import InferenceService
from seq2seq_serve.server.service.rpcs import Rpcs, Unsupported
from seq2seq_serve.server.service.seq2seq.repository import RepositoryService
from seq2seq_serve.server.service.seq2seq.service import Seq2SeqService
from seq2seq_serve.server.service.tls import server_credentials
from seq2seq_serve.server.system.machine import raise_file_limit

_REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]

_MAX_PENDING_CALLS = 100_000
# Open calls of a connection; its client makes further calls wait. This is twice the default size of a queue:
# a gateway with one connection can fill queues and slots, and then gets refusals with a retry delay, instead
# of calls that wait in the client. An idle call takes about 50 KiB, a full connection 100 MiB. gRPC hands all
# calls to their handlers in one line, at about 0.25 ms each, also those that were cancelled meanwhile. Of one
# connection there are at most as many in that line, and others wait for half a second behind them.
_MAX_STREAMS = 2048

_OPTIONS = (
    # Two servers on one port would each get a part of the calls; the second one must fail to start.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_ANSWER_BYTES),
    ("grpc.max_concurrent_streams", _MAX_STREAMS),
    # Calls that are received and not handled yet. At its own limit of 1000 gRPC cancels calls, and clients do
    # not retry those; the engine's queue refuses calls with a retry delay.
    ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING_CALLS),
    # Of a message that nobody reads yet, such as one without a token, gRPC takes 256 KiB. Longer ones cost
    # more round trips: with 50 ms each, 4 MB take 0.23 s in place of 0.07.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 262_144),
    # A dead peer is found within 80 s. Clients may ping every 10 s, also between calls.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    # Connections without a handshake, and those without a call, are closed, because each holds a descriptor.
    # Clients open another one for their next call.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 120_000),
    # Calls of a connection that is renewed get ten minutes to end.
    ("grpc.max_connection_age_grace_ms", 600_000),
)

_log = logging.getLogger(__name__)

# Answers and refusals that are on their way get this time; then gRPC cuts open calls off.
_CLOSE_SECONDS = 3.0


class Endpoint:
    """The gRPC server with its services.

    Owned by the app; used on the event loop only.

    Attributes:
        port: The port that it listens on.
        max_connections: How many connections callers may have open.

    Raises:
        OSError: The server cannot listen on the address.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        repository: Repository,
        calls: Calls,
        health: Health,
        inference: InferenceService,
    ) -> None:
        host, port, credentials = config.host, config.port, server_credentials(config)
        # Connections are renewed, so that clients behind a connection balancer spread over new servers.
        age = ("grpc.max_connection_age_ms", round(1000 * config.max_connection_age_seconds))
        # The other files are for probes, metrics and models. gRPC closes further connections at once.
        self.max_connections = raise_file_limit() * 7 // 8
        connections = ("grpc.max_allowed_incoming_connections", self.max_connections)
        self._server = aio.server(options=(*_OPTIONS, age, connections))
        services: dict[ServiceDescriptor, object] = {
            SEQ2SEQ: Seq2SeqService(),
            REPOSITORY: RepositoryService(repository),
            INFERENCE: inference,
            HEALTH: HealthService(health),
        }
        if config.has_reflection:
            names = (*SERVICE_NAMES, HEALTH.full_name, reflection.SERVICE_NAME)
            services[_REFLECTION] = reflection.aio.ReflectionServicer(names)
        rpcs = Rpcs(calls)
        handlers = [rpcs.handlers(*each) for each in services.items()]
        self._server.add_generic_rpc_handlers([*handlers, Unsupported(INFERENCE)])
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise OSError(
                f"cannot listen on port {port} of {host}: {_reason(host, port)}; choose another --port"
            ) from error

    async def start(self) -> None:
        """Starts to answer calls."""
        asyncio.get_running_loop().set_exception_handler(_report)
        await self._server.start()

    async def stop(self) -> None:
        """Closes the port, and gives open calls a moment to end."""
        await self._server.stop(_CLOSE_SECONDS)


def _report(loop: asyncio.AbstractEventLoop, problem: dict[str, Any]) -> None:
    """Logs an error that no task handled, except answers that come after their caller has left."""
    error = problem.get("exception")
    if isinstance(error, aio.InternalError):  # gRPC sends before it learns that the caller has left
        _log.debug("an answer came too late: %s", error)
    else:
        loop.default_exception_handler(problem)


def _reason(host: str, port: int) -> str:
    """Returns why the server cannot listen on an address; gRPC does not report it."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        return error.strerror or str(error)
    return "gRPC cannot use it"
