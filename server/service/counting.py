"""Counts every RPC of every service, also those that no handler of ours sees, as gRPC's middlewares do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
from grpc import aio

from server.metrics import Metrics, RpcSeries
from server.service.calls import Context, code_of_leaving
from server.service.handlers import Continuation, Handler, behaviour_of, remade


class CountingInterceptor(aio.ServerInterceptor):
    """Stands before all others. Owned by the endpoint.

    Args:
        metrics: Are told of every RPC to a method that there is; of others the name is the caller's own.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._series: dict[str, RpcSeries] = {}

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The method's handler, counted."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        series = self._series_of(handler_call_details.method, handler)
        return remade(
            handler,
            _counted(behaviour_of(handler), series),
            _noting(handler.request_deserializer, series.note_received),
            _noting(handler.response_serializer, series.note_sent),
        )

    def _series_of(self, path: str, handler: Handler) -> RpcSeries:
        if path not in self._series:
            _, service, method = path.split("/")
            self._series[path] = self._metrics.rpc_series(
                service,
                method,
                is_stream_in=handler.request_streaming,
                is_stream_out=handler.response_streaming,
            )
        return self._series[path]


def _counted(inner: Any, series: RpcSeries) -> Any:
    async def handle(message: Any, context: Context) -> Any:
        series.note_start()
        arrival = time.monotonic()
        remaining: float | None = context.time_remaining()
        code = grpc.StatusCode.UNKNOWN
        try:
            answering = inner(message, context)
            del message
            answer = await answering
            code = grpc.StatusCode.OK
            return answer
        except (asyncio.CancelledError, aio.AbortError, aio.InternalError) as error:
            # An error of the last kind: what the handler sent came too late for a caller who had gone.
            deadline = None if remaining is None else arrival + remaining
            code = context.code() or code_of_leaving(arrival, deadline)
            # gRPC keeps the error that ended a call. Without this, its frames would keep the caller's message
            # until all garbage is collected.
            error.__context__ = None
            raise error.with_traceback(None) from None
        finally:
            series.note_end(code.name, time.monotonic() - arrival)

    return handle


def _noting(convert: Callable[[Any], Any] | None, note: Callable[[], None]) -> Callable[[Any], Any]:
    def noted(message: Any) -> Any:
        note()
        return message if convert is None else convert(message)

    return noted
