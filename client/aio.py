"""The client for asyncio: the same methods, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Self

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from client.errors import ClientError
from client.many import DEFAULT_GIVE_UP_SECONDS, DEFAULT_IN_FLIGHT, Call, Dispatcher, Translated, check_texts
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
    GenerateRequest,
    GenerateResponse,
    GenerateStreamResponse,
    GetModelRequest,
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

    Every method raises `ClientError` where the call fails, and `ValueError` for a text that cannot be sent.
    Cancelling the task that awaits a call cancels the call.

    Args:
        address: `host:port`.
        timeout_seconds: Deadline of a call that names none; None waits for ever.
        tls: Files for an encrypted connection; None does not encrypt.
        token: Identifies the caller to a server that requires it.

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
        """Returns the best target of one source, as text."""
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
        """Returns the whole answer to one source, a text or its token ids."""
        return await self._generate(generate_request(source, model, options), timeout_seconds, request_id)

    async def translate_many(
        self,
        texts: Iterable[TextOrIds] | AsyncIterable[TextOrIds],
        *,
        model: str = "",
        options: GenerateOptions | None = None,
        in_flight: int = DEFAULT_IN_FLIGHT,
        give_up_seconds: float = DEFAULT_GIVE_UP_SECONDS,
        timeout_seconds: float | None = None,
    ) -> AsyncIterator[Translated]:
        """As `Client.translate_many`; pass an asynchronous iterable where its texts are waited for."""
        check_texts(texts)
        dispatcher = Dispatcher(
            partial(generate_request, model=model, options=options), in_flight, give_up_seconds
        )
        events: asyncio.Queue[Callable[[], None]] = asyncio.Queue()
        room = asyncio.Semaphore(dispatcher.max_held)

        async def read() -> None:
            try:
                iterator = aiter(texts if isinstance(texts, AsyncIterable) else _each(texts))
                while await room.acquire():
                    events.put_nowait(partial(dispatcher.add, await anext(iterator)))
            except StopAsyncIteration:
                events.put_nowait(dispatcher.finish)
            except Exception as error:
                events.put_nowait(partial(dispatcher.finish, error))

        async def send(call: Call) -> None:
            assert call.request is not None
            try:
                outcome: GenerateResponse | Exception = await self._generate(call.request, timeout_seconds)
            except Exception as error:
                outcome = error
            except asyncio.CancelledError:  # gRPC cancels the calls of a channel that is closed
                outcome = ClientError("CANCELLED", "the caller cancelled")
            events.put_nowait(partial(dispatcher.end, call, outcome))

        under_way: set[asyncio.Task[None]] = {asyncio.create_task(read())}
        try:
            while not dispatcher.is_over:
                while (call := dispatcher.next_call()) is not None:
                    task = asyncio.create_task(send(call))
                    under_way.add(task)
                    task.add_done_callback(under_way.discard)
                with suppress(TimeoutError):
                    async with asyncio.timeout(dispatcher.seconds_to_wait()):
                        event = await events.get()
                    event()
                for result in dispatcher.results():
                    yield result
                    room.release()
        finally:
            for task in under_way:
                task.cancel()
        if dispatcher.error is not None:
            raise dispatcher.error

    async def _generate(
        self, request: GenerateRequest, timeout_seconds: float | None, request_id: str = ""
    ) -> GenerateResponse:
        with _client_errors(self.address):
            answer: GenerateResponse = await self._stub.Generate(
                request, **self._defaults.options(timeout_seconds, request_id)
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
        """Yields pieces as they are decoded, then the whole answer; closing the iterator cancels the call."""
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
        """Returns the log-probabilities of a given target, a text or its token ids."""
        with _client_errors(self.address):
            answer: ScoreResponse = await self._stub.Score(
                score_request(source, target, model),
                **self._defaults.options(timeout_seconds, request_id),
            )
        return answer

    async def models(self) -> list[Model]:
        """Returns the models that the server serves, the default one first."""
        with _client_errors(self.address):
            answer = await self._direct_stub.ListModels(ListModelsRequest(), **self._defaults.options())
        return list(answer.models)

    async def model(self, name: str = "") -> Model:
        """Returns one served model; the empty name means the default one."""
        with _client_errors(self.address):
            answer = await self._direct_stub.GetModel(GetModelRequest(model=name), **self._defaults.options())
        served: Model = answer.model
        return served

    async def versions(self, model: str = "") -> list[Version]:
        """Returns every version on the server's disk, of all models or of one, and whether it is served."""
        with _client_errors(self.address):
            answer = await self._repository.ListVersions(
                ListVersionsRequest(model=model), **self._defaults.options()
            )
        return list(answer.versions)

    async def load(self, model: str, version: str = "", *, timeout_seconds: float | None = None) -> Model:
        """Loads a version of a model, by default the newest, and waits until the server serves it."""
        with _client_errors(self.address):
            answer = await self._repository.LoadModel(
                LoadModelRequest(model=model, version=version), **self._defaults.options(timeout_seconds)
            )
        loaded: Model = answer.model
        return loaded

    async def unload(self, model: str) -> None:
        """Unloads a model: the server no longer serves it."""
        with _client_errors(self.address):
            await self._repository.UnloadModel(UnloadModelRequest(model=model), **self._defaults.options())

    async def health(self, service: str = "") -> str:
        """Returns `SERVING` or `NOT_SERVING` for the whole server, a service, or a model."""
        with _client_errors(self.address):
            answer = await self._health.Check(
                health_pb2.HealthCheckRequest(service=service), **self._defaults.options()
            )
        name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        return name

    async def close(self) -> None:
        """Closes the connection, and cancels every call that uses it."""
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


async def _each(texts: Iterable[TextOrIds]) -> AsyncIterator[TextOrIds]:
    for text in texts:
        yield text


@contextmanager
def _client_errors(address: str) -> Iterator[None]:
    try:
        yield
    except aio.AioRpcError as error:
        raise ClientError.from_rpc(error, address) from error
