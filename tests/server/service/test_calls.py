import asyncio
import logging
import math
import re
import threading

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc import StatusCode, aio
from grpc.aio import AioRpcError
from grpc_status import rpc_status

from seq2seq_serve.client import AsyncClient, ClientError
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.config import QueueLimits
from seq2seq_serve.server.errors import DeadlineExceeded
from seq2seq_serve.server.service import calls
from seq2seq_serve.server.service.calls import SMALL_REQUEST_BYTES, Calls, Outbox, RemoteCall
from seq2seq_serve.server.service.health import SEQ2SEQ
from seq2seq_serve.server.service.seq2seq import generation, service
from seq2seq_serve.server.service.write import responses as answers
from seq2seq_serve.server.telemetry.metrics import Metrics
from tests.server.service.harness import EchoRunner, make_calls, serving

REQUEST = pb.GenerateRequest(sources=[pb.Source(text="abc")])


async def test_the_callers_request_id_is_kept_and_otherwise_one_is_made():
    async with serving() as served, AsyncClient(served.address) as client:
        given = await client.generate("abc", request_id="order-66/b")
        assert given.request_id == "order-66/b"
        made = [(await client.generate("abc")).request_id for _ in range(2)]
        assert all(made)
        assert made[0] != made[1]
        with pytest.raises(ClientError) as caught:
            await client.generate("", request_id="order-67")
        assert caught.value.request_id == "order-67"


def opened(given_id: str | bytes) -> RemoteCall:
    """A call whose caller sent an id."""
    metadata = (("x-request-id", given_id),)
    return make_calls(Metrics()).open(
        SEQ2SEQ.full_name, "Generate", metadata=metadata, peer="", remaining_seconds=None, write=None
    )


@pytest.mark.parametrize(
    "given",
    ["", "x" * 129, "a caller=root", "caller=root", 'a"b', "a\nCRITICAL forged", "é", "\xff", "\t", b"raw"],
)
def test_an_id_that_cannot_be_sent_back_or_logged_is_replaced(given):
    assert re.fullmatch("[0-9a-f]{32}", opened(given).request_id)
    assert opened(given).refusal is not None


@pytest.mark.parametrize("name", ["n-th-model", "n" * 5000])
async def test_an_unknown_model_is_not_found_and_its_name_becomes_no_label(name):
    async with serving(names=("first", "second")) as served, AsyncClient(served.address) as client:
        with pytest.raises(
            ClientError, match=r"^NOT_FOUND: no model is named 'n.*: this server has first, second"
        ):
            await client.generate("abc", model=name)
        with pytest.raises(ClientError, match="NOT_FOUND"):
            async for _ in client.stream("abc", model=name):
                pass
        with pytest.raises(aio.AioRpcError, match="NOT_FOUND"):
            await served.stub.GetModel(pb.GetModelRequest(model=name))
        for method in ("Generate", "GenerateStream", "GetModel"):
            labels = {"model_name": "", "method": method, "code": "NOT_FOUND"}
            assert served.metric("seq2seq_requests_total", **labels) == 1
        assert name not in (await served.http("/metrics"))[1]


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_a_bug_is_internal_with_a_fixed_text_and_its_traceback_is_in_the_log(method, caplog):
    async def run():
        async with serving() as served:

            def explode(requests, is_expired, **_options):
                raise RuntimeError("secret customer text")

            served.model.engine.submitted = explode
            call = getattr(served.stub, method)(REQUEST, metadata=(("x-request-id", "bug-1"),))
            with pytest.raises(aio.AioRpcError) as caught:
                await (call if method == "Generate" else anext(aiter(call)))
            error = caught.value
            assert error.code() is grpc.StatusCode.INTERNAL
            assert (
                error.details() == "internal error: the server's log has the details under this request's id"
            )
            assert dict(error.trailing_metadata())["x-request-id"] == "bug-1"
            assert "secret" not in str(error.trailing_metadata())
            labels = {"model_name": "echo", "method": method, "code": "INTERNAL"}
            assert served.metric("seq2seq_requests_total", **labels) == 1

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())
    [record] = caplog.records
    assert record.getMessage() == f"bug-1 {method}: a bug"
    assert "RuntimeError: secret customer text" in caplog.text


def abandoned(calls: Calls) -> RemoteCall:
    """A call whose caller has just left."""

    async def write(_message: object) -> None:
        raise aio.InternalError('Failed "execute_batch"')

    return calls.open(
        "seq2seq.v1.Seq2Seq",
        "GenerateStream",
        metadata=(),
        peer="ipv4:127.0.0.1:50124",
        remaining_seconds=None,
        write=write,
    )


