import asyncio
import itertools
import math
from functools import partial
from types import SimpleNamespace

import grpc
import pytest
from grpc import aio

from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.service import calls as calls_module
from seq2seq_serve.server.service import rpcs as rpcs_module
from seq2seq_serve.server.service.health import SEQ2SEQ
from seq2seq_serve.server.service.rpcs import Rpcs
from seq2seq_serve.server.service.seq2seq.service import Seq2SeqService
from seq2seq_serve.server.telemetry.metrics import Metrics
from tests.server.service.harness import access_file, make_calls, serving

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


async def test_bytes_that_are_no_message_are_the_callers_mistake():
    async with serving() as served:
        for path, raw in itertools.product(PATHS, (b"\xff", b"\x0a\x05ab", b"\x0a\x02\xff\xff")):
            with pytest.raises(aio.AioRpcError, match="are not a message of this method") as caught:
                await answer(served, path, raw)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "path", ["/seq2seq.v1.Seq2Seq/Generate", "/inference.GRPCInferenceService/ModelStreamInfer"]
)
async def test_a_message_of_many_empty_messages_is_refused_before_it_is_built(path):
    raw = b"\x12\x00" * 2**20 if path.endswith("Generate") else b"\x2a\x00" * 2**20
    async with serving() as served:
        with pytest.raises(aio.AioRpcError, match="the message has more than 8192 fields") as caught:
            await answer(served, path, raw)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_other_tasks_have_their_turn_between_large_messages():
    raw = pb.GenerateRequest(model="x" * 2**15).SerializeToString()
    order = []
    rpcs = Rpcs(make_calls(Metrics()))

    async def parse(number):
        await rpcs.parse_large(raw, pb.GenerateRequest)
        order.append(number)

    async def other():
        for _ in range(8):
            order.append("other")
            await asyncio.sleep(0)

    await asyncio.gather(*(parse(number) for number in range(4)), other())
    parsed = [place for place, what in enumerate(order) if what != "other"]
    assert all("other" in order[first:second] for first, second in itertools.pairwise(parsed)), order


async def test_nothing_is_read_of_a_call_without_the_right_to_its_method(tmp_path):
    """400 messages of 4 MiB without a token took 0.9 GB: gRPC reads a unary call's before the handler."""
    file = access_file(tmp_path, ("a", "secret", "predict"))
    async with serving(access_file=file) as served:
        call = served.channel.stream_unary("/seq2seq.v1.Seq2Seq/Generate")(stalled())
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_unary_call_has_a_message():
    async with serving() as served:
        call = served.channel.stream_unary("/seq2seq.v1.Seq2Seq/Generate")(iter([]))
        with pytest.raises(aio.AioRpcError, match="must have a message") as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def stalled():
    """Messages of a caller who does not send any."""
    await asyncio.sleep(60)
    yield b""


async def test_callers_who_do_not_send_stall_no_call_and_no_probe():
    """Those without a message took the places of all: others waited until their time was over."""
    paths = "/seq2seq.v1.Seq2Seq/Generate", "/grpc.health.v1.Health/Check"
    raw = pb.GenerateRequest(sources=[pb.Source(text="a")]).SerializeToString()
    async with serving() as served:
        waiting = [served.channel.stream_unary(path)(stalled()) for path in paths for _ in range(30)]
        while served.app.calls.num_open < 30:
            await asyncio.sleep(0)
        assert await served.channel.unary_unary(paths[1])(b"") == b"\x08\x01"  # SERVING
        assert await served.channel.unary_unary(paths[0])(raw)
        assert not all(call.done() for call in waiting)  # which have 30 seconds
        for call in waiting:
            call.cancel()


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_a_method_without_sources_takes_small_messages_only(method):
    """200 probes with 4 MiB each took 0.5 GB, and need no token."""
    async with serving() as served:
        call = served.channel.unary_stream(f"/grpc.health.v1.Health/{method}")(bytes(20_000))
        with pytest.raises(aio.AioRpcError, match="this method takes at most 16384") as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_streams_that_last_are_bounded(monkeypatch):
    """6,000 callers who watched the health took 255 MiB, and need no token."""
    monkeypatch.setattr(calls_module, "_MOST_STREAMS", 2)
    watch, infer = "/grpc.health.v1.Health/Watch", "/inference.GRPCInferenceService/ModelStreamInfer"
    async with serving() as served:
        first = served.channel.unary_stream(watch)(b"")
        assert await first.read() == b"\x08\x01"
        second = served.channel.stream_stream(infer)()
        await second.write(b"")
        await second.read()
        for more in (served.channel.unary_stream(watch)(b""), served.channel.stream_stream(infer)()):
            with pytest.raises(
                aio.AioRpcError, match="2 streams are open, 2 of them this caller's"
            ) as caught:
                await more.read()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()
        while len(served.app.calls.streams.held) and served.app.calls.streams.held.total() > 1:
            await asyncio.sleep(0)
        third = served.channel.unary_stream(watch)(b"")
        assert await third.read() == b"\x08\x01"
        await second.done_writing()
        assert await second.read() is aio.EOF
        third.cancel()
        while served.app.calls.streams.held:
            await asyncio.sleep(0)


async def test_calls_that_are_left_at_once_are_opened_no_more(monkeypatch):
    """20,000 calls, each cancelled after a millisecond, made others wait for seconds."""
    for name in ("_HASTY_SECONDS", "_WARY_SECONDS"):
        monkeypatch.setattr(rpcs_module, name, math.inf)
    counted, path = make_calls(Metrics()), "/seq2seq.v1.Seq2Seq/Generate"
    opened = []
    open_call = counted.open
    monkeypatch.setattr(
        counted, "open", lambda *given, **named: opened.append(1) or open_call(*given, **named)
    )
    handle = (
        Rpcs(counted).handlers(SEQ2SEQ, Seq2SeqService()).service(SimpleNamespace(method=path)).stream_unary
    )
    context = SimpleNamespace(
        invocation_metadata=tuple,
        peer=lambda: "ipv4:127.0.0.1:1",
        time_remaining=lambda: None,
        read=partial(asyncio.sleep, 60),
        write=None,
    )
    calls = [asyncio.create_task(handle(stalled(), context))]
    for _ in range(4):
        await asyncio.sleep(0)
        calls[-1].cancel()
        await asyncio.wait(calls)
        calls.append(asyncio.create_task(handle(stalled(), context)))
    assert len(opened) == 1
    while not counted.num_open:  # the last one stays
        await asyncio.sleep(0)
    calls[-1].cancel()
    await asyncio.wait(calls)


async def test_a_drain_does_not_wait_for_messages_that_do_not_come():
    async with serving() as served:
        call = served.channel.stream_unary("/seq2seq.v1.Seq2Seq/Generate")(stalled())
        while not served.app.calls.num_open:
            await asyncio.sleep(0)
        draining = asyncio.create_task(served.app.drain())
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        await draining
