"""Identifies callers and checks their rights: bearer tokens with roles, from a file that may change."""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc
from grpc import aio

from server.errors import Forbidden, ServerError, Unauthenticated
from server.metrics import Metrics
from server.service.handlers import Continuation, Handler, file_stamp, remade
from server.service.status import Metadata, abort, request_id_of, status_of

PREDICT, ADMIN = "predict", "admin"
ROLES = (PREDICT, ADMIN)

_NOTHING, _TOKEN = "nothing", "a token"
_NEEDS = (
    ("grpc.health.v1.Health", _NOTHING, "Check List Watch"),  # probes have no tokens
    ("grpc.reflection.v1alpha.ServerReflection", _TOKEN, "ServerReflectionInfo"),
    ("seq2seq.v1.Seq2Seq", _TOKEN, "GetModel ListModels"),
    ("seq2seq.v1.Seq2Seq", PREDICT, "Generate GenerateStream Score"),
    ("seq2seq.v1.Repository", ADMIN, "ListVersions LoadModel UnloadModel"),
    ("inference.GRPCInferenceService", _TOKEN, "ServerLive ServerReady ServerMetadata"),
    ("inference.GRPCInferenceService", _TOKEN, "ModelReady ModelMetadata ModelConfig ModelStatistics"),
    ("inference.GRPCInferenceService", PREDICT, "ModelInfer ModelStreamInfer"),
    (
        "inference.GRPCInferenceService",
        ADMIN,
        "RepositoryIndex RepositoryModelLoad RepositoryModelUnload",
    ),
)
# By path, what a caller needs. A method that is not in it is refused.
NEEDS = {f"/{service}/{method}": need for service, need, methods in _NEEDS for method in methods.split()}

_AUTHORIZATION, _SCHEME = "authorization", "bearer "
_NO_TOKEN = hashlib.sha256(b"").digest()  # of a variable that is not set: `printf %s "$UNSET"`
_LOOK_SECONDS = 1.0  # between two looks at the file's stamp
_IPV6_HOST_BITS = 64  # of an address: one caller may use all of them
_HEX_DIGITS = 64

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Token:
    """A known token: its digest, not the token itself.

    Attributes:
        digest: Its SHA-256.
        roles: Of `ROLES`.
    """

    name: str
    digest: bytes
    roles: frozenset[str]


@dataclass(frozen=True)
class Caller:
    """The sender of a call.

    Attributes:
        name: The name of the token, or the address of the peer where there are no tokens. Callers share the
            queue fairly by their names.
        is_admin: Whether the token has the role admin, or everybody may do what needs it.
    """

    name: str
    is_admin: bool = False


