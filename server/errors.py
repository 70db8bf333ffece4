"""What can go wrong in the server, as one tree.

    ServerError
    ├── InvalidRequest     what the caller sent cannot be served: too long, unknown option
    │   └── BlankSource    a text in which there is nothing to see
    ├── Unauthenticated    no known token came
    ├── Forbidden          the token has not the role that the call needs
    ├── UnknownModel       no model of that name
    ├── Overloaded         the queue is full, or the deadline cannot be met
    ├── LoadFailed         a model cannot be served: its bundle is broken, or there is no room
    ├── Unavailable        loading or draining
    ├── DeadlineExceeded   the request's deadline passed before it finished
    ├── Cancelled          the caller went away
    └── EngineFailed       a step raised; only the sequences of that step fail

The engine raises these and knows nothing of gRPC; `server.service.status` holds the one table that turns
them into status codes.
"""

from __future__ import annotations


class ServerError(Exception):
    """The root: every error that a caller is told the text of."""


class InvalidRequest(ServerError):
    """The request cannot be served as it is.

    Args:
        message: What was given, what was expected, and what to do.
        field: Path of the offending field in the request, for example `options.max_new_tokens`.
    """

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


class BlankSource(InvalidRequest):
    """The source text is empty, or white space and characters that are not seen: there is nothing to do."""


class Unauthenticated(ServerError):
    """No known token came with the call."""


class Forbidden(ServerError):
    """The caller may not do this."""


class UnknownModel(ServerError):
    """There is no model, or no version, of the asked name.

    Args:
        message: What there is instead.
        name: That was asked for.
        version: That was asked for; empty for any.
    """

    def __init__(self, message: str, *, name: str, version: str = "") -> None:
        super().__init__(message)
        self.name = name
        self.version = version


class LoadFailed(ServerError):
    """A model cannot be served: its bundle is broken, or there is no room for it."""


class Overloaded(ServerError):
    """The queue is full, or the deadline cannot be met.

    Args:
        message: Which limit, and its value.
        retry_after_seconds: When a retry may succeed.
    """

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Unavailable(ServerError):
    """The model is loading or the server is draining."""


class DeadlineExceeded(ServerError):
    """The deadline passed before the request finished."""


class Cancelled(ServerError):
    """The caller cancelled."""


class EngineFailed(ServerError):
    """A step of the engine raised; the cause is in the log."""
