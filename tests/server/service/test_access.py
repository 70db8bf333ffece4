import asyncio
import hashlib
import logging

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import open_inference_pb2
from protos import seq2seq_v1_pb2 as pb
from protos.open_inference_pb2_grpc import GRPCInferenceServiceStub
from server.service.access import Access
from tests.server.service.harness import serving

UNAUTHENTICATED, DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED


def entry(name: str, token: str, *roles: str) -> str:
    digest = hashlib.sha256(token.encode()).hexdigest()
    return f'[[token]]\nname = "{name}"\nsha256 = "{digest}"\nroles = {list(roles)}\n'


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "access.toml"
    path.write_text(entry("app", "sesame", "predict") + entry("ops", "key", "predict", "admin"))
    return path


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


def test_a_call_needs_a_token_with_the_role_of_its_method(file):
    async def run():
        async with serving(access_file=file) as served:
            assert await generate(served) is UNAUTHENTICATED
            assert await generate(served, bearer("guess")) is UNAUTHENTICATED
            assert await generate(served, [("authorization", "sesame")]) is UNAUTHENTICATED
            assert await generate(served, bearer("sesame")) is grpc.StatusCode.OK
            assert await unload(served, bearer("sesame")) is DENIED
            assert await unload(served, bearer("key")) is grpc.StatusCode.NOT_FOUND
            labels = {"model_name": "", "method": "Generate", "code": "UNAUTHENTICATED"}
            assert served.metric("seq2seq_requests_total", **labels) == 3

    asyncio.run(run())


def test_a_refused_call_has_the_callers_id_or_one_of_its_own(file):
    async def run():
        async with serving(access_file=file) as served:
            ids = []
            for metadata in ((("x-request-id", "mine"),), None, (("x-request-id", "x" * 7000),)):
                with pytest.raises(aio.AioRpcError) as caught:
                    await served.stub.Generate(pb.GenerateRequest(), metadata=metadata)
                assert caught.value.code() is UNAUTHENTICATED
                ids.append(dict(caught.value.trailing_metadata())["x-request-id"])
            assert ids[0] == "mine"
            assert len(ids[1]) == len(ids[2]) == 32

    asyncio.run(run())


def test_streams_are_refused_too_and_probes_are_not(file):
    async def run():
        async with serving(access_file=file) as served:
            stream = served.stub.GenerateStream(pb.GenerateRequest(sources=[pb.Source(text="ab")]))
            assert await code_of(stream.read()) is UNAUTHENTICATED
            both = GRPCInferenceServiceStub(served.channel).ModelStreamInfer()
            assert await code_of(both.read()) is UNAUTHENTICATED
            health = health_pb2_grpc.HealthStub(served.channel)
            assert (await health.Check(health_pb2.HealthCheckRequest())).status

    asyncio.run(run())


def test_a_changed_file_holds_at_once_and_a_broken_one_changes_nothing(file, caplog):
    async def run():
        async with serving(access_file=file) as served:
            file.write_text(entry("app", "new", "predict"))
            assert await generate(served, bearer("sesame")) is UNAUTHENTICATED
            assert await generate(served, bearer("new")) is grpc.StatusCode.OK
            file.write_text("[[token]]\n")
            assert await generate(served, bearer("new")) is grpc.StatusCode.OK
            file.unlink()
            assert await generate(served, bearer("new")) is grpc.StatusCode.OK

    with caplog.at_level(logging.DEBUG):
        asyncio.run(run())
    assert "the tokens stay as they were" in caplog.text
    for secret in ("sesame", "new", hashlib.sha256(b"new").hexdigest()):
        assert f"{secret}\n" not in caplog.text.replace(" ", "\n")


def test_without_a_file_models_change_only_where_that_is_open_to_all():
    async def run():
        async with serving() as served:
            assert await generate(served) is grpc.StatusCode.OK
            assert await unload(served) is DENIED
        async with serving(is_repository_open=True) as served:
            assert await unload(served) is grpc.StatusCode.NOT_FOUND

    asyncio.run(run())


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
        (GOOD.replace('"app"', "7"), "name must be a text"),
        (GOOD + GOOD, "two tokens are the same"),
        ("[[", "is no TOML"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path, text, message):
    path = tmp_path / "access.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Access(path)
