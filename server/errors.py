"""The server's errors, as one tree.

    ServerError
    ├── InvalidRequest     the request cannot be served: too long, unknown option
    │   ├── BlankSource    the source text does not contain a visible character
    │   ├── SoundTooLong   the sound is longer than the server reads in one request
    │   └── TooLarge       the request has more bytes than the server reads
    ├── Unauthenticated    the call does not have a known token
    ├── Forbidden          the token does not have the role that the call needs
    ├── UnknownModel       no model has that name
    ├── UnknownPage        no page has that path
    ├── Overloaded         the queue is full, or the deadline cannot be met
    ├── LoadFailed         a model cannot be served: its bundle is broken, or memory is missing
    ├── Unavailable        the server is loading or draining
    ├── DeadlineExceeded   the request's deadline passed before it finished
    ├── Cancelled          the caller went away
    └── EngineFailed       a step raised; only the sequences of that step fail

The engine raises these and does not know gRPC; a table in `server.service.status` maps them to status codes.
"""

from __future__ import annotations

import copyreg
from typing import Any

NO_NUMBERS = "the model's scores of the next token are not numbers"  # an `EngineFailed` of one request


class ServerError(Exception):
    """The root: an error whose text is sent to the caller."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles all fields; exceptions by themselves would call `__init__` with the message alone."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class InvalidRequest(ServerError):
    """The request cannot be served as it is.

    Args:
        message: What was given, what was expected, and what to do.
        field: Path of the offending field in the request, for example `options.max_new_tokens`.

    Attributes:
        row: The number of the offending source of several, from 0; None if it is the only one.
    """

    row: int | None = None

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


class BlankSource(InvalidRequest):
    """The source text is empty, or contains only white space and invisible characters."""


class SoundTooLong(InvalidRequest):
    """The sound is longer than the server reads in one request."""


class TooLarge(InvalidRequest):
    """The request has more bytes than the server reads."""


class Unauthenticated(ServerError):
    """The call does not have a known token."""


class Forbidden(ServerError):
    """The caller may not do this."""


class UnknownModel(ServerError):
    """No model or no version has the requested name.

    Args:
        message: Lists the existing ones.
        name: The requested name.
        version: The requested version; empty for any.
    """

    def __init__(self, message: str, *, name: str, version: str = "") -> None:
        super().__init__(message)
        self.name = name
        self.version = version


class UnknownPage(ServerError):
    """No page has the requested path."""


class LoadFailed(ServerError):
    """A model cannot be served: its bundle is broken, or memory is missing."""


class Overloaded(ServerError):
    """The queue is full, or the deadline cannot be met.

    Args:
        message: The limit and its value.
        retry_after_seconds: Time after which a retry may succeed.
    """

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Unavailable(ServerError):
    """The server is loading the model, or is draining."""


class DeadlineExceeded(ServerError):
    """The deadline passed before the request finished."""


class Cancelled(ServerError):
    """The caller cancelled."""


class EngineFailed(ServerError):
    """A step of the engine raised; the cause is in the log."""


def is_about_all(error: InvalidRequest) -> bool:
    """Whether other sources with the same options would be refused, too.

    The field is `options` as a whole if the answer to this source would be too long.
    """
    return error.field != "options" and not error.field.startswith("sources")
