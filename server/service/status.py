"""The one table from our errors to gRPC statuses, and the details of each.

The details are a `google.rpc.Status` (error_details.proto) in the trailer that `grpcio-status` reads.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

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
    SoundTooLong,
    TooLarge,
    Unauthenticated,
    Unavailable,
    UnknownModel,
    UnknownPage,
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
    SoundTooLong: (grpc.StatusCode.INVALID_ARGUMENT, "SOUND_TOO_LONG"),
    TooLarge: (grpc.StatusCode.INVALID_ARGUMENT, "TOO_LARGE"),
    Unauthenticated: (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"),
    Forbidden: (grpc.StatusCode.PERMISSION_DENIED, "FORBIDDEN"),
    UnknownModel: (grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL"),
    UnknownPage: (grpc.StatusCode.NOT_FOUND, "UNKNOWN_PAGE"),
    LoadFailed: (grpc.StatusCode.FAILED_PRECONDITION, "LOAD_FAILED"),
    Overloaded: (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED"),
    Unavailable: (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE"),
    DeadlineExceeded: (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    Cancelled: (grpc.StatusCode.CANCELLED, "CANCELLED"),
    EngineFailed: (grpc.StatusCode.INTERNAL, "ENGINE_FAILED"),
}
_MAX_NAME = 200  # characters
_MAX_TEXT = 1000  # characters: headers are limited, and hold the text twice


class Status(NamedTuple):
    """An error as the server tells it to its caller.

    Attributes:
        code: Its status in gRPC.
        text: For people.
        reason: A name that programs can compare.
        field: The path of the offending field in the request; None for other errors than InvalidRequest.
    """

    code: grpc.StatusCode
    text: str
    reason: str
    field: str | None = None


Trailers = tuple[tuple[str, str | bytes], ...]


async def abort(context: Any, error: Exception, request_id: str) -> None:
    """Ends a call with the status of an error.

    Raises:
        AbortError: Always; gRPC expects it from the handler.
        CancelledError: The caller has left.
    """
    code, text, *_ = status_of(error)
    try:
        await context.abort(code, text, trailers_of(error, request_id))
    except aio.InternalError as gone:  # gRPC fails the sending before it cancels the handler
        raise asyncio.CancelledError from gone


def status_of(error: Exception) -> Status:
    """Returns what the caller learns of an error. The text of a bug, an error not of ours, stays here."""
    if not isinstance(error, ServerError):
        return Status(grpc.StatusCode.INTERNAL, BUG_TEXT, "INTERNAL")
    code, reason = _STATUSES[type(error)]
    field = error.field if isinstance(error, InvalidRequest) else None
    return Status(code, str(error)[:_MAX_TEXT], reason, field)


def trailers_of(error: Exception, request_id: str) -> Trailers:
    """Returns the trailing metadata of a refused call: the request's id, the rich status, and a push-back."""
    code, text, reason, field = status_of(error)
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=reason, domain=ERROR_DOMAIN),
        error_details_pb2.RequestInfo(request_id=request_id),
    ]
    trailers: Trailers = ((REQUEST_ID, request_id),)
    if field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=text)
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
