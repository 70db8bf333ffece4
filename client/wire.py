"""Builds the requests that both clients send, and holds the settings of their channels."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from google.protobuf.message import Message

from seq2seq_serve.client.errors import ClientError
from seq2seq_serve.protos.options import Options, options_of
from seq2seq_serve.protos.seq2seq_v1_pb2 import (
    DESCRIPTOR,
    BatchItem,
    GenerateBatchRequest,
    GenerateOptions,
    GenerateRequest,
)
from seq2seq_serve.protos.sources import Sources, sources_of

DEFAULT_ADDRESS = "localhost:50051"
DEFAULT_TIMEOUT_SECONDS = 60.0
MAX_REQUEST_BYTES, MAX_ANSWER_BYTES = 4 * 2**20, 16 * 2**20  # the same limits as in the server

MAX_BATCH = 2700  # items that the server accepts in a message
MOST_SHARED_BYTES = 1024  # of an item that shares a call: the cost of a larger one is in its decoding

_SERVICE = DESCRIPTOR.services_by_name["Seq2Seq"]

# Where the name has several addresses, gRPC calls them in turn. It sends no new calls to a server whose
# health check answers NOT_SERVING. It retries calls that end with UNAVAILABLE, for example because the server
# drains or restarts: on another server if there is one.
_SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": _SERVICE.full_name},
    "methodConfig": [
        {
            # Not streams: if the server dies before the first message, a blocking stream that is retried may
            # wait for ever, despite its deadline (gRPC 1.85.1). `Dispatcher` sends texts of a batch again.
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
    # When a server ends, all of its calls in flight may fail at once. Enough tokens to retry them all.
    "retryThrottling": {"maxTokens": 1000, "tokenRatio": 1},
}

DIRECT_OPTIONS = (  # for calls about the server, which it answers even while it is not serving
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
    # gRPC notices within 80 s that a server has vanished during a call.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # gRPC's default waits up to two minutes before it tries to reach a server again.
    ("grpc.max_reconnect_backoff_ms", 5_000),
)
CHANNEL_OPTIONS = (("grpc.service_config", json.dumps(_SERVICE_CONFIG)), *DIRECT_OPTIONS)


@dataclass(frozen=True, slots=True)
class Item:
    """One of many sources, which may share a call with others that have the same options.

    Attributes:
        message: Its sources.
        options: Its options, as one object for all items that have the same ones.
    """

    message: BatchItem
    options: GenerateOptions

    @property
    def kind(self) -> int | None:
        """Is the same for items that may share a call; None for a large item, or one that is not text."""
        if self.message.ByteSize() > MOST_SHARED_BYTES:
            return None
        is_text = all(
            source.HasField("text") or source.HasField("token_ids") for source in self.message.sources
        )
        return id(self.options) if is_text else None


def generate_request(source: Sources, model: str, options: Options | None) -> GenerateRequest:
    """Returns the request to generate from one source, or from several by their names.

    Raises:
        TypeError: The source, or one of them, is not of a type that can be sent.
        ValueError: The text is not valid Unicode, a token id is not a 64-bit integer, an array has numbers of
            another type than uint8, int64 and float32, or the request is larger than the server accepts.
    """
    return _fitting(GenerateRequest(model=model, sources=sources_of(source), options=options_of(options)))


def item_maker(model: str, options: GenerateOptions) -> Callable[[Sources], Item]:
    """Returns what turns a source into one of many with these options; it raises as `generate_request`."""
    most_bytes = MAX_REQUEST_BYTES - MOST_SHARED_BYTES - options.ByteSize()

    def item_of(source: Sources) -> Item:
        item = Item(BatchItem(sources=sources_of(source)), options)
        if item.message.ByteSize() > most_bytes:
            items_request([item], model)
        return item

    return item_of


def items_request(items: Sequence[Item], model: str) -> GenerateRequest | GenerateBatchRequest:
    """Returns the request of an item alone, or of several of one kind.

    Raises:
        ValueError: The item is larger than the server accepts.
    """
    options = items[0].options
    if len(items) == 1:
        return _fitting(GenerateRequest(model=model, sources=items[0].message.sources, options=options))
    return GenerateBatchRequest(
        model=model,
        items=[item.message for item in items],
        options=options,
        joins_answers=True,
        refuses_items=True,
    )


def batch_request(
    sources: Sequence[Sources], model: str, options: Options | None
) -> tuple[GenerateBatchRequest, list[int], dict[int, ClientError]]:
    """Returns the request to generate from many sources.

    Returns:
        The request, the index of the source of each item, and the errors of the other sources by their index.

    Raises:
        ValueError: There are more sources than the server accepts, or they are larger together.
    """
    if len(sources) > MAX_BATCH:
        raise ValueError(
            f"more than {MAX_BATCH} sources are too many for one call: send several, or use translate_many"
        )
    items: dict[int, BatchItem] = {}
    errors: dict[int, ClientError] = {}
    item_of = item_maker(model, given := options_of(options))
    for index, source in enumerate(sources):
        try:
            items[index] = item_of(source).message
        except (TypeError, ValueError) as error:
            errors[index] = ClientError.of_item(error, index)
    request = GenerateBatchRequest(model=model, items=items.values(), options=given)
    _check_size(request, "send several, or use translate_many")
    return request, list(items), errors


def _fitting(request: GenerateRequest) -> GenerateRequest:
    """Returns the request, or raises ValueError if it is too large."""
    advice = "make it smaller"
    if any(source.HasField("file") for source in request.sources):
        advice += "; a sound can be sent in parts by AsyncClient.transcribe_live"
    _check_size(request, advice)
    return request


def _check_size(request: Message, advice: str) -> None:
    if (num_bytes := request.ByteSize()) > MAX_REQUEST_BYTES:
        raise ValueError(
            f"the request has {num_bytes} bytes, and the server accepts at most {MAX_REQUEST_BYTES}: {advice}"
        )


@dataclass(frozen=True)
class Tls:
    """The PEM files of an encrypted connection.

    Attributes:
        ca: Certificate of the authority that signed the server's; None trusts the authorities that gRPC
            knows.
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
