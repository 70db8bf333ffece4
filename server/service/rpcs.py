"""The handlers of the gRPC port: each RPC is opened, checked, parsed, counted and ended here.

gRPC alone would report bytes that are not a message as an internal error, and build messages with any number
of elements. It would also read a unary call's message before its handler can look at the caller's rights. So
all handlers are those of streams, and read the message of a unary call themselves. As in gRPC's own handlers
of unary calls, the end of the caller's messages is not waited for.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc import aio

from seq2seq_serve.server.errors import InvalidRequest
from seq2seq_serve.server.service.access import NEEDS
from seq2seq_serve.server.service.calls import SMALL_REQUEST_BYTES, Calls, RemoteCall
from seq2seq_serve.server.service.status import abort
from seq2seq_serve.server.service.wire import TooManyElements, check_elements
from seq2seq_serve.server.telemetry.record import PREDICT

# Calls of Triton's clients that this server lacks, by a part of their names.
_UNSUPPORTED = {
    "SharedMemory": "shared memory is not supported",
    "TraceSetting": "settings of traces are not supported",
    "LogSettings": "settings of the log are not supported",
}

_WATCH = "grpc.health.v1.Health.Watch"

# gRPC hands over calls whose callers have left, and says so some turns of the event loop later. Once callers
# leave within `_HASTY_SECONDS`, new calls wait these turns, because it costs twice as much to open them.
_HASTY_SECONDS, _WARY_SECONDS, _WARY_TURNS = 0.05, 1.0, 5


class Unsupported(grpc.GenericRpcHandler):
    """Refuses the calls of a service that this server lacks, each with its reason.

    Args:
        service: Has none of these calls among its methods.
    """

    def __init__(self, service: ServiceDescriptor) -> None:
        self._prefix = f"/{service.full_name}/"

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Returns the handler of such a call, which reads no message; None of others."""
        path = details.method or ""
        reasons = [reason for part, reason in _UNSUPPORTED.items() if part in path]
        if not path.startswith(self._prefix) or not reasons:
            return None

        async def refuse(_: AsyncIterator[bytes], context: aio.ServicerContext[Any, Any]) -> None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, reasons[0])

        handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_unary_rpc_method_handler(refuse)
        return handler


