"""TLS for the gRPC port: certificates that are read again when their files change."""

from __future__ import annotations

import ssl
from functools import partial
from pathlib import Path

import grpc

from seq2seq_serve.server.config import ServerConfig
from seq2seq_serve.server.service.watched import Watched


def server_credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    """Returns credentials that look for changed files at every handshake, on gRPC's own threads.

    None leaves the port unencrypted.

    Raises:
        OSError: A file cannot be read or used.
        ValueError: A file is not a regular one, or is too large.
    """
    if config.tls_certificate is None or config.tls_key is None:
        return None
    paths = [config.tls_certificate, config.tls_key]
    paths += [config.tls_client_ca] if config.tls_client_ca else []
    certificates = Watched("the certificates", paths, partial(_parse, paths))
    return grpc.dynamic_ssl_server_credentials(
        certificates.content,
        # None keeps the certificates of the handshake before, which the stubs do not know.
        lambda: certificates.content if certificates.refresh() else None,  # type: ignore[arg-type,return-value]
        require_client_authentication=config.tls_client_ca is not None,
    )


class _EncryptedKey(Exception):
    """A private key has a pass phrase."""


def _no_password() -> str:
    raise _EncryptedKey  # without a callback, OpenSSL would prompt at the terminal during a handshake


def _parse(paths: list[Path], contents: list[bytes]) -> grpc.ServerCertificateConfiguration:
    """Returns the certificates of the files: a chain, its key, and perhaps the CA of clients."""
    certificate, key, *client_ca = paths
    # gRPC accepts any bytes, and then fails at every handshake.
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=next(iter(client_ca), None))
        context.load_cert_chain(certificate, key, password=_no_password)
    except ssl.SSLError as error:
        names = ", ".join(map(str, paths))
        raise OSError(f"{names}: not a certificate and its key in PEM ({error})") from error
    except _EncryptedKey as error:
        raise OSError(f"{key}: the key is encrypted: give the server a decrypted one") from error
    chain, private_key, *roots = contents
    return grpc.ssl_server_certificate_configuration(
        [(private_key, chain)], root_certificates=next(iter(roots), None)
    )
