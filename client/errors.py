"""What a call can end with instead of an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status  # type: ignore[import-untyped]

_UNHEALTHY = "backend unhealthy"  # in gRPC's words, of a server that says it does not serve
_REQUEST_ID = "x-request-id"


@dataclass(frozen=True)
class FieldViolation:
    """One field of a request that the server refused."""

    field: str
    description: str


class ClientError(Exception):
    """A call failed.

    Attributes:
        code: The gRPC status's name, for example `INVALID_ARGUMENT`.
        message: What the server said, or why it was not reached.
        field_violations: Which fields were refused.
        retry_after_seconds: When an overloaded server asks to be called again; None where it did not say.
        request_id: The call's name in the server's log; empty where the server was not reached.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        field_violations: tuple[FieldViolation, ...] = (),
        retry_after_seconds: float | None = None,
        request_id: str = "",
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.field_violations = field_violations
        self.retry_after_seconds = retry_after_seconds
        self.request_id = request_id

    def followed_by(self, event: str) -> ClientError:
        """The same failure, with what came of it in the message."""
        return ClientError(
            self.code,
            f"{self.message}; {event}",
            field_violations=self.field_violations,
            retry_after_seconds=self.retry_after_seconds,
            request_id=self.request_id,
        )

    @property
    def is_about_the_text(self) -> bool:
        """Whether it says nothing of other texts, as an error of an option or of the server does."""
        return self.code == "INVALID_ARGUMENT" and all(
            violation.field.startswith("sources") for violation in self.field_violations
        )

    @classmethod
    def from_value_error(cls, error: ValueError) -> ClientError:
        """A text that cannot be sent."""
        message = str(error)
        if isinstance(error, UnicodeEncodeError):
            message = f"not valid UTF-8 at character {error.start + 1}"
        return cls("INVALID_ARGUMENT", message)

    @classmethod
    def from_rpc(cls, error: grpc.RpcError, address: str) -> ClientError:
        """The same failure without gRPC's classes, and with the details that came in the trailers."""
        code, message = error.code(), error.details() or ""
        call: Any = error  # gRPC's own errors are calls too, which its types do not say
        trailers = dict(call.trailing_metadata() or ())
        request_id = str(trailers.get(_REQUEST_ID, ""))
        if code is grpc.StatusCode.UNAVAILABLE and not request_id:
            what = "serves now" if _UNHEALTHY in message else "answers"
            return cls(code.name, f"no server {what} at {address} ({message})")
        violations: tuple[FieldViolation, ...] = ()
        retry_after_seconds = None
        try:
            status = rpc_status.from_call(error)
        except ValueError:  # the server's details and gRPC's own end crossed, as at a deadline
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
        return cls(
            code.name,
            message,
            field_violations=violations,
            retry_after_seconds=retry_after_seconds,
            request_id=request_id,
        )
