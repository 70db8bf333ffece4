import asyncio

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.config import QueueLimits
from seq2seq_serve.server.service import endpoint
from seq2seq_serve.server.service.endpoint import MAX_REQUEST_BYTES
from tests.server.service.harness import serving


async def test_reflection_lists_every_service():
    async with serving() as served:
        stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer = await anext(aiter(call))
        names = {service.name for service in answer.list_services_response.service}
        assert names == {
            "seq2seq.v1.Seq2Seq",
            "seq2seq.v1.Repository",
            "inference.GRPCInferenceService",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        call.cancel()


async def test_a_message_over_the_limit_is_refused_before_it_is_read():
    async with serving() as served:
        request = pb.GenerateRequest(sources=[pb.Source(text="x" * MAX_REQUEST_BYTES)])
        with pytest.raises(aio.AioRpcError, match="larger than max") as caught:
            await served.stub.Generate(request)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert served.turns.num_submitted == 0


async def test_a_connection_has_a_bounded_number_of_open_calls_and_the_next_ones_wait(monkeypatch):
    """One connection could open any number of calls."""
    assert dict(endpoint._OPTIONS)["grpc.max_concurrent_streams"] >= 2 * QueueLimits().max_waiting_requests
    options = [
        (name, 2 if name.endswith("concurrent_streams") else value) for name, value in endpoint._OPTIONS
    ]
    monkeypatch.setattr(endpoint, "_OPTIONS", options)
    async with serving() as served:
        stub = health_pb2_grpc.HealthStub(served.channel)
        request = health_pb2.HealthCheckRequest()
        watches = [stub.Watch(request) for _ in range(2)]
        for watch in watches:
            await watch.read()
        with pytest.raises(aio.AioRpcError) as caught:
            await stub.Check(request, timeout=0.2)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        waiting = asyncio.ensure_future(stub.Check(request))
        watches[0].cancel()
        assert (await waiting).status == health_pb2.HealthCheckResponse.SERVING
        watches[1].cancel()


async def test_a_connection_is_renewed_at_its_age():
    async with serving(max_connection_age_seconds=1.0) as served:
        await served.stub.ListModels(pb.ListModelsRequest())
        state = served.channel.get_state()
        async with asyncio.timeout(20):
            while state is not grpc.ChannelConnectivity.IDLE:
                await served.channel.wait_for_state_change(state)
                state = served.channel.get_state()
        await served.stub.ListModels(pb.ListModelsRequest())


async def test_an_answer_that_comes_too_late_leaves_no_traceback_and_any_other_error_does(caplog):
    async with serving():
        loop = asyncio.get_running_loop()
        for error in (aio.InternalError("too late"), RuntimeError("a bug")):
            loop.call_exception_handler({"message": "Task exception was never retrieved", "exception": error})
    assert [str(record.exc_info[1]) for record in caplog.records] == ["a bug"]
