"""Bytes that are no message are the caller's mistake: gRPC by itself calls them an internal error."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc import aio

from server.errors import InvalidRequest
from server.service.calls import Context, send
from server.service.handlers import Continuation, Handler, behaviour_of, remade
from server.service.status import abort, request_id_of

_NO_MESSAGE = InvalidRequest("the bytes that came are no message of this method", field="")


class _Malformed:
    """Stands for a message that could not be read."""


class ParsingInterceptor(aio.ServerInterceptor):
    """Answers what cannot be read with INVALID_ARGUMENT. Owned by the endpoint; holds nothing."""

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The method's handler, which never gets what is no message."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        wrap = _of_stream if handler.request_streaming else _of_one
        parse = _tolerant(handler.request_deserializer)
        return remade(handler, wrap(behaviour_of(handler)), parse, handler.response_serializer)


def _tolerant(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse_or_not(raw: bytes) -> Any:
        try:
            return parse(raw)
        except Exception:  # protobuf raises several kinds, some for text that is no UTF-8
            return _Malformed()

    return parse_or_not


def _of_one(inner: Any) -> Any:
    """A handler of one message."""

    async def handle(message: Any, context: Context) -> Any:
        if isinstance(message, _Malformed):
            await _refuse(context)
        return await inner(message, context)

    return handle


def _of_stream(inner: Any) -> Any:
    """A handler of several messages, which are read as it asks for them."""

    async def readable(messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for message in messages:
            if isinstance(message, _Malformed):
                raise _NO_MESSAGE
            yield message

    async def handle(messages: AsyncIterator[Any], context: Context) -> None:
        try:
            answering = inner(readable(messages), context)
            if inspect.isasyncgen(answering):
                async for answer in answering:
                    await send(context, answer)  # type: ignore[arg-type]
            else:
                await answering
        except InvalidRequest:  # of a service that does not know it
            await _refuse(context)

    return handle


async def _refuse(context: Context) -> None:
    await abort(context, _NO_MESSAGE, request_id_of(context.invocation_metadata()))
