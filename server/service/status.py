"""The one table from our errors to gRPC statuses, and the details of each.

The details are a `google.rpc.Status` (error_details.proto) in the trailer that `grpcio-status` reads.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc import aio

from seq2seq_serve.server.errors import (
    BlankSource,
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    Forbidden,
    InvalidRequest,
    LoadFailed,
    Overloaded,
    ServerError,
    TooLarge,
    Unauthenticated,
    Unavailable,
    UnknownModel,
)

REQUEST_ID = "x-request-id"
ERROR_DOMAIN = "seq2seq-serve"
_DETAILS = "grpc-status-details-bin"
_PUSHBACK = "grpc-retry-pushback-ms"  # gRFC A6: when the client may retry

BUG_TEXT = "internal error: the server's log has the details under this request's id"

# Maps an error class to its status, and to the reason that programs can compare.
_STATUSES: dict[type[ServerError], tuple[grpc.StatusCode, str]] = {
    InvalidRequest: (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
    BlankSource: (grpc.StatusCode.INVALID_ARGUMENT, "BLANK_SOURCE"),
    TooLarge: (grpc.StatusCode.INVALID_ARGUMENT, "TOO_LARGE"),
    Unauthenticated: (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"),
    Forbidden: (grpc.StatusCode.PERMISSION_DENIED, "FORBIDDEN"),
    UnknownModel: (grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL"),
    LoadFailed: (grpc.StatusCode.FAILED_PRECONDITION, "LOAD_FAILED"),
    Overloaded: (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED"),
    Unavailable: (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE"),
    DeadlineExceeded: (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    Cancelled: (grpc.StatusCode.CANCELLED, "CANCELLED"),
    EngineFailed: (grpc.StatusCode.INTERNAL, "ENGINE_FAILED"),
}
_MAX_NAME = 200  # characters
_MAX_TEXT = 1000  # characters: headers are limited, and hold the text twice
_BUG = (grpc.StatusCode.INTERNAL, "INTERNAL")

Trailers = tuple[tuple[str, str | bytes], ...]


async def abort(context: Any, error: Exception, request_id: str) -> None:
    """Ends a call with the status of an error.

    Raises:
        AbortError: Always; gRPC expects it from the handler.
        CancelledError: The caller has left.
    """
    code, text = status_of(error)
    try:
        await context.abort(code, text, trailers_of(error, request_id))
    except aio.InternalError as gone:  # gRPC fails the sending before it cancels the handler
        raise asyncio.CancelledError from gone


def status_of(error: Exception) -> tuple[grpc.StatusCode, str]:
    """Returns the status and text for the caller. The text of a bug, an error not of ours, stays here."""
    if isinstance(error, ServerError):
        return _STATUSES[type(error)][0], str(error)[:_MAX_TEXT]
    return _BUG[0], BUG_TEXT


def reason_of(error: Exception) -> str:
    """Returns the name of an error that programs can compare."""
    return _STATUSES[type(error)][1] if isinstance(error, ServerError) else _BUG[1]


def trailers_of(error: Exception, request_id: str) -> Trailers:
    """Returns the trailing metadata of a refused call: the request's id, the rich status, and a push-back."""
    code, text = status_of(error)
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=reason_of(error), domain=ERROR_DOMAIN),
        error_details_pb2.RequestInfo(request_id=request_id),
    ]
    trailers: Trailers = ((REQUEST_ID, request_id),)
    if isinstance(error, InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=text)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, UnknownModel):
        name = error.name + (f"/{error.version}" if error.version else "")
        details.append(
            error_details_pb2.ResourceInfo(
                resource_type="model", resource_name=name[:_MAX_NAME], description=text
            )
        )
    if isinstance(error, Overloaded):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after_seconds * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        trailers += ((_PUSHBACK, str(delay.ToMilliseconds())),)
    status = status_pb2.Status(code=code.value[0], message=text)
    for detail in details:
        status.details.add().Pack(detail)
    return (*trailers, (_DETAILS, status.SerializeToString()))
