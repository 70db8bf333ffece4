"""The client for asyncio: the methods of `Client`, awaited."""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Sequence,
)
from functools import partial
from operator import attrgetter
from types import ModuleType, TracebackType
from typing import Any, ClassVar, Concatenate, ParamSpec, Self

from grpc import aio

from seq2seq_serve.client import live, rpcs
from seq2seq_serve.client.errors import ClientError, client_errors
from seq2seq_serve.client.files.memory import TranslationMemory
from seq2seq_serve.client.many import (
    DEFAULT_GIVE_UP_SECONDS,
    DEFAULT_IN_FLIGHT,
    Dispatcher,
    answers,
)
from seq2seq_serve.client.rpcs import Answer, Connection, Outcome, Rpc, Translated, documented
from seq2seq_serve.client.wire import Item, item_maker
from seq2seq_serve.protos.options import Options, options_of
from seq2seq_serve.protos.seq2seq_v1_pb2 import FinishSegment, TurnDetection
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
        async for answer in client._stream(prepare(client, *args, **kwargs)):
            yield answer

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
        memory: TranslationMemory | None = None,
    ) -> AsyncGenerator[Translated]:
        """Works like `Client.translate_many`; `texts` may be an asynchronous iterable, too."""
        check_texts(texts)
        prepare = item_maker(model, options_of(options))
        dispatcher = Dispatcher(prepare, in_flight, give_up_seconds, memory, attrgetter("kind"))
        send = partial(self._send_items, model=model, timeout_seconds=timeout_seconds)
        return answers(texts, dispatcher, send)

    def transcribe_live(
        self,
        chunks: AsyncIterable[bytes | FinishSegment],
        *,
        model: str = "",
        options: Options | None = None,
        encoding: live.Encoding = "file",
        sample_rate: int = 16_000,
        num_channels: int = 1,
        turn_detection: TurnDetection | None = None,
        interval_seconds: float | None = None,
        segments_only: bool = False,
        begin_seconds: float = 0.0,
        timeout_seconds: float | None = None,
        request_id: str = "",
    ) -> AsyncGenerator[live.LiveEvent]:
        """Sends a sound while it comes; yields text as soon as it is certain, segments, and the whole answer.

        Nothing is sent again: if the connection breaks, the iterator raises, and what it has yielded stays
        right. Closing the iterator, or cancelling its task, ends the call and leaves `chunks` where it is.

        Args:
            chunks: The bytes of the sound, in pieces of any length. It may be endless or slow; a
                `FinishSegment()` among them ends the present segment, as a pause does. Its error ends the
                call, and is raised.
            model: The name of a model that reads sounds; empty means the server's first model.
            options: As for `generate`: `source_language`, `task`, `prompt`, and others for one target.
            encoding: "file" for a file or stream with a header (WAV, FLAC, OGG, MP3, WebM); "pcm_s16",
                "pcm_f32" (both little-endian), "mulaw" or "alaw" for samples without one.
            sample_rate: Of samples without a header.
            num_channels: Of samples without a header.
            turn_detection: When segments begin and end; None means the server's defaults.
            interval_seconds: The new speech after which the text is decoded again; None means the server's
                own.
            segments_only: Yields no text before a segment ends, and decodes several segments at once, as
                for a file.
            begin_seconds: With `segments_only`, leaves out segments before this time, to continue a
                transcript of the same sound.
            timeout_seconds: Deadline of the call; None, also by default, means that there is none.
            request_id: The id of the call in the server's log; empty means that the server creates one.

        Raises:
            ClientError: The call fails.
            ValueError: The encoding does not have such a name, or an option does not fit.
        """
        start = live.start_message(
            model=model,
            options=options,
            encoding=encoding,
            sample_rate=sample_rate,
            num_channels=num_channels,
            turn_detection=turn_detection,
            interval_seconds=interval_seconds,
            segments_only=segments_only,
            begin_seconds=begin_seconds,
        )
        return live.transcribe(self, start, chunks, timeout_seconds, request_id)

    async def _send(self, rpc: Rpc[Answer]) -> Answer:
        try:
            with client_errors(self.address):
                return rpc.read(await rpc.method(rpc.request, **rpc.settings))
        except ClientError as error:
            if not error.may_be_by_health_check:
                raise
        with client_errors(self.address):
            return rpc.read(await rpc.direct(rpc.request, **rpc.settings))

    async def _stream(self, rpc: Rpc[Answer]) -> AsyncGenerator[Answer]:
        for known in rpc.first:
            yield known
        for each in (rpc, rpc.directly):
            call = each.method(each.request, **each.settings)
            try:
                with client_errors(self.address):
                    async for answer in call:
                        yield each.read(answer)
                return
            except ClientError as error:
                if not error.may_be_by_health_check or each is not rpc:
                    raise
            finally:
                call.cancel()

    async def _send_items(
        self, items: Sequence[Item], *, model: str, timeout_seconds: float | None = None
    ) -> AsyncGenerator[Outcome]:
        rpc = self._rpc_of_items(items, model=model, timeout_seconds=timeout_seconds)
        if len(items) == 1:
            for outcome in await self._send(rpc):
                yield outcome
            return
        async for outcomes in self._stream(rpc):
            for outcome in outcomes:
                yield outcome

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
