import asyncio
import gc
import weakref

import grpc
import pytest
from grpc import aio

from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.protos.open_inference_pb2 import ModelInferRequest
from seq2seq_serve.server.errors import InvalidRequest
from tests.server.service.harness import serving

SERVICE = "seq2seq.v1.Seq2Seq"
STRICT = (("triton_grpc_error", "true"),)
EMPTY_INFERENCE = ModelInferRequest(model_name="echo").SerializeToString()


@pytest.mark.parametrize(
    ("method", "raws"),
    [
        ("Generate", [b"\xff"]),
        ("Generate", [pb.GenerateRequest(sources=[pb.Source(text=" ")]).SerializeToString()]),
        ("ModelStreamInfer", [b"\xff"]),
        ("ModelStreamInfer", [EMPTY_INFERENCE, EMPTY_INFERENCE, b"\xff"]),
        ("ModelStreamInfer", [EMPTY_INFERENCE, EMPTY_INFERENCE]),
    ],
)
def test_a_refused_message_is_freed_without_the_garbage_collector(method, raws, monkeypatch):
    """24 refused messages of 4 MiB stayed for up to a minute."""
    refusals, begin = [], InvalidRequest.__init__

    def noted(refusal, *arguments, **settings):
        begin(refusal, *arguments, **settings)
        refusals.append(weakref.ref(refusal))

    monkeypatch.setattr(InvalidRequest, "__init__", noted)
    service = SERVICE if method == "Generate" else "inference.GRPCInferenceService"

    async def run():
        async with serving() as served:
            call = served.channel.stream_stream(f"/{service}/{method}")(iter(raws), metadata=STRICT)
            # gRPC's client calls it an internal error of its own where it was still sending.
            with pytest.raises(aio.AioRpcError, match=r"INVALID_ARGUMENT|Internal error from Core"):
                await anext(aiter(call))
            assert refusals
            while any(refusal() for refusal in refusals):
                await asyncio.sleep(0)

    gc.disable()
    try:
        asyncio.run(run())
    finally:
        gc.enable()


async def test_a_method_that_there_is_not_makes_no_label():
    async with serving() as served:
        with pytest.raises(aio.AioRpcError) as caught:
            await served.channel.unary_unary("/made.Up/Name")(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        _, text = await served.http("/metrics")
        assert "made" not in text
