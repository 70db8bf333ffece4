"""The error that a failed call raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status  # type: ignore[import-untyped]

_UNHEALTHY = "backend unhealthy"  # what gRPC reports if the health check answers NOT_SERVING
_REQUEST_ID = "x-request-id"
_BLANK_SOURCE = "BLANK_SOURCE"  # the reason in the server's ErrorInfo


@dataclass(frozen=True)
class FieldViolation:
    """One field of a request that the server refused."""

    field: str
    description: str


class ClientError(Exception):
    """A call failed.

    Attributes:
        code: The name of the gRPC status, for example `INVALID_ARGUMENT`.
        message: The server's message, or why the client could not reach a server.
        reason: The server's name for the error, for programs to compare; empty if the server sent none.
        field_violations: The fields of the request that the server refused.
        retry_after_seconds: How long an overloaded server asks the caller to wait; None if it does not ask.
        request_id: The id of the call in the server's log; empty if the client could not reach a server.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        reason: str = "",
        field_violations: tuple[FieldViolation, ...] = (),
        retry_after_seconds: float | None = None,
        request_id: str = "",
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.reason = reason
        self.field_violations = field_violations
        self.retry_after_seconds = retry_after_seconds
        self.request_id = request_id

    def followed_by(self, event: str) -> ClientError:
        """Returns the same error with `event` added to its message."""
        return ClientError(
            self.code,
            f"{self.message}; {event}",
            reason=self.reason,
            field_violations=self.field_violations,
            retry_after_seconds=self.retry_after_seconds,
            request_id=self.request_id,
        )

    @property
    def is_about_the_text(self) -> bool:
        """Whether the server refused this text, and not an option that all texts share.

        The server names the field `options` as a whole if the answer would be too long.
        """
        return self.code == "INVALID_ARGUMENT" and all(
            violation.field == "options" or violation.field.startswith("sources")
            for violation in self.field_violations
        )

    @property
    def is_blank_source(self) -> bool:
        """Whether the text has only white space and invisible characters."""
        return self.reason == _BLANK_SOURCE

    @classmethod
    def from_value_error(cls, error: ValueError) -> ClientError:
        """Returns the error for a text that the client cannot send."""
        message = str(error)
        if isinstance(error, UnicodeEncodeError):
            message = f"not valid UTF-8 at character {error.start + 1}"
        return cls("INVALID_ARGUMENT", message)

    @classmethod
    def from_rpc(cls, error: grpc.RpcError, address: str) -> ClientError:
        """Returns gRPC's error as a `ClientError`, with the details from the server's trailers."""
        code, message = error.code(), error.details() or ""
        call: Any = error  # gRPC's errors are also calls, but its types do not declare it
        trailers = dict(call.trailing_metadata() or ())
        request_id = str(trailers.get(_REQUEST_ID, ""))
        if code is grpc.StatusCode.UNAVAILABLE and not request_id:
            return cls(code.name, _unreached(address, message))
        violations: tuple[FieldViolation, ...] = ()
        retry_after_seconds, reason = None, ""
        try:
            status = rpc_status.from_call(error)
        except (
            ValueError
        ):  # gRPC ended the call, for example at its deadline, as the server's details came in
            status = None
        for detail in status.details if status is not None else ():
            if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
                bad_request = error_details_pb2.BadRequest.FromString(detail.value)
                violations += tuple(
                    FieldViolation(violation.field, violation.description)
                    for violation in bad_request.field_violations
                )
            elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                delay = error_details_pb2.RetryInfo.FromString(detail.value).retry_delay
                retry_after_seconds = delay.ToTimedelta().total_seconds()
            elif detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                reason = error_details_pb2.ErrorInfo.FromString(detail.value).reason
        return cls(
            code.name,
            message,
            reason=reason,
            field_violations=violations,
            retry_after_seconds=retry_after_seconds,
            request_id=request_id,
        )


@contextmanager
def client_errors(address: str) -> Iterator[None]:
    """Raises `ClientError` for the errors of gRPC, of calls to `address`."""
    try:
        yield
    except grpc.FutureCancelledError:
        raise ClientError("CANCELLED", "the caller cancelled") from None
    except grpc.RpcError as error:
        raise ClientError.from_rpc(error, address) from error


def _unreached(address: str, message: str) -> str:
    if _UNHEALTHY in message:
        return (
            f"no server is ready at {address}: its health check reports that it is starting or stopping, has "
            "no model, or fails"
        )
    hint = ""
    if ":" not in address:
        hint = f"; the address has no port, so gRPC uses 443: try {address}:50051"
    elif "Socket closed" in message:
        hint = "; a server with TLS closes connections without it: try --tls, or Client(tls=Tls())"
    elif "%5B::1%5D" in message and address.startswith("localhost:"):
        hint = f"; if the server listens on IPv4 only, try 127.0.0.1{address.removeprefix('localhost')}"
    return f"no server answers at {address} ({message}){hint}"
