"""The error that a failed call raises."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from seq2seq_serve.protos.details_pb2 import BadRequest, ErrorInfo, RetryInfo, Status
from seq2seq_serve.protos.seq2seq_v1_pb2 import BatchError

_UNHEALTHY = "backend unhealthy"  # what gRPC reports if the health check answers NOT_SERVING
_DEADLINE = "Deadline Exceeded"  # what gRPC reports itself
_NO_ADDRESS = "connections to all backends failing"  # before the error of one of them
# What gRPC reports if a proxy ends a call whose server it has lost: INTERNAL_ERROR or CANCEL of HTTP/2.
_LOST = re.compile(r"RST_STREAM with error code [28]\b")
_REQUEST_ID = "x-request-id"
_STATUS = "grpc-status-details-bin"
_DETAIL = "type.googleapis.com/google.rpc."  # how the type of a detail begins
_Message = TypeVar("_Message", bound=Message)
_BLANK_SOURCE = "BLANK_SOURCE"  # the reason in the server's ErrorInfo
_NOT_SERVING = "NOT_SERVING"  # a reason of this client's own


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
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.reason = reason
        self.field_violations = field_violations
        self.retry_after_seconds = retry_after_seconds
        self.request_id = request_id

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"

    def followed_by(self, event: str) -> ClientError:
        """Returns the same error with `event` added to its message."""
        error = copy(self)
        error.message += f"; {event}"
        error.args = error.code, error.message
        return error

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
    def may_be_by_health_check(self) -> bool:
        """Whether the call was not sent, and a server may only be left out for its health check.

        Of several addresses, like the two of localhost, gRPC reports the error of one.
        """
        return self.reason == _NOT_SERVING or _NO_ADDRESS in self.message

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
    def of_item(cls, error: TypeError | ValueError, index: int) -> ClientError:
        """Returns the error for one item of several that the client cannot send."""
        if isinstance(error, ValueError):
            return cls.from_value_error(error)
        return cls("INVALID_ARGUMENT", f"item {index}: {error}")

    @classmethod
    def from_rpc(cls, error: grpc.RpcError, address: str) -> ClientError:
        """Returns gRPC's error as a `ClientError`, with the details from the server's trailers."""
        code, message = error.code(), error.details() or ""
        call: Any = error  # gRPC's errors are also calls, but its types do not declare it
        trailers = dict(call.trailing_metadata() or ())
        request_id = str(trailers.get(_REQUEST_ID, ""))
        if code is grpc.StatusCode.UNAVAILABLE and not request_id:
            reason = _NOT_SERVING if _UNHEALTHY in message else ""
            return cls(code.name, _unreached(address, message), reason=reason)
        if _LOST.search(message) and not request_id:  # INTERNAL or CANCELLED, which suggest no retry
            return cls("UNAVAILABLE", f"the connection to the server was lost ({code.name}: {message})")
        details = _details(trailers.get(_STATUS), code)
        retry_after_seconds = None
        if "RetryInfo" in details:
            delay = _read(RetryInfo, details["RetryInfo"]).retry_delay
            retry_after_seconds = delay.ToTimedelta().total_seconds()
        return cls(
            code.name,
            _with_timeout(code.name, message),
            reason=_read(ErrorInfo, details.get("ErrorInfo")).reason,
            field_violations=tuple(
                FieldViolation(violation.field, violation.description)
                for violation in _read(BadRequest, details.get("BadRequest")).field_violations
            ),
            retry_after_seconds=retry_after_seconds,
            request_id=request_id,
        )

    @classmethod
    def from_batch(cls, error: BatchError) -> ClientError:
        """Returns the error of one item of a batch."""
        violations = (FieldViolation(error.field, error.message),) if error.field else ()
        return cls(
            error.code,
            _with_timeout(error.code, error.message),
            reason=error.reason,
            field_violations=violations,
            retry_after_seconds=error.retry_after_seconds if error.HasField("retry_after_seconds") else None,
            request_id=error.request_id,
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


def _details(given: Any, code: grpc.StatusCode) -> dict[str, bytes]:
    """Returns the details of the server's status, by the names of their messages in google.rpc."""
    status = _read(Status, given)
    # gRPC may end a call, for example at its deadline, as the server's details come in.
    is_of_the_call = status.code == code.value[0]
    return {
        detail.type_url.removeprefix(_DETAIL): detail.value for detail in status.details if is_of_the_call
    }


def _read(message_class: type[_Message], given: Any) -> _Message:
    """Returns a message of the server; an empty one if there is none, or it is damaged."""
    try:
        return message_class.FromString(given or b"")
    except (DecodeError, TypeError):
        return message_class()


def _with_timeout(code: str, message: str) -> str:
    """Returns the message of an error; that of a deadline with the argument which sets it."""
    if code != "DEADLINE_EXCEEDED":
        return message
    if _DEADLINE in message:
        return "no answer came within timeout_seconds"
    return f"{message}: a longer timeout_seconds may help"


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
        hint = (
            "; a server with TLS closes connections without it: try --tls, or Client(tls=Tls()), and with "
            "mTLS also a certificate of the client"
        )
    elif "%5B::1%5D" in message and address.startswith("localhost:"):
        hint = f"; if the server listens on IPv4 only, try 127.0.0.1{address.removeprefix('localhost')}"
    return f"no server answers at {address} ({message}){hint}"
