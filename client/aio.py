"""The client for asyncio: the methods of `Client`, awaited."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable
from functools import partial
from types import ModuleType, TracebackType
from typing import Any, ClassVar, Concatenate, ParamSpec, Self

from grpc import aio

from seq2seq_serve.client import rpcs
from seq2seq_serve.client.errors import ClientError, client_errors
from seq2seq_serve.client.many import (
    DEFAULT_GIVE_UP_SECONDS,
    DEFAULT_IN_FLIGHT,
    Dispatcher,
    answers,
)
from seq2seq_serve.client.rpcs import Answer, Connection, Rpc, Translated, documented
from seq2seq_serve.protos.options import Options, options_of
from seq2seq_serve.protos.sources import Sources, check_texts

Arguments = ParamSpec("Arguments")


def _awaiting(
    prepare: Callable[Concatenate[Connection, Arguments], Rpc[Answer]],
) -> Callable[Concatenate[AsyncClient, Arguments], Coroutine[Any, Any, Answer]]:
    """Makes the method of `AsyncClient` that sends an RPC and awaits its answer."""

    async def method(client: AsyncClient, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
        return await client._send(prepare(client, *args, **kwargs))

    return documented(method, prepare)


def _streaming(
    prepare: Callable[Concatenate[Connection, Arguments], Rpc[Answer]],
) -> Callable[Concatenate[AsyncClient, Arguments], AsyncIterator[Answer]]:
    """Makes the method of `AsyncClient` that sends an RPC and yields its answers."""

    async def method(
        client: AsyncClient, /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> AsyncIterator[Answer]:
        rpc = prepare(client, *args, **kwargs)
        for known in rpc.first:
            yield known
        for each in (rpc, rpc.directly):
            call = each.method(each.request, **each.settings)
            try:
                with client_errors(client.address):
                    async for answer in call:
                        yield each.read(answer)
                return
            except ClientError as error:
                if not error.is_by_health_check or each is not rpc:
                    raise
            finally:
                call.cancel()

    return documented(method, prepare, "AsyncIterator[{}]")


class AsyncClient(Connection):
    """A connection to a server, for one event loop. Use it as an async context manager, or close it.

    Every method raises `ClientError` if the call fails, and `ValueError` for a text that cannot be sent.
    Cancelling the task that awaits a call cancels the call. The arguments are those of `Client`.

    Raises:
        RuntimeError: No event loop is running.
    """

    _grpc: ClassVar[ModuleType] = aio
    _needs_loop: ClassVar[bool] = True

    translate = _awaiting(rpcs.translate)
    generate = _awaiting(rpcs.generate)
    stream = _streaming(rpcs.stream)
    generate_batch = _streaming(rpcs.generate_batch)
    score = _awaiting(rpcs.score)
    models = _awaiting(rpcs.models)
    model = _awaiting(rpcs.model)
    versions = _awaiting(rpcs.versions)
    load = _awaiting(rpcs.load)
    unload = _awaiting(rpcs.unload)
    health = _awaiting(rpcs.health)

    def translate_many(
        self,
        texts: Iterable[Sources] | AsyncIterable[Sources],
        *,
        model: str = "",
        options: Options | None = None,
        in_flight: int = DEFAULT_IN_FLIGHT,
        give_up_seconds: float = DEFAULT_GIVE_UP_SECONDS,
        timeout_seconds: float | None = None,
    ) -> AsyncGenerator[Translated]:
        """Works like `Client.translate_many`; `texts` may be an asynchronous iterable, too."""
        check_texts(texts)
        prepare = partial(
            rpcs.generate, self, model=model, options=options_of(options), timeout_seconds=timeout_seconds
        )
        return answers(texts, Dispatcher(prepare, in_flight, give_up_seconds), self._send)

    async def _send(self, rpc: Rpc[Answer]) -> Answer:
        try:
            with client_errors(self.address):
                return rpc.read(await rpc.method(rpc.request, **rpc.settings))
        except ClientError as error:
            if not error.is_by_health_check:
                raise
        with client_errors(self.address):
            return rpc.read(await rpc.direct(rpc.request, **rpc.settings))

    async def close(self) -> None:
        """Closes the connection and cancels its calls."""
        for channel in self._channels:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
