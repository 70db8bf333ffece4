"""The gRPC port: which services are on it, and how its connections behave."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

from grpc import aio
from grpc_health.v1 import health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

from protos.open_inference_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from protos.seq2seq_v1_pb2_grpc import add_RepositoryServicer_to_server, add_Seq2SeqServicer_to_server
from server.config import ServerConfig
from server.metrics import Metrics
from server.models import Models
from server.repository import Repository
from server.service.access import Access, AccessInterceptor
from server.service.calls import MAX_ANSWER_BYTES, Calls
from server.service.counting import CountingInterceptor
from server.service.health import HEALTH_SERVICE, SERVICE_NAMES, Health, HealthService
from server.service.inference import InferenceService
from server.service.parsing import ParsingInterceptor
from server.service.repository import RepositoryService
from server.service.seq2seq import Seq2SeqService
from server.service.tls import server_credentials

# Of a message after decompression, which is gRPC's own default. One text that can be served is far smaller.
MAX_REQUEST_BYTES = 4 * 2**20
_MAX_PENDING_CALLS = 100_000
# Open calls of one connection; its client lets the next ones wait. Four times as many as wait in a queue by
# default: a gateway with one connection can fill queues and slots, and is refused with a time to come again
# before its calls wait unseen. An idle call takes about 50 KiB: those of a connection 200 MiB at most.
_MAX_STREAMS = 4096

_OPTIONS = (
    # Two servers on one port would each get a part of the calls; the second one must fail to start.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", MAX_ANSWER_BYTES),
    ("grpc.max_concurrent_streams", _MAX_STREAMS),
    # Calls received and not handled yet. Beyond its own limit of 1000 gRPC cancels some, which no client
    # retries; the engine's queue refuses what is too much, and says when to come again.
    ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING_CALLS),
    # A dead peer is found within 80 s, and clients may ping as often as every 10 s, also between calls.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    # Connections that say nothing, and those without a call, are closed: each holds a descriptor. Clients
    # open another one for their next call.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 120_000),
    # Connections are renewed, so that clients behind a connection balancer spread over new servers; the
    # longest call may finish first.
    ("grpc.max_connection_age_ms", 600_000),
    ("grpc.max_connection_age_grace_ms", 600_000),
)

_log = logging.getLogger(__name__)

# For answers on their way and refusals of calls that came last; what is still open then is cut off.
_CLOSE_SECONDS = 3.0


class Endpoint:
    """The gRPC server with its services.

    Owned by the app; used on the event loop only.

    Raises:
        OSError: The address cannot be listened on.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        models: Models,
        repository: Repository,
        calls: Calls,
        health: Health,
        metrics: Metrics,
        access: Access,
    ) -> None:
        host, port, tls = config.host, config.port, config.tls
        self._server = aio.server(
            interceptors=[
                CountingInterceptor(metrics),
                AccessInterceptor(access, metrics),
                ParsingInterceptor(),
            ],
            options=_OPTIONS,
        )
        add_Seq2SeqServicer_to_server(Seq2SeqService(models, calls), self._server)  # type: ignore[no-untyped-call]
        add_RepositoryServicer_to_server(  # type: ignore[no-untyped-call]
            RepositoryService(repository, calls), self._server
        )
        add_GRPCInferenceServiceServicer_to_server(  # type: ignore[no-untyped-call]
            InferenceService(models, repository, calls, health), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(HealthService(health), self._server)
        if config.has_reflection:
            names = (*SERVICE_NAMES, HEALTH_SERVICE, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, server_credentials(tls))
        except RuntimeError as error:
            raise OSError(
                f"cannot listen on port {port} of {host}: {_reason(host, port)}; choose another --port"
            ) from error

    async def start(self) -> None:
        """Answer calls from now on."""
        asyncio.get_running_loop().set_exception_handler(_report)
        await self._server.start()

    async def stop(self) -> None:
        """Close the port, and let the open calls end, for a moment."""
        await self._server.stop(_CLOSE_SECONDS)


def _report(loop: asyncio.AbstractEventLoop, problem: dict[str, Any]) -> None:
    """Log what a task of the event loop left behind, but for answers to callers who have left."""
    error = problem.get("exception")
    if isinstance(error, aio.InternalError):  # gRPC sends an answer before it hears that nobody waits for it
        _log.debug("an answer came too late: %s", error)
    else:
        loop.default_exception_handler(problem)


def _reason(host: str, port: int) -> str:
    """Why an address cannot be listened on, which gRPC does not tell."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        return error.strerror or str(error)
    return "gRPC cannot use it"
