"""Who may call what: bearer tokens with roles, from a file that is read again when it changes."""

from __future__ import annotations

import hashlib
import hmac
import logging
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from server.errors import Forbidden, ServerError, Unauthenticated
from server.metrics import Metrics
from server.service.handlers import Continuation, Handler, file_stamp, remade
from server.service.health import HEALTH_SERVICE
from server.service.status import abort, request_id_of, status_of

PREDICT, ADMIN = "predict", "admin"
ROLES = (PREDICT, ADMIN)

_AUTHORIZATION, _SCHEME = "authorization", "bearer "
# By the beginnings of their paths; whatever else only reads.
_ADMIN_CALLS = ("/inference.GRPCInferenceService/Repository", "/seq2seq.v1.Repository/")
_PREDICT_CALLS = (
    "/inference.GRPCInferenceService/ModelInfer",
    "/inference.GRPCInferenceService/ModelStreamInfer",
    "/seq2seq.v1.Seq2Seq/Generate",
    "/seq2seq.v1.Seq2Seq/Score",
)
_HEX_DIGITS = 64

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Token:
    """What is known of a token: not the token."""

    name: str
    digest: bytes
    roles: frozenset[str]


class Access:
    """The tokens of a file.

    Owned by the app; used on the event loop only. The file has a table `token` for each, with its `name`, its
    `sha256` in hexadecimal digits, and its `roles`, of `predict` and `admin`.

    Raises:
        ValueError: The file cannot be used; the message says why.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = file_stamp(path)
        self._tokens = _read(path)

    def check(self, method: str, given: str | None) -> None:
        """Let a call pass.

        Args:
            method: Its path.
            given: What came as `authorization`, if anything.

        Raises:
            Unauthenticated: No known token came.
            Forbidden: The token lacks the role that the method needs.
        """
        if method.startswith(f"/{HEALTH_SERVICE}/"):
            return  # probes have no tokens
        if given is None or not given.lower().startswith(_SCHEME):
            raise Unauthenticated("send a token, as `authorization: Bearer …`")
        self._read_again()
        digest = hashlib.sha256(given[len(_SCHEME) :].strip().encode()).digest()
        # All are compared, so that the time says nothing of which one is near.
        found = [token for token in self._tokens if hmac.compare_digest(token.digest, digest)]
        if not found:
            raise Unauthenticated("the token is not known here")
        needed = _role_of(method)
        holder = next((token for token in found if needed is None or needed in token.roles), None)
        if holder is None:
            raise Forbidden(f"the token {found[0].name} has not the role {needed}, which this call needs")
        if needed == ADMIN:
            _log.info("%s by the token %s", method, holder.name)

    def _read_again(self) -> None:
        """Take a changed file; one that cannot be used changes nothing."""
        try:
            stamp = file_stamp(self._path)
            if stamp != self._stamp:
                self._stamp = stamp  # also of a file that cannot be used, so that it is told once
                self._tokens = _read(self._path)
                _log.info("the tokens of %s were read again: there are %d", self._path, len(self._tokens))
        except (OSError, ValueError) as error:
            _log.warning("the tokens stay as they were: %s", error)


def _role_of(method: str) -> str | None:
    """Which role a method needs; None where any will do."""
    if method.startswith(_ADMIN_CALLS):
        return ADMIN
    return PREDICT if method.startswith(_PREDICT_CALLS) else None


class AccessInterceptor(aio.ServerInterceptor):
    """Asks `Access` before any handler, and before anything of a message is read.

    Owned by the app.

    Args:
        access: None lets everybody do everything but see and change the repository.
        metrics: Count who is refused.
        is_repository_open: Whether everybody may do that, too, where there is no `access`.
    """

    def __init__(self, access: Access | None, metrics: Metrics, *, is_repository_open: bool) -> None:
        self._access = access
        self._metrics = metrics
        self._is_repository_open = is_repository_open

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The method's handler, or one that refuses; None where there is no such method."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        metadata = dict(handler_call_details.invocation_metadata or ())
        try:
            self._check(handler_call_details.method, metadata.get(_AUTHORIZATION))
        except ServerError as error:
            method = handler_call_details.method.rpartition("/")[2]
            self._metrics.record_rpc(model_name="", method=method, code=status_of(error)[0].name)
            return _refusing(handler, error)
        return handler

    def _check(self, method: str, given: Any) -> None:
        if self._access is not None:
            self._access.check(method, given if isinstance(given, str) else None)
        elif _role_of(method) == ADMIN and not self._is_repository_open:
            raise Forbidden(
                "models are listed, loaded and unloaded by who has a token with the role admin: give the "
                "server an --access-file, or let everybody do it with --open-repository"
            )


def _refusing(handler: Handler, error: ServerError) -> Handler:
    """A handler of the same kind that ends every call with the error's status."""

    async def refuse(_message: Any, context: aio.ServicerContext[Any, Any]) -> None:
        await abort(context, error, request_id_of(context.invocation_metadata()))

    return remade(handler, refuse)


def _read(path: Path) -> tuple[_Token, ...]:
    try:
        content = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no TOML: {error}") from error
    tables = content.pop("token", None)
    if content or not isinstance(tables, list) or not tables:
        raise ValueError(f"{path}: write a table [[token]] for each token, and nothing else")
    tokens = tuple(_token(path, number, table) for number, table in enumerate(tables, start=1))
    if len({token.digest for token in tokens}) < len(tokens):
        raise ValueError(f"{path}: two tokens are the same")
    return tokens


def _token(path: Path, number: int, table: Any) -> _Token:
    where = f"{path}: token {number}"
    if not isinstance(table, dict) or table.keys() != {"name", "sha256", "roles"}:
        raise ValueError(f"{where} needs name, sha256 and roles, and nothing else")
    name, digits, roles = table["name"], table["sha256"], table["roles"]
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}: name must be a text")
    try:
        digest = bytes.fromhex(digits) if len(digits) == _HEX_DIGITS else b""
    except (TypeError, ValueError):
        digest = b""
    if not digest:
        raise ValueError(
            f"{where}: sha256 must be {_HEX_DIGITS} hexadecimal digits: `printf %s TOKEN | sha256sum`"
        )
    if not isinstance(roles, list) or not roles or not set(roles) <= set(ROLES):
        raise ValueError(f"{where}: roles must be a list of {', '.join(ROLES)}")
    return _Token(name, digest, frozenset(roles))