class Access:
    """The tokens of a file.

    Owned by the app; used on the event loop only. The file has a table `token` for each, with its `name`, its
    `sha256` in hexadecimal digits, and its `roles`, of `predict` and `admin`. A changed file takes
    effect within a second.

    Args:
        path: The file; None lets everybody do everything but list, load and unload versions.
        is_repository_open: Whether everybody may do all that an admin may, where there is no file.
        clock: Monotonic seconds.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file cannot be used; the message says why.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        is_repository_open: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._is_repository_open = is_repository_open
        self._clock = clock
        self._looked_at = clock()
        self._stamp = None if path is None else file_stamp(path)
        self._tokens = {} if path is None else _read(path)

    def check(self, method: str, metadata: Metadata | None) -> None:
        """Let a call pass.

        Args:
            method: Its path.
            metadata: That came with it.

        Raises:
            Unauthenticated: No known token came.
            Forbidden: The token does not have the role that the method needs, or nobody may call it.
        """
        need = NEEDS.get(method)
        if need is None:
            raise Forbidden(f"nobody may call {method}")
        if need == _NOTHING:
            return
        if self._path is None:
            if need == ADMIN and not self._is_repository_open:
                raise Forbidden(
                    "models are listed, loaded and unloaded by callers with a token that has the role admin: "
                    "give the server an --access-file, or let everybody do it with --open-repository"
                )
            return
        token = self._token_of(metadata)
        if token is None:
            raise Unauthenticated("send a token that is known here, as `authorization: Bearer …`")
        if need in ROLES and need not in token.roles:
            raise Forbidden(f"token {token.name} does not have the role {need}, which this call needs")
        if need == ADMIN:
            _log.info("%s by token %s", method, token.name)

    def caller_of(self, context: aio.ServicerContext[Any, Any]) -> Caller:
        """Returns the sender of a call that `check` has let pass."""
        token = self._token_of(context.invocation_metadata())
        if token is None:
            return Caller(_address(context.peer()), is_admin=self._path is None and self._is_repository_open)
        return Caller(token.name, is_admin=ADMIN in token.roles)

    def _token_of(self, metadata: Metadata | None) -> Token | None:
        """The token that came with a call, where it is known."""
        given = dict(metadata or ()).get(_AUTHORIZATION)
        if self._path is None or not isinstance(given, str) or not given.lower().startswith(_SCHEME):
            return None
        self._read_again(self._path)
        # How long the search takes depends on the digest only, and a caller cannot choose a token's digest.
        return self._tokens.get(hashlib.sha256(given[len(_SCHEME) :].strip().encode()).digest())

    def _read_again(self, path: Path) -> None:
        """Take a changed file; one that cannot be used changes nothing."""
        now = self._clock()
        if now < self._looked_at + _LOOK_SECONDS:
            return
        self._looked_at = now
        try:
            stamp = file_stamp(path)
            if stamp != self._stamp:
                self._stamp = stamp  # also of a file that cannot be used, so that it is logged once
                self._tokens = _read(path)
                _log.info("the tokens of %s were read again: there are %d", path, len(self._tokens))
        except (OSError, ValueError) as error:
            _log.warning("the tokens stay as they were: %s", error)


def _address(peer: str) -> str:
    """A peer as gRPC writes it, such as `ipv4:10.0.0.7:50124`, without its port; of IPv6 the network."""
    host = unquote(peer.partition(":")[2].rpartition(":")[0]).strip("[]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return peer
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        network = int(address) >> _IPV6_HOST_BITS << _IPV6_HOST_BITS
        return str(ipaddress.IPv6Address(network))
    return str(address)


class AccessInterceptor(aio.ServerInterceptor):
    """Asks `Access` before any handler, and before anything of a message is read.

    Owned by the endpoint.

    Args:
        access: Says who may call what.
        metrics: Count refused calls.
    """

    def __init__(self, access: Access, metrics: Metrics) -> None:
        self._access = access
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The method's handler, or one that refuses; None where there is no such method."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        try:
            self._access.check(method, handler_call_details.invocation_metadata)
        except ServerError as error:
            code = status_of(error)[0].name
            self._metrics.record_rpc(model_name="", method=method.rpartition("/")[2], code=code)
            return _refusing(handler, error)
        return handler


def _refusing(handler: Handler, error: ServerError) -> Handler:
    """A handler of the same kind that ends every call with the error's status."""

    async def refuse(_message: Any, context: aio.ServicerContext[Any, Any]) -> None:
        await abort(context, error, request_id_of(context.invocation_metadata()))

    return remade(handler, refuse)


def _read(path: Path) -> dict[bytes, Token]:
    """The tokens of a file by their digests."""
    try:
        content = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no TOML: {error}") from error
    tables = content.pop("token", None)
    if content or not isinstance(tables, list) or not tables:
        raise ValueError(f"{path}: write a table [[token]] for each token, and nothing else")
    by_digest = {
        token.digest: token for token in (_token(path, *numbered) for numbered in enumerate(tables, start=1))
    }
    if len(by_digest) < len(tables):
        raise ValueError(f"{path}: two tokens are the same")
    return by_digest


def _token(path: Path, number: int, table: Any) -> Token:
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
            f"{where}: sha256 must be {_HEX_DIGITS} hexadecimal digits, as from "
            f"`printf %s TOKEN | sha256sum | cut -c1-{_HEX_DIGITS}`"
        )
    if digest == _NO_TOKEN:
        raise ValueError(f"{where}: sha256 is that of the empty text: was the variable with the token set?")
    if not isinstance(roles, list) or not roles or not set(roles) <= set(ROLES):
        raise ValueError(f"{where}: roles must be a list of {', '.join(ROLES)}")
    return Token(name, digest, frozenset(roles))
