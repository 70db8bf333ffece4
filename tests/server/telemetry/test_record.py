"""The log, the metrics of callers, and the spans of a call."""

import asyncio
import json
import logging

import grpc
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from seq2seq_serve.client import AsyncClient, ClientError
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.protos.open_inference_pb2 import ModelInferRequest
from seq2seq_serve.protos.open_inference_pb2_grpc import GRPCInferenceServiceStub
from seq2seq_serve.server.system.logs import configure_logging
from seq2seq_serve.server.telemetry.access_log import AccessLog
from seq2seq_serve.server.telemetry.record import trace_id_of
from seq2seq_serve.server.telemetry.tracing import Tracing
from tests.server.fakes import record_of
from tests.server.service.harness import access_file, serving

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACED = (("traceparent", f"00-{TRACE}-{PARENT}-01"), ("x-request-id", "mine"))
TOKEN = "secret"


def request(text: str = "abc", **options) -> pb.GenerateRequest:
    return pb.GenerateRequest(sources=[pb.Source(text=text)], options=pb.GenerateOptions(**options))


def lines_of(caplog) -> list[dict[str, object]]:
    return [record.fields for record in caplog.records if record.name.endswith("access_log")]


def test_the_access_log_has_one_line_per_call_with_its_timings(caplog):
    caplog.set_level(logging.INFO)

    async def run():
        async with serving() as served:
            answer = await served.stub.Generate(request(beam_size=2), metadata=TRACED)
            return answer.usage

    usage = asyncio.run(run())
    (line,) = lines_of(caplog)
    durations = {name: line.pop(name) for name in ("queue_ms", "encode_ms", "decode_ms", "total_ms")}
    assert line == {
        "request_id": "mine",
        "service": "seq2seq.v1.Seq2Seq",
        "method": "Generate",
        "code": "OK",
        "model": "echo",
        "caller": "127.0.0.1",
        "mode": "beam",
        "source_tokens": 4,
        "target_tokens": usage.target_tokens,
        "finish_reason": "eos",
        "trace_id": TRACE,
    }
    total = durations.pop("total_ms")
    assert 0 < sum(durations.values()) <= total


async def test_every_protocol_has_its_lines(caplog):
    """Each request of a batch and of a stream has its own; probes have none."""
    caplog.set_level(logging.INFO)
    infer = ModelInferRequest(model_name="echo", id="7")
    text = infer.inputs.add(name="text_input", datatype="BYTES", shape=[2])
    text.contents.bytes_contents.extend([b"a", b"bc"])
    one = ModelInferRequest(model_name="echo")
    one.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"a")
    async with serving() as served, AsyncClient(served.address) as client:
        triton = GRPCInferenceServiceStub(served.channel)
        await client.score("abc", "ab", request_id="scored")
        await triton.ModelInfer(infer, metadata=(("x-request-id", "rows"),))
        stream = triton.ModelStreamInfer(iter([one, one]), metadata=(("x-request-id", "stream"),))
        assert [each async for each in stream]
        batch = client.generate_batch(["a", "b"], request_id="batch")
        assert [each async for each in batch]
        with pytest.raises(ClientError):
            await client.generate(" ", request_id="refused")
    found = {line["request_id"]: line for line in lines_of(caplog)}
    assert set(found) == {"scored", "rows", "stream-1", "stream-2", "batch-0", "batch-1", "refused"}
    assert (found["scored"]["mode"], found["rows"]["source_tokens"]) == ("score", 5)
    assert (found["refused"]["code"], "mode" in found["refused"]) == ("INVALID_ARGUMENT", False)
    assert {line["mode"] for name, line in found.items() if name[-1].isdigit()} == {"greedy"}


def test_a_limit_leaves_out_lines_and_counts_them_but_never_slow_calls(caplog):
    caplog.set_level(logging.INFO)
    log = AccessLog(max_lines=2, slow_seconds=10.0, clock=lambda: 5.0)
    for _ in range(5):
        log.record(record_of())
    log.record(record_of(seconds=10.0))
    log.record(record_of(code="INTERNAL"))
    lines = lines_of(caplog)
    assert [line["code"] for line in lines] == ["OK", "OK", "OK", "INTERNAL"]
    assert [line.get("left_out", 0) for line in lines] == [0, 0, 3, 0]
    assert [line.get("slow", False) for line in lines] == [False, False, True, False]


