import asyncio

import grpc
import pytest
from grpc import aio

from tests.server.service.harness import serving

PATHS = {
    "/seq2seq.v1.Seq2Seq/Generate": "unary_unary",
    "/seq2seq.v1.Seq2Seq/GenerateStream": "unary_stream",
    "/inference.GRPCInferenceService/ModelInfer": "unary_unary",
    "/inference.GRPCInferenceService/ModelStreamInfer": "stream_stream",
    "/grpc.health.v1.Health/Check": "unary_unary",
    "/grpc.health.v1.Health/Watch": "unary_stream",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": "stream_stream",
}


async def answer(served, path: str, raw: bytes) -> None:
    call = getattr(served.channel, PATHS[path])(path)
    if PATHS[path] == "unary_unary":
        await call(raw)
        return
    stream = call(raw) if PATHS[path] == "unary_stream" else call(iter([raw]))
    while await stream.read() is not aio.EOF:
        pass


@pytest.mark.parametrize("raw", [b"\xff", b"\x0a\x05ab", b"\x0a\x02\xff\xff"])
@pytest.mark.parametrize("path", PATHS)
def test_bytes_that_are_no_message_are_the_callers_mistake(path, raw):
    async def run():
        async with serving() as served:
            with pytest.raises(aio.AioRpcError, match="are no message of this method") as caught:
                await answer(served, path, raw)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(run())
