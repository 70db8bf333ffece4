"""Refuses bytes that are not a message, or have too many elements, as the caller's mistake.

gRPC by itself reports the former as an internal error, and builds the latter.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc import aio

from server.errors import InvalidRequest
from server.service.calls import Context, send
from server.service.handlers import Continuation, Handler, behaviour_of, remade
from server.service.status import abort, request_id_of
from server.service.wire import MAX_FIELDS, TooManyElements, check_elements

# A field takes two bytes or more, so a message of this length cannot have too many, and is not walked over.
_SMALL_BYTES = 2 * MAX_FIELDS


class ParsingInterceptor(aio.ServerInterceptor):
    """Answers bytes that cannot be read with INVALID_ARGUMENT.

    Owned by the endpoint. Invariant: between two large messages other tasks have their turn, however many
    messages have come at once.
    """

    def __init__(self) -> None:
        self._large = asyncio.Lock()

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The method's handler, which only gets messages."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        message_class = handler.request_deserializer.__self__  # type: ignore[attr-defined]  # of FromString
        wrap = self._of_stream if handler.request_streaming else self._of_one
        behaviour = wrap(behaviour_of(handler), message_class)
        return remade(handler, behaviour, response_serializer=handler.response_serializer)

    async def _parsed(self, raw: bytes, message_class: type[Message]) -> Message:
        """The message of these bytes.

        Raises:
            InvalidRequest: They are not one, or it has too many elements.
        """
        if len(raw) <= _SMALL_BYTES:
            return _parse(raw, message_class)
        async with self._large:
            await asyncio.sleep(0)  # a turn for others; messages that come meanwhile wait for the lock
            return _parse(raw, message_class)

    def _of_one(self, inner: Any, message_class: type[Message]) -> Any:
        """A handler of one message."""

        async def handle(raw: bytes, context: Context) -> Any:
            try:
                message = await self._parsed(raw, message_class)
            except InvalidRequest as error:
                await _refuse(context, error)
            del raw  # the call may take long
            return await inner(message, context)

        return handle

    def _of_stream(self, inner: Any, message_class: type[Message]) -> Any:
        """A handler of several messages, which are read as it asks for them."""

        async def readable(raws: AsyncIterator[bytes]) -> AsyncIterator[Message]:
            async for raw in raws:
                yield await self._parsed(raw, message_class)

        async def handle(raws: AsyncIterator[bytes], context: Context) -> None:
            try:
                answering = inner(readable(raws), context)
                if inspect.isasyncgen(answering):
                    async for answer in answering:
                        await send(context, answer)  # type: ignore[arg-type]
                else:
                    await answering
            except InvalidRequest as error:  # of a service that does not know it
                await _refuse(context, error)

        return handle


def _parse(raw: bytes, message_class: type[Message]) -> Message:
    try:
        if len(raw) > _SMALL_BYTES:
            check_elements(raw, message_class.DESCRIPTOR)  # type: ignore[arg-type]  # which is upb's own class
        return message_class.FromString(raw)
    except TooManyElements as error:
        raise InvalidRequest(f"{error}: send less at once", field="") from error
    except Exception as error:  # protobuf raises several kinds, some for text that is not UTF-8
        raise InvalidRequest("the bytes that came are no message of this method", field="") from error


async def _refuse(context: Context, error: InvalidRequest) -> None:
    await abort(context, error, request_id_of(context.invocation_metadata()))
