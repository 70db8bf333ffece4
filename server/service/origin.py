"""Where a request comes from: what the engine has to know of its sender."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Token:
    """A known token; the server stores its SHA-256 digest, not the token itself."""

    name: str
    digest: bytes
    roles: frozenset[str]


@dataclass(frozen=True)
class Caller:
    """The sender of a call.

    Attributes:
        name: The name of its token, or its address where the server has no tokens. Callers share the queue
            fairly by their names.
        is_admin: Whether the caller may do what needs the role admin.
        token: Its known token; None without one.
    """

    name: str
    is_admin: bool = False
    token: Token | None = None


@dataclass(kw_only=True)
class Origin:
    """The sender of a request, and its times by `time.monotonic()`.

    Attributes:
        request_id: The id that the caller sent, or a new one.
        caller: The sender.
        arrival: When the request came.
        deadline: When the caller stops waiting; None for never.
    """

    request_id: str
    caller: Caller
    arrival: float = field(default_factory=time.monotonic)
    deadline: float | None = None
