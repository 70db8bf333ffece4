import os
from pathlib import Path

import grpc
import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from grpc import aio

from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.protos.seq2seq_v1_pb2_grpc import Seq2SeqStub
from seq2seq_serve.server.config import ServerConfig
from seq2seq_serve.server.service.tls import server_credentials
from tests.server.service.harness import serving


def write_certificate(folder, authority: trustme.CA) -> ServerConfig:
    files = ServerConfig(tls_certificate=folder / "server.pem", tls_key=folder / "server.key")
    issued = authority.issue_cert("localhost")
    files.tls_certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    files.tls_key.write_bytes(issued.private_key_pem.bytes())
    return files


async def ask(served, **credentials) -> str:
    """What a new connection is answered."""
    channel = aio.secure_channel(
        f"localhost:{served.app.endpoint.port}", grpc.ssl_channel_credentials(**credentials)
    )
    async with channel:
        request = pb.GenerateRequest(sources=[pb.Source(text="ab")])
        answer = await Seq2SeqStub(channel).Generate(request, timeout=10)
        return answer.hypotheses[0].text


async def is_refused(served, **credentials) -> bool:
    with pytest.raises(aio.AioRpcError) as caught:
        await ask(served, **credentials)
    return caught.value.code() is grpc.StatusCode.UNAVAILABLE


def settings(files: ServerConfig) -> dict[str, Path]:
    return {"tls_certificate": files.tls_certificate, "tls_key": files.tls_key}


def roots(authority: trustme.CA) -> dict[str, bytes]:
    return {"root_certificates": authority.cert_pem.bytes()}


async def test_calls_are_encrypted_and_others_are_refused(tmp_path):
    authority = trustme.CA()
    async with serving(**settings(write_certificate(tmp_path, authority))) as served:
        assert await ask(served, **roots(authority)) == "ab"
        assert await is_refused(served, **roots(trustme.CA()))
        with pytest.raises(aio.AioRpcError) as caught:
            await served.stub.Generate(pb.GenerateRequest(), timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_clients_must_show_a_certificate_where_their_authority_is_given(tmp_path):
    authority, of_clients = trustme.CA(), trustme.CA()
    files = write_certificate(tmp_path, authority)
    client_ca = tmp_path / "clients.pem"
    client_ca.write_bytes(of_clients.cert_pem.bytes())

    def shown(by: trustme.CA) -> dict[str, bytes]:
        issued = by.issue_cert("someone@example.org")
        return roots(authority) | {
            "private_key": issued.private_key_pem.bytes(),
            "certificate_chain": issued.cert_chain_pems[0].bytes(),
        }

    async with serving(**settings(files), tls_client_ca=client_ca) as served:
        assert await ask(served, **shown(of_clients)) == "ab"
        assert await is_refused(served, **shown(trustme.CA()))
        assert await is_refused(served, **roots(authority))


async def test_a_new_certificate_is_taken_without_a_restart_and_a_broken_one_is_not(tmp_path):
    first, second = trustme.CA(), trustme.CA()
    files = write_certificate(tmp_path, first)
    async with serving(**settings(files)) as served:
        assert await ask(served, **roots(first)) == "ab"
        files.tls_key.rename(tmp_path / "away")
        assert await ask(served, **roots(first)) == "ab"
        os.mkfifo(files.tls_key)  # nobody writes into it: a handshake that reads it would wait for ever
        assert await ask(served, **roots(first)) == "ab"
        files.tls_key.unlink()
        write_certificate(tmp_path, second)
        assert await ask(served, **roots(second)) == "ab"
        assert await is_refused(served, **roots(first))


def test_without_tls_the_port_is_this_machines_own_unless_it_is_allowed():
    with pytest.raises(ValueError, match=r"host is 0\.0\.0\.0, and without TLS"):
        ServerConfig(host="0.0.0.0")
    ServerConfig(host="0.0.0.0", is_insecure=True)
    for host in ("127.0.0.1", "::1", "localhost"):
        ServerConfig(host=host)


def test_what_is_wrong_with_a_file_is_told_with_its_name(tmp_path):
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    certificate.write_bytes(issued.cert_chain_pems[0].bytes())
    with pytest.raises(OSError, match=r"No such file or directory: .*key\.pem"):
        server_credentials(ServerConfig(tls_certificate=certificate, tls_key=key))
    key.write_bytes(trustme.CA().issue_cert("localhost").private_key_pem.bytes())
    with pytest.raises(OSError, match=r"key\.pem: not a certificate and its key"):
        server_credentials(ServerConfig(tls_certificate=certificate, tls_key=key))
    loaded = load_pem_private_key(issued.private_key_pem.bytes(), None)
    form = (Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    key.write_bytes(loaded.private_bytes(*form))
    with pytest.raises(OSError, match=r"key\.pem: the key is encrypted"):
        server_credentials(ServerConfig(tls_certificate=certificate, tls_key=key))