class Rpcs:
    """Makes the handlers of services, whose methods get a `RemoteCall` in the place of gRPC's context.

    Owned by the endpoint. Invariants: a call is counted once and answered with a status of the table in
    `server.service.status`, whatever its method raises; nothing is read of a call without the right to its
    method; other tasks run between the parsing of two large messages, however many messages come at once.

    Args:
        calls: Opens every call.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._large = asyncio.Lock()
        self._left_at = -math.inf  # the last time when a caller left as soon as it had called

    def handlers(self, service: ServiceDescriptor, servicer: object) -> grpc.GenericRpcHandler:
        """Returns the handlers of the service's methods that `servicer` has."""
        handlers = {
            method.name: self._handler(method, getattr(servicer, method.name))
            for method in service.methods
            if hasattr(servicer, method.name)
        }
        return grpc.method_handlers_generic_handler(service.full_name, handlers)

    def _handler(
        self, method: MethodDescriptor, answer: Callable[[Any, RemoteCall], Any]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        service, name = method.containing_service.full_name, method.name
        message_class, calls = GetMessageClass(method.input_type), self._calls
        is_stream = method.server_streaming
        has_sources = NEEDS.get(f"/{service}/{name}") == PREDICT
        lasts = method.client_streaming or method.full_name == _WATCH  # as long as its caller wants
        arrivals = calls.large_messages if has_sources else calls.small_messages

        async def work(
            raws: AsyncIterator[bytes], context: aio.ServicerContext[Any, Any], call: RemoteCall
        ) -> Any:
            calls.access.check(f"/{service}/{name}", call.caller)
            if call.refusal is not None:
                raise call.refusal
            message: Any
            if method.client_streaming:
                message = self._parsed_stream(raws, message_class)
            else:
                raw = await arrivals.only_message(context.read, call.caller.name)
                if len(raw) <= SMALL_REQUEST_BYTES:
                    message = _parse(raw, message_class)
                else:
                    calls.hold(call, len(raw))
                    message = await self.parse_large(raw, message_class)
                del raw  # a long call does not keep it
            if lasts:
                calls.let_last(call)
            answering = answer(message, call)
            del message
            if not hasattr(answering, "__aiter__"):
                answered = await answering
                if answered is not None and (num_bytes := answered.ByteSize()) > SMALL_REQUEST_BYTES:
                    call.check_answer_bytes(num_bytes)
                    calls.hold(call, num_bytes)
                return answered
            async for each in answering:
                await call.send(each)
            return None

        async def handle(raws: AsyncIterator[bytes], context: aio.ServicerContext[Any, Any]) -> Any:
            """Returns the answer of a call. An error that its method raises becomes the call's status."""
            if time.monotonic() - self._left_at < _WARY_SECONDS:
                try:
                    for _ in range(_WARY_TURNS):
                        await asyncio.sleep(0)
                except asyncio.CancelledError:
                    self._left_at = time.monotonic()
                    raise
            call = self._calls.open(
                service,
                name,
                metadata=context.invocation_metadata(),
                peer=context.peer(),
                remaining_seconds=context.time_remaining(),
                write=context.write,
                writes_bytes=is_stream,
            )
            outcome: Any = None
            try:
                outcome = await self._calls.run(call, work(raws, context, call))
                if not isinstance(outcome, Exception):
                    return outcome
                await abort(context, outcome, call.request_id)
            except (asyncio.CancelledError, aio.AbortError) as error:
                # gRPC keeps the error that ended a call. Without this, the error's frames would keep the
                # caller's message alive until the garbage collector runs.
                error.__context__ = None
                if isinstance(error, asyncio.CancelledError):
                    now = time.monotonic()
                    self._left_at = now if now - call.arrival < _HASTY_SECONDS else self._left_at
                raise error.with_traceback(None) from None
            finally:
                del outcome  # an error's frames refer to it and to the message
                self._calls.close_call(call)
                if call.held:  # gRPC keeps the answer until the caller takes it
                    context.add_done_callback(lambda _: self._calls.let_go(call))  # type: ignore[arg-type]

        make = grpc.stream_stream_rpc_method_handler if is_stream else grpc.stream_unary_rpc_method_handler
        # The messages of streams are bytes already.
        serialize = None if is_stream else GetMessageClass(method.output_type).SerializeToString
        handler: grpc.RpcMethodHandler[Any, Any] = make(handle, None, serialize)
        return handler

    async def parse_large(self, raw: bytes, message_class: type[Message]) -> Message:
        """Returns the message that the bytes hold; raises InvalidRequest as `_parse`."""
        async with self._large:
            await asyncio.sleep(0)  # lets other tasks run; other large messages wait for the lock
            return _parse(raw, message_class)

    async def _parsed_stream(
        self, raws: AsyncIterator[bytes], message_class: type[Message]
    ) -> AsyncIterator[Message]:
        async for raw in raws:
            if len(raw) <= SMALL_REQUEST_BYTES:
                yield _parse(raw, message_class)
            else:
                yield await self.parse_large(raw, message_class)


def _parse(raw: bytes, message_class: type[Message]) -> Message:
    """Returns the message that the bytes hold.

    Raises:
        InvalidRequest: The bytes are not a message, or it has too many elements.
    """
    try:
        if len(raw) > SMALL_REQUEST_BYTES:
            check_elements(raw, message_class.DESCRIPTOR)  # type: ignore[arg-type]  # which is upb's own class
        message = message_class.FromString(raw)
        message.DiscardUnknownFields()  # they would be copied with what is known
        return message
    except TooManyElements as error:
        raise InvalidRequest(f"{error}: send a smaller request", field="") from error
    except Exception as error:  # protobuf raises several kinds, some for text that is not UTF-8
        raise InvalidRequest("the bytes are not a message of this method", field="") from error
