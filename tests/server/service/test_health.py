import asyncio
import math

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from seq2seq_serve.client import AsyncClient, ClientError
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from tests.server.service.harness import EchoRunner, serving

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


async def check(stub, service=""):
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_server_service_and_every_model_are_serving():
    async with serving(names=("first", "second")) as served:
        stub = health_pb2_grpc.HealthStub(served.channel)
        for name in ("", "seq2seq.v1.Seq2Seq", "inference.GRPCInferenceService", "first", "second"):
            assert await check(stub, name) == SERVING
        assert await served.http("/readyz") == (200, "ok\n")
        assert await served.http("/healthz") == (200, "ok\n")
        with pytest.raises(aio.AioRpcError) as caught:
            await check(stub, "third")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_watcher_hears_every_change_also_after_another_watcher_left():
    async with serving() as served:
        stub = health_pb2_grpc.HealthStub(served.channel)
        calls = [stub.Watch(health_pb2.HealthCheckRequest(service="echo")) for _ in range(2)]
        watchers = [aiter(call) for call in calls]
        for watcher in watchers:
            assert (await anext(watcher)).status == SERVING
        calls[0].cancel()
        served.model.engine.cores[0].failing_since = math.inf
        served.app.health.refresh()
        assert (await anext(watchers[1])).status == NOT_SERVING
        served.model.engine.cores[0].failing_since = None
        served.app.health.refresh()
        assert (await anext(watchers[1])).status == SERVING
        calls[1].cancel()


async def test_an_engine_whose_thread_ends_is_started_again_and_its_callers_are_answered():
    runner = EchoRunner(error=SystemExit())  # type: ignore[arg-type]
    async with serving(runner) as served:
        call = served.stub.Generate(pb.GenerateRequest(sources=[pb.Source(text="abc")]))
        with pytest.raises(grpc.RpcError) as caught:
            await call
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        runner.error = None
        # The client retries that, also of what comes before the core is started again.
        async with AsyncClient(served.address) as client:
            answer = await client.generate("abc")
        assert answer.hypotheses[0].text == "abc"
        assert await served.http("/readyz") == (200, "ok\n")


async def test_watchers_are_woken_by_changes_only():
    """Every second all were: some thousand of them, which need no token, would hold up the event loop."""
    async with serving() as served:
        health = served.app.health
        waiting = asyncio.ensure_future(health.wait_for_refresh())
        await asyncio.sleep(0)
        health.refresh()
        served.model.engine.cores[0].failing_since = math.inf
        await asyncio.sleep(0)
        assert not waiting.done()
        assert health.shown_status("echo") == SERVING
        health.refresh()
        await waiting
        assert health.shown_status("echo") == NOT_SERVING


async def test_watchers_are_let_go_when_the_server_ends():
    async with serving() as served:
        call = health_pb2_grpc.HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await anext(aiter(call))).status == SERVING
        served.app.health.close()
        assert await call.code() is grpc.StatusCode.OK


async def test_watching_an_unknown_name_stays_open():
    async with serving() as served:
        stub = health_pb2_grpc.HealthStub(served.channel)
        call = stub.Watch(health_pb2.HealthCheckRequest(service="third"))
        assert (await anext(aiter(call))).status == SERVICE_UNKNOWN
        assert not call.done()
        call.cancel()


async def test_a_model_whose_steps_keep_failing_is_not_serving_and_the_others_are():
    async with serving(names=("first", "second")) as served, AsyncClient(served.address) as client:
        served.runner.error = RuntimeError("broken")
        for _ in range(10):
            with pytest.raises(ClientError, match="INTERNAL"):
                await client.generate("abc")
        assert await client.health() == "SERVING"
        assert await client.health("first") == "NOT_SERVING"
        assert await client.health("second") == "SERVING"
        assert await served.http("/readyz") == await served.http("/healthz") == (200, "ok\n")


async def test_an_engine_without_a_sign_of_life_is_neither_ready_nor_healthy():
    async with serving() as served:
        served.model.engine.cores[0].is_hung = lambda: True
        served.model.engine.cores[0].silent_seconds = lambda: 65.0
        problem = "echo: no sign of life from the engine for 65 seconds\n"
        assert await served.http("/readyz") == await served.http("/healthz") == (503, problem)


async def test_list_has_every_name_with_its_status():
    async with serving(names=("first", "second")) as served:
        health = served.app.health
        services = {"seq2seq.v1.Seq2Seq", "seq2seq.v1.Repository", "inference.GRPCInferenceService"}
        assert set(health.names()) == {"", *services, "first", "second"}
        if hasattr(health_pb2, "HealthListRequest"):  # grpcio-health-checking from 1.85 on
            stub = health_pb2_grpc.HealthStub(served.channel)
            answer = await stub.List(health_pb2.HealthListRequest())
            assert {name: status.status for name, status in answer.statuses.items()} == dict.fromkeys(
                health.names(), SERVING
            )