async def test_a_caller_who_leaves_without_reading_is_cancelled_without_a_traceback(caplog):
    """The write fails before gRPC cancels the handler, which was logged and counted as INTERNAL."""
    metrics = Metrics()
    calls = make_calls(metrics)
    call = abandoned(calls)
    with pytest.raises(asyncio.CancelledError):
        await calls.run(call, call.send(pb.GenerateStreamResponse()))
    calls.close_call(call)
    labels = {"model_name": "", "method": "GenerateStream", "code": "CANCELLED"}
    assert metrics.registry.get_sample_value("seq2seq_requests_total", labels) == 1
    assert calls.num_open == 0
    assert caplog.records == []


async def test_the_end_does_not_wait_for_calls_that_nobody_reads():
    """A stream that was not read held the server up for half a minute beyond its time to drain."""
    calls = make_calls(Metrics())
    abandoned(calls)
    async with asyncio.timeout(10):
        await calls.wait_until_quiet()


async def test_other_tasks_have_their_turn_between_the_items_of_a_call():
    """All items that may be open at once were read, and then submitted, in one turn of the event loop."""
    opened, order = make_calls(Metrics()), []
    call, items = abandoned(opened), iter(range(64))

    async def following() -> int | None:
        return next(items, None)

    async def answer(item: int, its: RemoteCall) -> None:
        order.append(str(item))
        await asyncio.sleep(0)
        order.append(str(item))

    async def other() -> None:
        while True:
            order.append("other")
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    await opened.answer_items(call, following, 64, answer)
    beside.cancel()
    opened.close_call(call)
    assert len(order) - order.count("other") == 2 * 64
    turns = " ".join(order).split("other")
    assert max(len(turn.split()) for turn in turns) <= 2 * calls._MOST_BEGUN, order


async def test_what_a_request_of_a_call_holds_ends_with_it():
    opened = make_calls(Metrics())
    call, items, held = abandoned(opened), iter(range(3)), []

    async def following() -> int | None:
        return next(items, None)

    async def answer(item: int, its: RemoteCall) -> None:
        its.hold(100_000)
        held.append(opened.held.held.total())
        if item == 2:
            raise KeyError(item)

    with pytest.raises(KeyError):
        await opened.answer_items(call, following, 1, answer)
    opened.close_call(call)
    assert held == [100_000] * 3
    assert not opened.held.held


async def test_a_refusal_carries_what_a_program_can_compare():
    async with serving() as served:
        with pytest.raises(aio.AioRpcError) as caught:
            await served.stub.Generate(pb.GenerateRequest(), metadata=(("x-request-id", "r1"),))
        status = rpc_status.from_call(caught.value)
        assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        info, request_info, bad_request = (
            error_details_pb2.ErrorInfo(),
            error_details_pb2.RequestInfo(),
            error_details_pb2.BadRequest(),
        )
        for detail, message in zip(status.details, (info, request_info, bad_request), strict=True):
            assert detail.Unpack(message)
        assert (info.reason, info.domain) == ("INVALID_REQUEST", "seq2seq-serve")
        assert request_info.request_id == "r1"
        assert bad_request.field_violations[0].field == "sources"


@pytest.mark.parametrize(
    ("options", "source"),
    [
        ({"num_hypotheses": 4, "num_alternatives": 32, "temperature": 1.0}, "abc"),
        ({"attention": True, "beam_size": 4, "num_hypotheses": 4}, "x" * 63),
        ({"long_source": pb.LONG_SOURCE_SPLIT, "num_alternatives": 32}, "Short one. " * 30),
    ],
)
async def test_an_answer_that_may_become_too_long_is_refused_before_the_work(monkeypatch, options, source):
    """A split of 64 sentences was decoded for 23.7 s and refused then."""
    monkeypatch.setattr("seq2seq_serve.server.service.calls.MAX_ANSWER_BYTES", 50_000)
    request = pb.GenerateRequest(sources=[pb.Source(text=source)], options=pb.GenerateOptions(**options))
    async with serving() as served:
        for call in (served.stub.Generate(request), anext(aiter(served.stub.GenerateStream(request)))):
            with pytest.raises(aio.AioRpcError, match=r"up to \d+ bytes.*: lower max_new") as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert served.turns.num_submitted == 0
        request.options.max_new_tokens = 1
        await served.stub.Generate(request)


