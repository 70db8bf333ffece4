import asyncio

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc import aio
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ResponseReceived, StreamEnded, TrailersReceived

from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.protos.orca_pb2 import LoadReport, LoadReportRequest
from seq2seq_serve.server.service.orca import load_report
from seq2seq_serve.server.statistics import RecentLoad
from tests.server.service.harness import EchoRunner, serving
from tests.server.test_statistics import Clock

TEXT = pb.GenerateRequest(sources=[pb.Source(text="abc")])
BLANK = pb.GenerateRequest(sources=[pb.Source(text="")])


async def trailers_of(address, method, request):
    """The trailers of a call as they are on the wire; gRPC's own client hides this one."""
    host, _, port = address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    connection = H2Connection(H2Configuration(header_encoding="ascii"))
    connection.initiate_connection()
    headers = {":method": "POST", ":scheme": "http", ":authority": address, ":path": method}
    headers |= {"te": "trailers", "content-type": "application/grpc"}
    connection.send_headers(1, list(headers.items()))
    message = request.SerializeToString()
    connection.send_data(1, b"\0" + len(message).to_bytes(4, "big") + message, end_stream=True)
    trailers = {}
    try:
        while True:
            writer.write(connection.data_to_send())
            for event in connection.receive_data(await reader.read(65536)):
                if isinstance(event, ResponseReceived | TrailersReceived):
                    trailers = dict(event.headers)  # a call that ends at once has only one block of both
                if isinstance(event, StreamEnded):
                    return trailers
    finally:
        writer.close()


def load_stream(channel):
    return channel.unary_stream(
        "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics",
        request_serializer=LoadReportRequest.SerializeToString,
        response_deserializer=LoadReport.FromString,
    )


def test_answers_and_streams_end_with_18_bytes_of_load():
    async def run():
        async with serving() as served:
            for method in ("Generate", "GenerateStream"):
                trailers = await trailers_of(served.address, f"/seq2seq.v1.Seq2Seq/{method}", TEXT)
                assert trailers["grpc-status"] == "0"
                # 24 characters without the padding of base64 are 18 bytes
                assert len(trailers["endpoint-load-metrics-bin"].rstrip("=")) == 24

    asyncio.run(run())


def test_refused_calls_report_the_load_too_and_probes_do_not():
    async def run():
        async with serving() as served:
            await served.stub.Generate(TEXT)
            refused = await trailers_of(served.address, "/seq2seq.v1.Seq2Seq/Generate", BLANK)
            assert refused["grpc-status"] == "3"
            assert {"x-request-id", "grpc-status-details-bin", "endpoint-load-metrics-bin"} <= refused.keys()
            probe = await trailers_of(served.address, "/grpc.health.v1.Health/Check", pb.ListModelsRequest())
            assert probe["grpc-status"] == "0"
            assert "endpoint-load-metrics-bin" not in probe

    asyncio.run(run())


def test_a_stream_of_reports_shows_the_slots_of_waiting_calls_and_forgets_them():
    async def run():
        runner = EchoRunner(num_slots=2)
        runner.gate.clear()
        async with serving(runner) as served:
            calls = [served.stub.Generate(TEXT) for _ in range(6)]
            reports = load_stream(served.channel)(LoadReportRequest())
            async for report in reports:
                if report.application_utilization > 1:  # 6 slots wanted of 2
                    break
            assert report.rps_fractional == 0
            runner.gate.set()
            await asyncio.gather(*calls)
            highest = report.application_utilization
            async for report in reports:
                if report.application_utilization < highest:
                    break
            assert report.rps_fractional > 0
            reports.cancel()

    asyncio.run(run())


def test_the_load_is_that_of_the_busiest_model_and_the_calls_of_all():
    async def run():
        async with serving(names=("first", "second")) as served:
            for model, num_slots in zip(served.app._models, (6, 1), strict=True):
                model.deliveries.recent_load = load = RecentLoad(clock := Clock())
                load.begin(num_slots)
                clock.now = 100.0
                load.end(0, is_answered=True)
            assert load_report(served.app._models) == LoadReport(
                application_utilization=6 / model.num_slots, rps_fractional=2 * load.averages()[0]
            )

    asyncio.run(run())


def test_reports_come_at_the_interval_that_the_caller_asks_for():
    async def run():
        async with serving() as served:
            calls = [
                load_stream(served.channel)(LoadReportRequest(report_interval=Duration(seconds=seconds)))
                for seconds in (0, 3600, -5, 10**12)
            ]
            for call in calls:
                await call.read()
            await calls[0].read()
            await calls[2].read()
            for call in (calls[1], calls[3]):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(call.read(), 0.1)
            for call in calls:
                call.cancel()

    asyncio.run(run())


def test_a_stream_of_reports_does_not_hold_up_the_end_of_the_server():
    async def run():
        async with serving() as served:
            call = load_stream(served.channel)(LoadReportRequest(report_interval=Duration(seconds=3600)))
            await call.read()
            assert served.app._calls.num_open == 0
            served.app._health.close()
            assert await call.read() is aio.EOF
            assert await call.code() is grpc.StatusCode.OK

    asyncio.run(run())
