"""The client for asyncio: the same methods, awaited."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from grpc import aio
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


class AsyncClient:
    """A connection to a server, for one event loop; used as an async context manager, or closed.

    Every method raises `ClientError` where the call fails, and `ValueError` for a text that is not Unicode.
    Cancelling the task that awaits a call cancels the call.

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

    async def translate(self, text: str, *, model: str = "", options: GenerateOptions | None = None) -> str:
        """The best target of one source, as text."""
        answer = await self.generate(text, model=model, options=options)
        return answer.hypotheses[0].text

    async def generate(
        self,
        source: TextOrIds,
        *,
        model: str = "",
        options: GenerateOptions | None = None,
        timeout_seconds: float | None = None,
        request_id: str = "",
    ) -> GenerateResponse:
        """The whole answer to one source, a text or its token ids."""
        with _client_errors(self.address):
            answer: GenerateResponse = await self._stub.Generate(
                generate_request(source, model, options),
                **self._defaults.options(timeout_seconds, request_id),
            )
        return answer

    async def stream(
        self,
        source: TextOrIds,
        *,
        model: str = "",
        options: GenerateOptions | None = None,
        timeout_seconds: float | None = None,
        request_id: str = "",
    ) -> AsyncIterator[GenerateStreamResponse]:
        """Pieces as they are decoded, and last the whole answer; closing the iterator cancels the call."""
        call = self._stub.GenerateStream(
            generate_request(source, model, options),
            **self._defaults.options(timeout_seconds, request_id),
        )
        try:
            with _client_errors(self.address):
                async for event in call:
                    yield event
        finally:
            call.cancel()

    async def score(
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
            answer: ScoreResponse = await self._stub.Score(
                score_request(source, target, model),
                **self._defaults.options(timeout_seconds, request_id),
            )
        return answer

    async def models(self) -> list[Model]:
        """The models that the server serves, the default one first."""
        with _client_errors(self.address):
            answer = await self._direct_stub.ListModels(ListModelsRequest(), **self._defaults.options())
        return list(answer.models)

    async def versions(self, model: str = "") -> list[Version]:
        """Every version on disk, of all models or of one, and whether it is served."""
        with _client_errors(self.address):
            answer = await self._repository.ListVersions(
                ListVersionsRequest(model=model), **self._defaults.options()
            )
        return list(answer.versions)

    async def load(self, model: str, version: str = "", *, timeout_seconds: float | None = None) -> Model:
        """Let the server serve a version of a model, by default its newest, and wait until it does."""
        with _client_errors(self.address):
            answer = await self._repository.LoadModel(
                LoadModelRequest(model=model, version=version), **self._defaults.options(timeout_seconds)
            )
        loaded: Model = answer.model
        return loaded

    async def unload(self, model: str) -> None:
        """Let the server serve a model no more."""
        with _client_errors(self.address):
            await self._repository.UnloadModel(UnloadModelRequest(model=model), **self._defaults.options())

    async def health(self, service: str = "") -> str:
        """`SERVING` or `NOT_SERVING`: of the whole server, of a service, or of a model."""
        with _client_errors(self.address):
            answer = await self._health.Check(
                health_pb2.HealthCheckRequest(service=service), **self._defaults.options()
            )
        name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        return name

    async def close(self) -> None:
        """End the connection, and with it every call."""
        await self._channel.close()
        await self._direct.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _channel(address: str, tls: Tls | None, options: ChannelOptions) -> aio.Channel:
    if tls is None:
        return aio.insecure_channel(address, options=options)
    return aio.secure_channel(address, tls.credentials(), options=options)


@contextmanager
def _client_errors(address: str) -> Iterator[None]:
    try:
        yield
    except aio.AioRpcError as error:
        raise ClientError.from_rpc(error, address) from error
