import asyncio
import hashlib
import logging
import os
import queue
import threading

import grpc
import pytest
from grpc import aio
from grpc.aio._server import Server  # `aio.Server` is its interface

from seq2seq_serve.protos import open_inference_pb2
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.protos.open_inference_pb2_grpc import GRPCInferenceServiceStub
from seq2seq_serve.server.errors import Unauthenticated
from seq2seq_serve.server.service import access as access_module
from seq2seq_serve.server.service.access import NEEDS, Access, _address
from tests.server.service.harness import access_file, entry, serving

UNAUTHENTICATED, DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED


@pytest.fixture
def file(tmp_path):
    return access_file(tmp_path, ("app", "sesame", "predict"), ("ops", "key", "predict", "admin"))


def bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


async def code_of(call) -> grpc.StatusCode:
    try:
        await call
    except aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def generate(served, metadata=None):
    request = pb.GenerateRequest(sources=[pb.Source(text="ab")])
    return code_of(served.stub.Generate(request, metadata=metadata))


def unload(served, metadata=None):
    message = open_inference_pb2.RepositoryModelUnloadRequest(model_name="nobody")
    return code_of(GRPCInferenceServiceStub(served.channel).RepositoryModelUnload(message, metadata=metadata))


async def test_a_call_needs_a_token_with_the_role_of_its_method(file):
    async with serving(access_file=file) as served:
        assert await generate(served) is UNAUTHENTICATED
        assert await generate(served, bearer("guess")) is UNAUTHENTICATED
        assert await generate(served, [("authorization", "sesame")]) is UNAUTHENTICATED
        assert await generate(served, bearer("sesame")) is grpc.StatusCode.OK
        assert await unload(served, bearer("sesame")) is DENIED
        assert await unload(served, bearer("key")) is grpc.StatusCode.NOT_FOUND
        labels = {"model_name": "", "method": "Generate", "code": "UNAUTHENTICATED"}
        assert served.metric("seq2seq_requests_total", **labels) == 3


def passes(access: Access, token: str) -> bool:
    try:
        access.check("/seq2seq.v1.Seq2Seq/Generate", access.caller_of(bearer(token), "ipv4:10.0.0.7:50124"))
    except Unauthenticated:
        return False
    return True


def test_a_changed_file_holds_and_a_broken_one_changes_nothing(file, caplog):
    access = Access(file)
    file.write_text(entry("app", "new", "predict"))
    assert access.refresh()
    assert not passes(access, "sesame")
    assert passes(access, "new")
    for break_it in (
        lambda: file.write_text("[[token]]\n"),
        lambda: file.write_text(entry("unset", "", "admin")),
        file.unlink,
    ):
        break_it()
        caplog.clear()
        with caplog.at_level(logging.DEBUG):
            assert not access.refresh()
            assert passes(access, "new")
            assert not passes(access, "")
        assert "the tokens are unchanged" in caplog.text
        for secret in ("sesame", "new", hashlib.sha256(b"new").hexdigest()):
            assert f"{secret}\n" not in caplog.text.replace(" ", "\n")


async def test_a_server_reads_a_changed_file_by_itself_on_another_thread(file, monkeypatch):
    """A pipe in the place of the file stopped the event loop."""
    monkeypatch.setattr(access_module, "_LOOK_SECONDS", 0.01)
    threads = queue.SimpleQueue()
    parse = access_module._parse
    monkeypatch.setattr(
        access_module, "_parse", lambda *given: threads.put(threading.get_ident()) or parse(*given)
    )
    async with serving(access_file=file) as served:
        assert threads.get() == threading.get_ident()  # at the start
        file.write_text(entry("app", "new", "predict"))
        assert await asyncio.to_thread(threads.get, timeout=20) != threading.get_ident()
        while await generate(served, bearer("new")) is UNAUTHENTICATED:
            await asyncio.sleep(0.01)
        assert await generate(served, bearer("sesame")) is UNAUTHENTICATED


