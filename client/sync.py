"""The client for ordinary code: every call blocks until its answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from client.errors import ClientError
from client.wire import (
    CHANNEL_OPTIONS,
    DEFAULT_ADDRESS,
    DEFAULT_TIMEOUT_SECONDS,
    DIRECT_OPTIONS,
    ChannelOptions,
    Defaults,
    TextOrIds,
    Tls,
    generate_request,
    score_request,
)
from protos.seq2seq_v1_pb2 import (
    GenerateOptions,
    GenerateResponse,
    GenerateStreamResponse,
    ListModelsRequest,
    ListVersionsRequest,
    LoadModelRequest,
    Model,
    ScoreResponse,
    UnloadModelRequest,
    Version,
)
from protos.seq2seq_v1_pb2_grpc import RepositoryStub, Seq2SeqStub


class Client:
    """A connection to a server, for any number of threads; used as a context manager, or closed.

    Every method raises `ClientError` where the call fails, and `ValueError` for a text that is not Unicode.

    Args:
        address: `host:port`.
        timeout_seconds: Deadline of a call that names none; None waits for ever.
        tls: How the connection is encrypted; None is not at all.
        token: Says who calls, where the server wants to know.

    Raises:
        OSError: A file of `tls` cannot be read.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout_seconds: float | None = DEFAULT_TIMEOUT_SECONDS,
        tls: Tls | None = None,
        token: str = "",
    ) -> None:
        self.address = address
        self._defaults = Defaults(timeout_seconds, token)
        self._channel = _channel(address, tls, CHANNEL_OPTIONS)
        self._direct = _channel(address, tls, DIRECT_OPTIONS)
        self._stub: Any = Seq2SeqStub(self._channel)  # type: ignore[no-untyped-call]
        self._direct_stub: Any = Seq2SeqStub(self._direct)  # type: ignore[no-untyped-call]
        self._repository: Any = RepositoryStub(self._direct)  # type: ignore[no-untyped-call]
        self._health: Any = health_pb2_grpc.HealthStub(self._direct)

    def translate(self, text: str, *, model: str = "", options: GenerateOptions | None = None) -> str:
        """The best target of one source, as text."""
        return self.generate(text, model=model, options=options).hypotheses[0].text

    def generate(
        self,
        source: TextOrIds,
        *,
        model: str = "",
        options: GenerateOptions | None = None,
        timeout_seconds: float | None = None,
        request_id: str = "",
    ) -> GenerateResponse:
        """The whole answer to one source, a text or its token ids."""
        pending = self.submit(
            source, model=model, options=options, timeout_seconds=timeout_seconds, request_id=request_id
        )
        return pending.result()

    def submit(
        self,
        source: TextOrIds,
        *,
        model: str = "",
        options: GenerateOptions | None = None,
        timeout_seconds: float | None = None,
        request_id: str = "",
    ) -> Pending:
        """Like `generate`, without waiting: for many requests in flight."""
        call = self._stub.Generate.future(
            generate_request(source, model, options),
            **self._defaults.options(timeout_seconds, request_id),
        )
        return Pending(call, self.address)

    def stream(
        self,
        source: TextOrIds,
        *,
        model: str = "",
        options: GenerateOptions | None = None,
        timeout_seconds: float | None = None,
        request_id: str = "",
    ) -> Iterator[GenerateStreamResponse]:
        """Pieces as they are decoded, and last the whole answer; leaving the loop cancels the call."""
        call = self._stub.GenerateStream(
            generate_request(source, model, options),
            **self._defaults.options(timeout_seconds, request_id),
        )
        try:
            with _client_errors(self.address):
                yield from call
        finally:
            call.cancel()

    def score(
        self,
        source: TextOrIds,
        target: TextOrIds,
        *,
        model: str = "",
        timeout_seconds: float | None = None,
        request_id: str = "",
    ) -> ScoreResponse:
        """The log-probabilities of a given target, a text or its token ids."""
        with _client_errors(self.address):
            answer: ScoreResponse = self._stub.Score(
                score_request(source, target, model),
                **self._defaults.options(timeout_seconds, request_id),
            )
        return answer

    def models(self) -> list[Model]:
        """The models that the server serves, the default one first."""
        with _client_errors(self.address):
            answer = self._direct_stub.ListModels(ListModelsRequest(), **self._defaults.options())
        return list(answer.models)

    def versions(self, model: str = "") -> list[Version]:
        """Every version on disk, of all models or of one, and whether it is served."""
        with _client_errors(self.address):
            answer = self._repository.ListVersions(
                ListVersionsRequest(model=model), **self._defaults.options()
            )
        return list(answer.versions)

    def load(self, model: str, version: str = "", *, timeout_seconds: float | None = None) -> Model:
        """Let the server serve a version of a model, by default its newest, and wait until it does."""
        with _client_errors(self.address):
            answer = self._repository.LoadModel(
                LoadModelRequest(model=model, version=version), **self._defaults.options(timeout_seconds)
            )
        loaded: Model = answer.model
        return loaded

    def unload(self, model: str) -> None:
        """Let the server serve a model no more."""
        with _client_errors(self.address):
            self._repository.UnloadModel(UnloadModelRequest(model=model), **self._defaults.options())

    def health(self, service: str = "") -> str:
        """`SERVING` or `NOT_SERVING`: of the whole server, of a service, or of a model."""
        with _client_errors(self.address):
            answer = self._health.Check(
                health_pb2.HealthCheckRequest(service=service), **self._defaults.options()
            )
        name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        return name

    def close(self) -> None:
        """End the connection, and with it every call."""
        self._channel.close()
        self._direct.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Pending:
    """A call whose answer has not been waited for yet. Made by `Client.submit`."""

    def __init__(self, call: Any, address: str) -> None:
        self._call = call
        self._address = address

    def result(self) -> GenerateResponse:
        """Wait for the answer."""
        with _client_errors(self._address):
            answer: GenerateResponse = self._call.result()
        return answer

    def cancel(self) -> None:
        """Give up; the server frees the request's slot."""
        self._call.cancel()


def _channel(address: str, tls: Tls | None, options: ChannelOptions) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls.credentials(), options=options)


@contextmanager
def _client_errors(address: str) -> Iterator[None]:
    try:
        yield
    except grpc.FutureCancelledError:
        raise ClientError("CANCELLED", "the caller cancelled") from None
    except grpc.RpcError as error:
        raise ClientError.from_rpc(error, address) from error