async def test_a_text_of_more_sentences_than_may_wait_is_refused_by_their_number():
    """A caller who sent one text read that the call had many requests."""
    request = pb.GenerateRequest(sources=[pb.Source(text="One. Two. Three.")])
    request.options.long_source = pb.LONG_SOURCE_SPLIT_ALWAYS
    async with serving(queue=QueueLimits(max_waiting_requests=2)) as served:
        expected = "the call has 3 sentences, and at most 2 may wait here: send fewer in one call"
        with pytest.raises(aio.AioRpcError, match=expected):
            await served.stub.Generate(request)


async def test_a_large_answer_is_built_beside_the_event_loop(monkeypatch):
    threads = []
    add = answers._add_alternatives

    def noted(*arguments):
        threads.append(threading.current_thread().name)
        add(*arguments)

    monkeypatch.setattr(answers, "_add_alternatives", noted)
    async with serving() as served, AsyncClient(served.address) as client:
        for num_alternatives in (3, 32):
            options = pb.GenerateOptions(num_alternatives=num_alternatives, num_hypotheses=3)
            await client.generate("abc", options=options)
    assert [name.partition("_")[0] for name in threads] == ["MainThread"] * 3 + ["answers"] * 3


def test_texts_are_never_logged(caplog):
    async def run():
        async with serving() as served, AsyncClient(served.address) as client:
            await client.generate("secret", request_id="r2")
            with pytest.raises(ClientError):
                await client.generate("secret" * 100)

    with caplog.at_level(logging.DEBUG):
        asyncio.run(run())
    assert "r2 Generate OK" in caplog.text
    assert "secret" not in caplog.text


async def test_large_requests_are_bounded_while_their_calls_are_open(monkeypatch):
    """GRPC keeps a request's bytes until its call ends: a thousand of 4 MiB could wait."""
    monkeypatch.setattr(calls, "_MAX_HELD_BYTES", 100_000)
    padding = b"\xba\x3e" + b"\xd0\x86\x03" + bytes(50_000)  # a field that the message does not have
    small = pb.GenerateRequest(sources=[pb.Source(text="a")]).SerializeToString()
    async with serving() as served:
        send = served.channel.unary_unary("/seq2seq.v1.Seq2Seq/Generate")
        served.runner.gate.clear()
        waiting = [asyncio.ensure_future(send(small + padding))]
        await served.turns.until(lambda: served.turns.num_submitted == 1)
        with pytest.raises(
            AioRpcError, match=r"large requests and answers of 500[0-9]{2} bytes are open"
        ) as caught:
            await send(small + padding)
        assert caught.value.code() is StatusCode.RESOURCE_EXHAUSTED
        waiting.append(asyncio.ensure_future(send(small)))
        await served.turns.until(lambda: served.turns.num_submitted == 2)
        served.runner.gate.set()
        await asyncio.gather(*waiting)
        await send(small + padding)
        await served.until_calls_are_over()
        assert not served.app.calls.held.held


LONG = "a" * 100
NARROW = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))


def reading_nothing(channel, method: str):
    """A call for an answer of 40 KB, none of which is read."""
    options = pb.GenerateOptions(attention=True)
    request = pb.GenerateRequest(sources=[pb.Source(text=LONG)], options=options)
    return channel.unary_stream(f"/seq2seq.v1.Seq2Seq/{method}")(request.SerializeToString())


async def read_all(call) -> None:
    while await call.read() is not aio.EOF:
        pass


async def until_held(served, least: int, most: float = math.inf) -> None:
    async with asyncio.timeout(20):
        while not least <= served.app.calls.held.held.total() <= most:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_answers_that_callers_do_not_take_are_bounded(monkeypatch, method):
    """Of streams with alternatives that nobody read, a connection held 805 MiB."""
    monkeypatch.setattr(calls, "_MAX_HELD_BYTES", 70_000)
    async with (
        serving(EchoRunner(max_source_length=128, max_target_length=128)) as served,
        aio.insecure_channel(served.address, options=NARROW) as channel,
    ):
        unread = reading_nothing(channel, method)
        await served.turns.until(lambda: served.turns.num_ended == 1)
        await until_held(served, 40_000, 70_000)
        with pytest.raises(AioRpcError, match=r"large requests and answers of 4[0-9]{4} bytes") as caught:
            await read_all(reading_nothing(channel, method))
        assert caught.value.code() is StatusCode.RESOURCE_EXHAUSTED
        short = pb.GenerateRequest(sources=[pb.Source(text=LONG)])
        assert (await served.stub.Generate(short)).hypotheses[0].text == LONG
        unread.cancel()
        await until_held(served, 0, 0)