async def test_every_method_of_every_served_service_is_in_the_table_and_no_other_is(file, monkeypatch):
    paths: set[str] = set()
    add = Server.add_generic_rpc_handlers

    def collect(server, handlers):
        for handler in handlers:
            paths.update(getattr(handler, "_method_handlers", ()))  # none of unsupported methods
        add(server, handlers)

    monkeypatch.setattr(Server, "add_generic_rpc_handlers", collect)
    async with serving(access_file=file) as served:
        # Health's List is registered by newer versions of `grpcio-health-checking` only.
        assert paths | {"/grpc.health.v1.Health/List"} == NEEDS.keys()
        for path in paths:
            stub = served.channel.stream_stream(path)
            code = grpc.StatusCode.INTERNAL  # gRPC's client calls it so where it was still sending
            while code is grpc.StatusCode.INTERNAL:
                code = await code_of(stub(iter([b""])).read())
            assert (code is UNAUTHENTICATED) == (NEEDS[path] != "nothing"), path


@pytest.mark.parametrize("has_file", [True, False])
async def test_a_method_that_is_not_in_the_table_is_for_nobody(has_file, file, monkeypatch):
    monkeypatch.delitem(access_module.NEEDS, "/seq2seq.v1.Seq2Seq/Generate")
    async with serving(access_file=file if has_file else None) as served:
        assert await generate(served, bearer("key")) is DENIED


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.7:50124", "10.0.0.7"),
        ("ipv6:%5B2001:db8::17%5D:50124", "2001:db8::"),
        ("ipv6:%5B2001:db8::ffff:1%5D:9", "2001:db8::"),
        ("ipv6:%5Bfe80::1%25eth0%5D:9", "fe80::"),
        ("ipv6:%5B::ffff:10.0.0.7%5D:9", "10.0.0.7"),
        ("unix:", "unix:"),
    ],
)
def test_a_caller_without_a_token_is_known_by_its_address(peer, address):
    assert _address(peer) == address


async def test_without_a_file_models_change_only_where_that_is_open_to_all():
    async with serving() as served:
        assert await generate(served) is grpc.StatusCode.OK
        assert await unload(served) is DENIED
    async with serving(is_repository_open=True) as served:
        assert await unload(served) is grpc.StatusCode.NOT_FOUND


GOOD = entry("app", "sesame", "predict")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a table \\[\\[token\\]\\]"),
        ("token = 3", "a table \\[\\[token\\]\\]"),
        ("[[token]]\nname = 'a'", "token 1 needs name, sha256 and roles"),
        (GOOD + "more = 1", "token 1 needs name, sha256 and roles"),
        (GOOD.replace("predict", "root"), "roles must be a list of predict, admin"),
        (GOOD.replace("['predict']", "[]"), "roles must be a list"),
        (GOOD.replace('sha256 = "', 'sha256 = "zz'), "64 hexadecimal digits"),
        (GOOD.replace('"app"', "7"), "name must be a string"),
        (GOOD + GOOD, "two tokens have the same sha256"),
        ("[[", "is not TOML"),
        (entry("unset", "", "predict"), "sha256 is that of the empty text"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path, text, message):
    path = tmp_path / "access.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Access(path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "is not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is not a regular file"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.touch() or os.truncate(path, 300_000_000), "more than 1048576 bytes"),
        (lambda path: path.write_text("a=" + "[\n" * 10_000), "is nested too deeply"),
        (lambda path: path.write_text("a." * 100_000 + "a=1"), "a line of more than 1000 bytes"),
        (lambda path: path.write_bytes(b"\xff"), "is not TOML"),
    ],
)
def test_a_hostile_file_is_one_line_at_the_start_and_in_a_running_server(file, make, message, caplog):
    access = Access(file)
    file.unlink()
    make(file)
    with pytest.raises((OSError, ValueError), match=message):
        Access(file)
    assert not access.refresh()
    assert not access.refresh()
    [record] = caplog.records
    assert message in record.getMessage()
    assert record.exc_info is None
    assert passes(access, "sesame")
