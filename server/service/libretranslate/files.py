"""Translated files, until their callers fetch them."""

from __future__ import annotations

import asyncio
import re
import secrets
from dataclasses import dataclass, field
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from seq2seq_serve.server.errors import Overloaded
from seq2seq_serve.server.http import error_content
from seq2seq_serve.server.service.shares import Room, Shares

_MAX_KEPT_BYTES = 2**26
_LEAST_BYTES = 2**14  # that a file counts as, which bounds the number of short ones
_KEPT_SECONDS = 1800.0  # as LibreTranslate keeps them
_MAX_NAME = 100  # characters
_NOT_IN_NAMES = re.compile(r"[^\w.-]+")


@dataclass(eq=False)
class _Kept:
    """A file.

    Attributes:
        name: Its name for the caller.
        content: Its content.
        room: Counts its bytes.
        is_fetched: Whether its caller has fetched it.
    """

    name: str
    content: bytes
    room: Room
    is_fetched: bool = False


@dataclass(eq=False)
class TranslatedFiles:
    """The translated files that callers may fetch, in memory. Whoever knows the address of one may fetch it.

    Owned by the service; used on the event loop only. The callers share a bounded amount. Invariant: a file
    is forgotten after `_KEPT_SECONDS`, and a fetched one as soon as its caller needs the room.
    """

    _files: dict[str, _Kept] = field(default_factory=dict)  # by the secret of the address, oldest first
    _shares: Shares = field(
        default_factory=lambda: Shares(_MAX_KEPT_BYTES, "translated files of {} bytes are kept")
    )

    def add(self, caller: str, name: str, content: bytes) -> str:
        """Keeps a file; returns the path from which it may be fetched.

        Raises:
            Overloaded: Too much is kept, and the caller would have more than its share.
        """
        its = ((secret, kept) for secret, kept in self._files.items() if kept.room.caller == caller)
        fetched = [secret for secret, kept in its if kept.is_fetched]
        while True:
            try:
                room = self._shares.take(caller, max(len(content), _LEAST_BYTES), _KEPT_SECONDS)
                break
            except Overloaded:
                if not fetched:
                    raise
                self._forget(fetched.pop(0))
        secret = secrets.token_urlsafe(24)
        name = _NOT_IN_NAMES.sub("_", name)[-_MAX_NAME:]
        self._files[secret] = _Kept(name, content, room)
        asyncio.get_running_loop().call_later(_KEPT_SECONDS, self._forget, secret)
        return f"/download_file/{secret}.{quote(name)}"

    def answer(self, path: str) -> Response:
        """Returns the answer to a request for a file, by the last part of its path."""
        kept = self._files.get(path.partition(".")[0])
        if kept is None:
            text = f"there is no such file: one is kept for {_KEPT_SECONDS / 60:.0f} minutes"
            return JSONResponse(error_content(text, "NOT_FOUND", "UNKNOWN_FILE"), 404)
        kept.is_fetched = True
        headers = {
            "Content-Disposition": f"attachment; filename*=UTF-8''{quote(kept.name)}",
            "X-Content-Type-Options": "nosniff",  # a page of HTML in a file is not one of this server
        }
        return Response(kept.content, headers=headers, media_type="application/octet-stream")

    def _forget(self, secret: str) -> None:
        if (kept := self._files.pop(secret, None)) is not None:
            kept.room.close()


def url_of(request: Request, path: str) -> str:
    """Returns the URL of a path as the caller of a request reaches this server, also through a proxy."""
    scheme = request.headers.get("x-forwarded-proto", "")
    base = request.base_url
    if scheme in ("http", "https"):  # decides only over what this caller gets
        base = base.replace(scheme=scheme)
    return f"{base}".rstrip("/") + path
