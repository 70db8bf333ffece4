"""The one interceptor of the gRPC port: it opens, checks, parses, counts and ends every RPC.

gRPC alone would report bytes that are not a message as an internal error, and build messages with any number
of elements.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import Message
from grpc import aio

from seq2seq_serve.server.errors import InvalidRequest
from seq2seq_serve.server.service.access import Access
from seq2seq_serve.server.service.calls import Call, Calls
from seq2seq_serve.server.service.status import abort
from seq2seq_serve.server.service.wire import MAX_FIELDS, TooManyElements, check_elements

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in the types only
Context: TypeAlias = "aio.ServicerContext[Any, Any]"
Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]]

# A field takes at least two bytes, so a message of this length cannot have too many, and is not checked.
_SMALL_BYTES = 2 * MAX_FIELDS


class Interceptor(aio.ServerInterceptor):
    """Wraps every handler, which gets a `Call` in the place of gRPC's context.

    Owned by the endpoint. Invariants: a call is counted once and answered with a status of the table in
    `server.service.status`, whatever its handler raises; other tasks run between the parsing of two large
    messages, however many messages come at once.

    Args:
        calls: Opens every call.
        access: Refuses callers without the right to call a method.
    """

    def __init__(self, calls: Calls, access: Access) -> None:
        self._calls = calls
        self._access = access
        self._large = asyncio.Lock()
        self._handlers: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Returns the wrapped handler of a method; None where the method does not exist."""
        path = handler_call_details.method
        if path not in self._handlers:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            self._handlers[path] = self._wrapped(path, handler)
        return self._handlers[path]

    def _wrapped(self, path: str, handler: Handler) -> Handler:
        _, service, method = path.split("/")
        ways = ("unary", "stream")
        kind = f"{ways[handler.request_streaming]}_{ways[handler.response_streaming]}"
        inner, make = getattr(handler, kind), getattr(grpc, f"{kind}_rpc_method_handler")
        message_class = handler.request_deserializer.__self__  # type: ignore[union-attr]  # of FromString

        async def answer(given: Any, call: Call) -> Any:
            self._access.check(path, call.caller)
            call.check_id()
            message: Any
            if handler.request_streaming:
                message = self._parsed_stream(given, message_class)
            else:
                if len(given) > _SMALL_BYTES:
                    self._calls.hold(call, len(given))
                message = await self._parsed(given, message_class)
            del given  # a long call does not keep it
            answering = inner(message, call)
            del message
            if not hasattr(answering, "__aiter__"):
                return await answering
            async for each in answering:
                await call.send(each)
            return None

        async def handle(given: Any, context: Context) -> Any:
            call = self._calls.open(
                service,
                method,
                metadata=context.invocation_metadata(),
                peer=context.peer(),
                remaining_seconds=context.time_remaining(),
                write=context.write,
            )
            answering = answer(given, call)
            del given
            return await self._ended(answering, call, context)

        wrapped: Handler = make(handle, None, handler.response_serializer)
        return wrapped

    async def _ended(self, answering: Awaitable[Any], call: Call, context: Context) -> Any:
        """Returns the answer of a call. An error that its handler raises becomes the call's status."""
        outcome: Any = None
        try:
            outcome = await self._calls.settle(call, answering)
            if not isinstance(outcome, Exception):
                return outcome
            await abort(context, outcome, call.request_id)
        except (asyncio.CancelledError, aio.AbortError) as error:
            # gRPC keeps the error that ended a call. Without this, the error's frames would keep the caller's
            # message alive until the garbage collector runs.
            error.__context__ = None
            raise error.with_traceback(None) from None
        finally:
            del outcome  # an error's frames refer to it and to the message
            self._calls.close_call(call)

    async def _parsed(self, raw: bytes, message_class: type[Message]) -> Message:
        """Returns the message that the bytes hold.

        Raises:
            InvalidRequest: The bytes are not a message, or it has too many elements.
        """
        if len(raw) <= _SMALL_BYTES:
            return _parse(raw, message_class)
        async with self._large:
            await asyncio.sleep(0)  # lets other tasks run; other large messages wait for the lock
            return _parse(raw, message_class)

    async def _parsed_stream(
        self, raws: AsyncIterator[bytes], message_class: type[Message]
    ) -> AsyncIterator[Message]:
        async for raw in raws:
            yield await self._parsed(raw, message_class)


def _parse(raw: bytes, message_class: type[Message]) -> Message:
    try:
        if len(raw) > _SMALL_BYTES:
            check_elements(raw, message_class.DESCRIPTOR)  # type: ignore[arg-type]  # which is upb's own class
        message = message_class.FromString(raw)
        message.DiscardUnknownFields()  # they would be copied with what is known
        return message
    except TooManyElements as error:
        raise InvalidRequest(f"{error}: send a smaller request", field="") from error
    except Exception as error:  # protobuf raises several kinds, some for text that is not UTF-8
        raise InvalidRequest("the bytes are not a message of this method", field="") from error
