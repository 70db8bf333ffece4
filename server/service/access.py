"""Identifies callers and checks their rights: bearer tokens with roles, from a file that may change."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import logging
import tomllib
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from seq2seq_serve.server.errors import Forbidden, Unauthenticated
from seq2seq_serve.server.service.watched import Watched
from seq2seq_serve.server.telemetry.record import ADMIN, PREDICT, Caller, Metadata

ROLES = (PREDICT, ADMIN)

_NOTHING, _TOKEN = "nothing", "a token"
_NEEDS = (
    ("grpc.health.v1.Health", _NOTHING, "Check List Watch"),  # probes have no tokens
    ("grpc.reflection.v1alpha.ServerReflection", _TOKEN, "ServerReflectionInfo"),
    ("seq2seq.v1.Seq2Seq", _TOKEN, "GetModel ListModels"),
    ("seq2seq.v1.Seq2Seq", PREDICT, "Generate GenerateStream GenerateBatch Score Transcribe"),
    ("seq2seq.v1.Repository", ADMIN, "ListVersions LoadModel UnloadModel"),
    ("inference.GRPCInferenceService", _NOTHING, "ServerLive ServerReady"),
    ("inference.GRPCInferenceService", _TOKEN, "ServerMetadata"),
    ("inference.GRPCInferenceService", _TOKEN, "ModelReady ModelMetadata ModelConfig ModelStatistics"),
    ("inference.GRPCInferenceService", PREDICT, "ModelInfer ModelStreamInfer"),
    (
        "inference.GRPCInferenceService",
        ADMIN,
        "RepositoryIndex RepositoryModelLoad RepositoryModelUnload",
    ),
)
# Maps a method's path to the role that its callers need. Other methods are refused.
NEEDS = {f"/{service}/{method}": need for service, need, methods in _NEEDS for method in methods.split()}

_AUTHORIZATION, _SCHEME = "authorization", "bearer "
_NO_TOKEN = hashlib.sha256(b"").digest()  # the result of `printf %s "$UNSET"` where the variable is not set
_LOOK_SECONDS = 0.5  # between two looks at the file
_MAX_LINE_BYTES = 1000  # of a file: tomllib takes hours for a key of 100,000 parts
_IPV6_HOST_BITS = 64  # one caller may use every address of a /64 network
_HEX_DIGITS = 64

_log = logging.getLogger(__name__)


class Access:
    """The tokens of the access file.

    Owned by the app; used on the event loop only. The file has a table `[[token]]` for each token, with
    its `name`, its `sha256` in hexadecimal digits, its `roles`, and, if it may not use all, the names of its
    `models`. While `watch` runs, a changed file takes effect within a second.

    Args:
        path: The file; None allows every caller everything except listing, loading and unloading versions.
        is_repository_open: Whether every caller is an admin where there is no file.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file's content is wrong; the message says how.
    """

    def __init__(self, path: Path | None, *, is_repository_open: bool = False) -> None:
        self._roles_of_all = frozenset(ROLES if is_repository_open else ())
        self._tokens = None if path is None else Watched("the tokens", [path], partial(_parse, path))

    @property
    def has_tokens(self) -> bool:
        """Whether callers need tokens."""
        return self._tokens is not None

    def refresh(self) -> bool:
        """Reads the file again if it has changed; returns whether its tokens hold from now on."""
        return self._tokens is not None and self._tokens.refresh()

    async def watch(self) -> None:
        """Reads the file again whenever it changes, on another thread, until it is cancelled."""
        while self._tokens is not None:
            await asyncio.sleep(_LOOK_SECONDS)
            await asyncio.to_thread(self.refresh)

    def check(self, method: str, caller: Caller) -> None:
        """Refuses a caller without the right to the method.

        Args:
            method: The path of the method.
            caller: The sender of the call, from `caller_of`.

        Raises:
            Unauthenticated: The caller does not have a known token.
            Forbidden: The token does not have the role that the method needs, or `NEEDS` lacks the method.
        """
        need = NEEDS.get(method)
        if need is None:
            raise Forbidden(f"{method} is not a method that callers may use")
        if need == _NOTHING:
            return
        if self._tokens is None:
            if need == ADMIN and ADMIN not in caller.roles:
                raise Forbidden(
                    "listing, loading and unloading versions needs a token with the role admin: start the "
                    "server with --access-file, or with --open-repository to allow it to every caller"
                )
            return
        if not caller.has_token:
            raise Unauthenticated("the call lacks a known token: send one as `authorization: Bearer …`")
        if need in ROLES and need not in caller.roles:
            raise Forbidden(f"token {caller.name} does not have the role {need}, which {method} needs")
        if need == ADMIN:
            _log.info("%s by token %s", method, caller.name)

    def caller_of(self, metadata: Metadata | None, peer: str) -> Caller:
        """Returns the sender of a call, known or not.

        Args:
            metadata: The metadata of the call.
            peer: gRPC's name of the other end of the connection.
        """
        if self._tokens is None:
            return Caller(_address(peer), self._roles_of_all)
        caller = Caller(_address(peer))
        given = dict(metadata or ()).get(_AUTHORIZATION)
        if isinstance(given, str) and given.lower().startswith(_SCHEME):
            return self.with_token(caller, given[len(_SCHEME) :])
        return caller

    def with_token(self, caller: Caller, token: str) -> Caller:
        """Returns the owner of a token that a caller has sent; the caller if the token is not known."""
        if self._tokens is None:
            return caller
        digest = hashlib.sha256(token.strip().encode()).digest()
        # The time of the search depends on the digest alone, and a caller cannot choose a token's digest.
        return self._tokens.content.get(digest, caller)


@lru_cache(maxsize=4096)  # connections
def _address(peer: str) -> str:
    """Returns the address in a peer such as `ipv4:10.0.0.7:50124`; for IPv6, the address of its network."""
    host = unquote(peer.partition(":")[2].rpartition(":")[0]).strip("[]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return peer
    if isinstance(address, ipaddress.IPv6Address):
        network = int(address) >> _IPV6_HOST_BITS << _IPV6_HOST_BITS
        address = address.ipv4_mapped or ipaddress.IPv6Address(network)
    return str(address)


def _parse(path: Path, contents: list[bytes]) -> dict[bytes, Caller]:
    """Returns the callers of a file by the SHA-256 digests of their tokens, which are not in it."""
    [raw] = contents
    if max(map(len, raw.splitlines()), default=0) > _MAX_LINE_BYTES:
        raise ValueError(f"{path} has a line of more than {_MAX_LINE_BYTES} bytes")
    try:
        content = tomllib.loads(raw.decode())
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    tables = content.pop("token", None)
    if content or not isinstance(tables, list) or not tables:
        raise ValueError(f"{path}: write a table [[token]] for each token, and nothing else")
    by_digest = dict(_token(f"{path}: token {number}", table) for number, table in enumerate(tables, start=1))
    if len(by_digest) < len(tables):
        raise ValueError(f"{path}: two tokens have the same sha256: remove one of them")
    return by_digest


def _token(where: str, table: Any) -> tuple[bytes, Caller]:
    """Returns the digest of a token, and its caller."""
    if not isinstance(table, dict) or table.keys() - {"models"} != {"name", "sha256", "roles"}:
        raise ValueError(f"{where} needs name, sha256 and roles, may have models, and nothing else")
    name, digits, roles, models = table["name"], table["sha256"], table["roles"], table.get("models")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}: name must be a string that is not empty")
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
    if not isinstance(roles, list) or not roles or any(role not in ROLES for role in roles):
        raise ValueError(f"{where}: roles must be a list of {', '.join(ROLES)}")
    if models is None:
        return digest, Caller(name, frozenset(roles), has_token=True)
    if not isinstance(models, list) or not models or not all(isinstance(one, str) and one for one in models):
        raise ValueError(
            f"{where}: models must be a list of the names of models, or of NAME/* for all adapters of one"
        )
    return digest, Caller(name, frozenset(roles), has_token=True, models=tuple(models))