async def test_a_stream_that_may_become_long_is_counted_before_it_is_decoded(monkeypatch):
    """The engine keeps the result of a stream whose first piece is not read."""
    monkeypatch.setattr(calls, "_MAX_HELD_BYTES", 300_000)
    async with serving(EchoRunner(max_source_length=128, max_target_length=128)) as served:
        served.runner.gate.clear()
        waiting = reading_nothing(served.channel, "GenerateStream")
        await served.turns.until(lambda: served.turns.num_submitted == 1)
        assert served.app.calls.held.held.total() > 6 * 40_000
        with pytest.raises(AioRpcError, match="large requests and answers"):
            await reading_nothing(served.channel, "GenerateStream").read()
        assert served.turns.num_submitted == 1
        served.runner.gate.set()
        await read_all(waiting)
        await until_held(served, 0, 0)


def batch_of(channel, num_items: int):
    """A call for answers of 40 KB each."""
    item = pb.BatchItem(sources=[pb.Source(text=LONG)])
    request = pb.GenerateBatchRequest(items=[item] * num_items, options=pb.GenerateOptions(attention=True))
    return channel.unary_stream("/seq2seq.v1.Seq2Seq/GenerateBatch")(request.SerializeToString())


async def test_answers_of_an_accepted_batch_wait_for_a_slow_caller(monkeypatch):
    """An answer for which there was no room ended the batch, and no status reached the caller."""
    monkeypatch.setattr(calls, "_MAX_HELD_BYTES", 150_000)
    async with (
        serving(EchoRunner(max_source_length=128, max_target_length=128)) as served,
        aio.insecure_channel(served.address, options=NARROW) as channel,
    ):
        call = batch_of(channel, 20)
        await served.turns.until(lambda: served.turns.num_ended == 20)
        async with asyncio.timeout(20):
            answers = [pb.GenerateBatchResponse.FromString(raw) async for raw in call]
        assert sorted(answer.index for answer in answers) == list(range(20))
        assert not any(answer.HasField("error") for answer in answers)
        await until_held(served, 0, 0)


async def test_answers_that_wait_are_joined_up_to_a_few_kilobytes_without_those_of_cancelled_requests():
    written, gate = [], asyncio.Event()

    async def write(content):
        written.append(content)
        await gate.wait()

    outbox = Outbox(write, b"".join)
    writing = [asyncio.create_task(outbox.write(content)) for content in (b"a", b"b")]
    while not written:
        await asyncio.sleep(0)
    large = b"x" * (SMALL_REQUEST_BYTES - 1)
    writing += [asyncio.create_task(outbox.write(content)) for content in (b"c", b"d", large, b"e", b"f")]
    await asyncio.sleep(0)
    writing[2].cancel()
    await asyncio.sleep(0)
    gate.set()
    await outbox.close()
    assert written == [b"ab", b"d" + large, b"ef"]
    await asyncio.gather(*writing[:2], *writing[3:])


async def test_an_error_of_a_write_is_raised_for_each_of_its_answers():
    async def write(_):
        raise ValueError("gone")

    outbox = Outbox(write, None)
    raised = await asyncio.gather(*map(outbox.write, (b"a", b"b")), return_exceptions=True)
    assert [str(error) for error in raised] == ["gone", "gone"]
    await outbox.close()


async def test_an_error_that_ends_a_batch_reaches_a_caller_who_reads_slowly(monkeypatch):
    """It cancelled the writing of another answer, and gRPC sends no status during a write."""
    failed = asyncio.Event()

    async def generate(rows, decoding, call):
        if call.request_id.endswith("-0"):
            return await generation.generate(rows, decoding, call)
        while call.write.__self__._writing is None:
            await asyncio.sleep(0.01)
        failed.set()
        raise DeadlineExceeded("the deadline passed")

    monkeypatch.setattr(service, "generate", generate)
    async with (
        serving(EchoRunner(max_source_length=128, max_target_length=128)) as served,
        aio.insecure_channel(served.address, options=NARROW) as channel,
    ):
        call = batch_of(channel, 2)
        await failed.wait()
        async with asyncio.timeout(20):
            assert len(pb.GenerateBatchResponse.FromString(await call.read()).response.hypotheses) == 1
            with pytest.raises(AioRpcError, match="the deadline passed"):
                await call.read()
        await until_held(served, 0, 0)
