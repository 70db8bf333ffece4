"""TLS for the gRPC port: certificates that are read again when their files change."""

from __future__ import annotations

import ssl
from functools import partial

import grpc

from seq2seq_serve.server.config import TlsFiles
from seq2seq_serve.server.service.watched import Watched


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Returns credentials that look for changed files at every handshake, on gRPC's own threads.

    Raises:
        OSError: A file cannot be read or used.
        ValueError: A file is not a regular one, or is too large.
    """
    certificates = Watched("the certificates", files.paths(), partial(_parse, files))
    return grpc.dynamic_ssl_server_credentials(
        certificates.content,
        # None keeps the certificates of the handshake before, which the stubs do not know.
        lambda: certificates.content if certificates.refresh() else None,  # type: ignore[arg-type,return-value]
        require_client_authentication=files.client_ca is not None,
    )


class _EncryptedKey(Exception):
    """A private key has a pass phrase."""


def _no_password() -> str:
    raise _EncryptedKey  # without a callback, OpenSSL would prompt at the terminal during a handshake


def _parse(files: TlsFiles, contents: list[bytes]) -> grpc.ServerCertificateConfiguration:
    content = dict(zip(files.paths(), contents, strict=True))
    # gRPC accepts any bytes, and then fails at every handshake.
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=files.client_ca)
        context.load_cert_chain(files.certificate, files.key, password=_no_password)
    except ssl.SSLError as error:
        names = ", ".join(map(str, files.paths()))
        raise OSError(f"{names}: not a certificate and its key in PEM ({error})") from error
    except _EncryptedKey as error:
        raise OSError(f"{files.key}: the key is encrypted: give the server a decrypted one") from error
    return grpc.ssl_server_certificate_configuration(
        [(content[files.key], content[files.certificate])],
        root_certificates=content[files.client_ca] if files.client_ca else None,
    )
