"""TLS for the gRPC port: certificates that are read again when their files change."""

from __future__ import annotations

import logging
import ssl
import threading

import grpc

from server.config import TlsFiles
from server.service.handlers import file_stamp

_log = logging.getLogger(__name__)


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """What gRPC asks for a certificate at every handshake.

    Raises:
        OSError: A file cannot be read.
    """
    certificates = _Certificates(files)
    return grpc.dynamic_ssl_server_credentials(
        certificates.current,
        certificates.changed,  # type: ignore[arg-type]  # None: as before, which the stubs do not know
        require_client_authentication=files.client_ca is not None,
    )


class _EncryptedKey(Exception):
    """A private key has a pass phrase."""


def _no_password() -> str:
    raise _EncryptedKey  # else OpenSSL asks at the terminal, in the midst of a handshake


class _Certificates:
    """The certificates as they were read last.

    Owned by gRPC, which asks on threads of its own.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._stamps = self._look()
        self.current = self._read()

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """The certificates, if the files have changed; what cannot be read changes nothing."""
        with self._lock:
            try:
                stamps = self._look()
                if stamps == self._stamps:
                    return None
                self._stamps = stamps  # also of files that cannot be used, so that it is told once
                self.current = self._read()
            except OSError as error:
                _log.warning("the certificates stay as they were: %s", error)
                return None
        _log.info("the certificates were read again")
        return self.current

    def _look(self) -> list[tuple[int, int]]:
        return [file_stamp(path) for path in self._files.paths()]

    def _read(self) -> grpc.ServerCertificateConfiguration:
        files = self._files
        # Here, because what OpenSSL cannot read it does not name.
        content = {path: path.read_bytes() for path in files.paths()}
        # gRPC takes anything, and then fails at every handshake.
        try:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=files.client_ca)
            context.load_cert_chain(files.certificate, files.key, password=_no_password)
        except ssl.SSLError as error:
            names = ", ".join(map(str, files.paths()))
            raise OSError(f"{names}: not a certificate and its key in PEM ({error})") from error
        except _EncryptedKey as error:
            raise OSError(f"{files.key}: the key is encrypted: decrypt it, nobody could be asked") from error
        return grpc.ssl_server_certificate_configuration(
            [(content[files.key], content[files.certificate])],
            root_certificates=content[files.client_ca] if files.client_ca else None,
        )
