"""What both clients send, and how their connections behave."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from protos.seq2seq_v1_pb2 import (
    DESCRIPTOR,
    GenerateOptions,
    GenerateRequest,
    ScoreRequest,
    Source,
    Target,
    TokenIds,
)

DEFAULT_ADDRESS = "localhost:50051"
DEFAULT_TIMEOUT_SECONDS = 60.0
MAX_REQUEST_BYTES, MAX_ANSWER_BYTES = 4 * 2**20, 16 * 2**20  # as the server has them

_SERVICE = DESCRIPTOR.services_by_name["Seq2Seq"]

# A server whose health says that it will end gets no new calls, and one that drains or restarts is retried,
# somewhere else where the name has several addresses. An answer that says that the request is wrong never is.
_SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": _SERVICE.full_name},
    "methodConfig": [
        {
            # Not GenerateStream: a stream of the client for ordinary code that is retried may wait for ever,
            # whatever its deadline, when its server dies before the first message (gRPC 1.85.1).
            "name": [
                {"service": _SERVICE.full_name, "method": method.name}
                for method in _SERVICE.methods
                if not method.server_streaming
            ],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
    # All calls in flight to a server that ends may fail at once, and are tried elsewhere.
    "retryThrottling": {"maxTokens": 1000, "tokenRatio": 1},
}

DIRECT_OPTIONS = (  # for calls about the server, also where it does not serve
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
    # A server that vanished during a call is noticed within 80 s.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # A server that comes back is found soon, and not after gRPC's own two minutes.
    ("grpc.max_reconnect_backoff_ms", 5_000),
)
CHANNEL_OPTIONS = (("grpc.service_config", json.dumps(_SERVICE_CONFIG)), *DIRECT_OPTIONS)

ChannelOptions = tuple[tuple[str, Any], ...]
TextOrIds = str | Sequence[int]


def generate_request(source: TextOrIds, model: str, options: GenerateOptions | None) -> GenerateRequest:
    """The request for one source, a text or its token ids.

    Raises:
        ValueError: The text is not valid Unicode, a token id is not a 64-bit integer, or there is more than
            any server takes.
    """
    request = GenerateRequest(model=model, sources=[_source(source)], options=options)
    if (num_bytes := request.ByteSize()) > MAX_REQUEST_BYTES:
        raise ValueError(f"the request has {num_bytes} bytes, and at most {MAX_REQUEST_BYTES} can be sent")
    return request


def score_request(source: TextOrIds, target: TextOrIds, model: str) -> ScoreRequest:
    """The request to score one target of one source, each a text or token ids.

    Raises:
        ValueError: As `generate_request`.
    """
    value = Target(text=target) if isinstance(target, str) else Target(token_ids=TokenIds(values=target))
    return ScoreRequest(model=model, sources=[_source(source)], target=value)


def _source(source: TextOrIds) -> Source:
    if source is None or isinstance(source, bytes):
        raise TypeError(f"a source is a text or a list of token ids, and this is {type(source).__name__}")
    return Source(text=source) if isinstance(source, str) else Source(token_ids=TokenIds(values=source))


@dataclass(frozen=True)
class Defaults:
    """What all calls of a client have.

    Attributes:
        timeout_seconds: Deadline of a call that names none; None waits for ever.
        token: Says who calls; empty says nothing. It is readable on the way unless the connection has TLS.
    """

    timeout_seconds: float | None
    token: str = field(default="", repr=False)

    def options(self, timeout_seconds: float | None = None, request_id: str = "") -> dict[str, Any]:
        """Timeout and metadata of a call; an empty id leaves the choice to the server."""
        given = {"x-request-id": request_id, "authorization": self.token and f"Bearer {self.token}"}
        return {
            "timeout": self.timeout_seconds if timeout_seconds is None else timeout_seconds,
            "metadata": tuple((key, value) for key, value in given.items() if value),
        }


@dataclass(frozen=True)
class Tls:
    """How a connection is encrypted: PEM files.

    Attributes:
        ca: Who must have signed the server's certificate; None asks the authorities that gRPC knows.
        certificate: The client's own, where the server wants one.
        key: Its private key.
    """

    ca: Path | str | None = None
    certificate: Path | str | None = None
    key: Path | str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """What a channel is made with.

        Raises:
            OSError: A file cannot be read.
        """
        ca, key, certificate = (
            None if path is None else Path(path).read_bytes()
            for path in (self.ca, self.key, self.certificate)
        )
        return grpc.ssl_channel_credentials(ca, key, certificate)