@pytest.mark.parametrize("log_format", ["json", "text"])
async def test_a_line_is_written_in_both_formats(capsys, log_format):
    configure_logging("info", log_format)
    async with serving() as served:
        await served.stub.Generate(request("텍스트"), metadata=TRACED)
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "mine" in line)
    assert "텍스트" not in line
    if log_format == "json":
        content = json.loads(line)
        assert (content["message"], content["request_id"]) == ("mine Generate OK", "mine")
        assert (content["trace_id"], content["source_tokens"]) == (TRACE, 10)
    else:
        assert (
            "INFO    mine Generate OK service=seq2seq.v1.Seq2Seq model=echo caller=127.0.0.1 mode=greedy "
            in line
        )
        assert line.endswith(f"trace_id={TRACE}")


async def test_callers_with_tokens_are_counted_by_name(tmp_path):
    file = access_file(tmp_path, ("shop", TOKEN, "predict"))
    async with serving(access_file=file) as served:
        async with AsyncClient(served.address, token=TOKEN) as client:
            await client.generate("abc")
        async with AsyncClient(served.address) as client:
            with pytest.raises(ClientError, match="UNAUTHENTICATED"):
                await client.generate("abc")
        assert served.metric("seq2seq_caller_requests_total", caller="shop", code="OK") == 1
        assert served.metric("seq2seq_caller_requests_total") == 1
        assert served.metric("seq2seq_caller_tokens_total", caller="shop", side="source") == 4
        assert served.metric("seq2seq_caller_tokens_total", caller="shop", side="target") == 4


@pytest.fixture
def exporter(monkeypatch) -> InMemorySpanExporter:
    """The exporter that keeps the spans of every server of the test."""
    exporter = InMemorySpanExporter()
    monkeypatch.setattr("seq2seq_serve.server.app.Tracing", lambda: Tracing(exporter))
    return exporter


async def test_a_call_has_spans_of_its_phases_in_the_trace_of_its_caller(exporter):
    async with serving(is_traced=True) as served:
        await served.stub.Generate(request(), metadata=TRACED)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"seq2seq.v1.Seq2Seq/Generate", "queue", "encode", "decode"}
    call = spans.pop("seq2seq.v1.Seq2Seq/Generate")
    assert (f"{call.context.trace_id:032x}", f"{call.parent.span_id:016x}") == (TRACE, PARENT)
    assert (call.kind, call.status.status_code) == (SpanKind.SERVER, StatusCode.UNSET)
    assert call.attributes["seq2seq.request_id"] == "mine"
    assert call.attributes["seq2seq.source_tokens"] == 4
    assert call.resource.attributes["service.name"] == "seq2seq-serve"
    times = [call.start_time]
    for name in ("queue", "encode", "decode"):
        assert spans[name].parent.span_id == call.context.span_id
        times += [spans[name].start_time, spans[name].end_time]
    assert [*times, call.end_time] == sorted([*times, call.end_time])
    (event,) = spans["decode"].events
    assert event.name == "first token"
    assert spans["decode"].start_time <= event.timestamp <= spans["decode"].end_time


async def test_a_call_without_a_trace_begins_one_and_errors_of_ours_are_marked(exporter, caplog):
    caplog.set_level(logging.INFO)
    async with serving(is_traced=True) as served:
        served.runner.error = RuntimeError("broken")
        for text in ("abc", " "):
            with pytest.raises(grpc.aio.AioRpcError):
                await served.stub.Generate(request(text))
    calls = [span for span in exporter.get_finished_spans() if span.kind is SpanKind.SERVER]
    assert [call.status.status_code for call in calls] == [StatusCode.ERROR, StatusCode.UNSET]
    assert [line["trace_id"] for line in lines_of(caplog)] == [
        f"{call.context.trace_id:032x}" for call in calls
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (f"00-{TRACE}-{PARENT}-01", TRACE),
        (f"01-{TRACE}-{PARENT}-01-more", TRACE),
        (f"00-{'0' * 32}-{PARENT}-01", ""),
        (f"00-{TRACE}-{'0' * 16}-01", ""),
        (f"00-{TRACE}-{PARENT}-01-more", ""),
        (f"ff-{TRACE}-{PARENT}-01", ""),
        (f"00-{TRACE.upper()}-{PARENT}-01", ""),
        ("nonsense", ""),
        (b"bytes", ""),
    ],
)
def test_the_trace_of_a_caller_is_read_as_w3c_writes_it(given, expected):
    assert trace_id_of((("traceparent", given),)) == expected
