"""The requests that both clients send, and the settings of their connections."""

from __future__ import annotations

import json
import math
import reprlib
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
_LONGEST_SECONDS = 1e9  # that gRPC takes; a longer deadline would have passed at once
MAX_REQUEST_BYTES, MAX_ANSWER_BYTES = 4 * 2**20, 16 * 2**20  # as the server has them

_SERVICE = DESCRIPTOR.services_by_name["Seq2Seq"]

# A server whose health check says NOT_SERVING gets no new calls. Calls that end with UNAVAILABLE, as those to
# a server that drains or restarts, are tried again, on another server where the name has several addresses.
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
        TypeError: The source is neither a text nor a sequence of token ids.
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
        TypeError: As `generate_request`.
        ValueError: As `generate_request`.
    """
    value = Target(text=target) if isinstance(target, str) else Target(token_ids=_token_ids(target, "target"))
    return ScoreRequest(model=model, sources=[_source(source)], target=value)


def _source(source: TextOrIds) -> Source:
    if isinstance(source, str):
        return Source(text=source)
    return Source(token_ids=_token_ids(source, "source"))


def _token_ids(given: Sequence[int], what: str) -> TokenIds:
    try:
        if given is None or isinstance(given, bytes):  # protobuf takes None for no ids, and bytes for numbers
            raise TypeError
        return TokenIds(values=given)
    except TypeError:
        text = f"a {what} is a text or a list of token ids, and this is {reprlib.repr(given)}"
        raise TypeError(text) from None


@dataclass(frozen=True)
class Defaults:
    """The settings that all calls of a client share.

    Attributes:
        timeout_seconds: Deadline of a call that names none; None waits for ever.
        token: Bearer token that identifies the caller; empty sends none. Without TLS others on the network
            can read it.
    """

    timeout_seconds: float | None
    token: str = field(default="", repr=False)

    def options(self, timeout_seconds: float | None = None, request_id: str = "") -> dict[str, Any]:
        """Returns the timeout and metadata of a call; with an empty id the server makes one.

        Raises:
            ValueError: The timeout is no number.
        """
        if timeout_seconds is None:
            timeout_seconds = self.timeout_seconds
        if timeout_seconds is not None and math.isnan(timeout_seconds):
            raise ValueError("the timeout is not a number")
        if timeout_seconds is not None and timeout_seconds > _LONGEST_SECONDS:
            timeout_seconds = None
        given = {"x-request-id": request_id, "authorization": self.token and f"Bearer {self.token}"}
        return {
            "timeout": timeout_seconds,
            "metadata": tuple((key, value) for key, value in given.items() if value),
        }


@dataclass(frozen=True)
class Tls:
    """The PEM files of an encrypted connection.

    Attributes:
        ca: Certificate of the authority that signed the server's; None trusts those that gRPC knows.
        certificate: This client's own certificate, for a server that asks for one (mTLS).
        key: The private key of that certificate.
    """

    ca: Path | str | None = None
    certificate: Path | str | None = None
    key: Path | str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Returns the credentials for gRPC's channel.

        Raises:
            OSError: A file cannot be read.
        """
        ca, key, certificate = (
            None if path is None else Path(path).read_bytes()
            for path in (self.ca, self.key, self.certificate)
        )
        return grpc.ssl_channel_credentials(ca, key, certificate)
