"""Serves bundles on a Ray cluster: an application of Ray Serve with the service `seq2seq.v1.Seq2Seq`.

A replica is the server without its port: Ray's ports receive the calls, and HAProxy balances them.
README.md says what that costs, and `serve run serve.yaml` starts it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

# ONNX Runtime and the tokenizers read these when they are imported; `server.__main__` has the reasons.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import ray
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message
from ray import serve
from ray.serve.config import AutoscalingContext
from ray.serve.grpc_util import RayServegRPCContext

from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.config import RunnerConfig, ServerConfig
from seq2seq_serve.server.deliveries import Deliveries
from seq2seq_serve.server.metrics import Metrics
from seq2seq_serve.server.models.loading import load_model
from seq2seq_serve.server.models.served import Models
from seq2seq_serve.server.service.access import Access
from seq2seq_serve.server.service.calls import Calls
from seq2seq_serve.server.service.health import Health
from seq2seq_serve.server.service.journal import Journal
from seq2seq_serve.server.service.seq2seq.service import Seq2SeqService
from seq2seq_serve.server.service.status import status_of, trailers_of

_SERVICE = pb.DESCRIPTOR.services_by_name["Seq2Seq"].full_name
_HA_PROXY = "RAY_SERVE_ENABLE_HA_PROXY"
_LOAD = "load"  # 1 is full; above it, requests wait
_TARGET_LOAD = 0.3  # for 32 slots a core: docs/kubernetes.md, "Autoscaling"

Write = Callable[[Message], Awaitable[None]]


class Seq2Seq:
    """One replica. Ray Serve calls the method that has the name of the RPC, on the loop of the constructor.

    Args:
        bundles: Folders that every node has at this path; a model has the name of its folder.
        max_slots: The largest number of sequences of a model that are decoded at once.

    Raises:
        ValueError: A bundle cannot be used, or Ray Serve is not in HAProxy mode.
    """

    async def __init__(self, bundles: list[str], max_slots: int) -> None:
        if os.environ.get(_HA_PROXY) != "1":  # Ray's other proxy ends a refused stream with the status OK
            raise ValueError(f"{_HA_PROXY} is not 1: set it where `ray start` runs, on every node")
        num_cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 1)
        runner = RunnerConfig(shares_threads=True, num_threads=max(1, int(num_cpus)), max_slots=max_slots)
        config, metrics = ServerConfig(runner=runner), Metrics()
        models = Models(metrics)
        self._calls = Calls(models, Journal(metrics), Access(None))
        self._health = Health(models)
        self._service = Seq2SeqService(models, self._calls)
        loop = asyncio.get_running_loop()
        for path in map(Path, bundles):
            num_used_bytes = sum(model.num_bytes for model in models)
            deliveries = Deliveries(path.name, loop, metrics)
            models.put(await asyncio.to_thread(load_model, path, config, deliveries, num_used_bytes))

    async def Generate(self, message: pb.GenerateRequest, grpc_context: RayServegRPCContext) -> Message:
        return await self._answer("Generate", message, grpc_context)

    async def Score(self, message: pb.ScoreRequest, grpc_context: RayServegRPCContext) -> Message:
        return await self._answer("Score", message, grpc_context)

    async def ListModels(self, message: pb.ListModelsRequest, grpc_context: RayServegRPCContext) -> Message:
        return await self._answer("ListModels", message, grpc_context)

    async def GetModel(self, message: pb.GetModelRequest, grpc_context: RayServegRPCContext) -> Message:
        return await self._answer("GetModel", message, grpc_context)

    async def GenerateStream(
        self, message: pb.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncIterator[Message]:
        async for piece in self._stream("GenerateStream", message, grpc_context):
            yield piece

    async def GenerateBatch(
        self, message: pb.GenerateBatchRequest, grpc_context: RayServegRPCContext
    ) -> AsyncIterator[Message]:
        async for answer in self._stream("GenerateBatch", message, grpc_context):
            yield answer

    def check_health(self) -> None:
        """Ray asks every few seconds, and replaces a replica that raises."""
        problem = self._health.unhealthy()
        if problem is not None:
            raise RuntimeError(problem)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns, for `num_replicas`, the share of the busiest model's slots that requests have or wait for.

        A call counts as one slot of all models at least, also while its answer waits for the processor.
        """
        models = list(self._calls.models)
        open_share = self._calls.num_open / sum(model.num_slots for model in models)
        return {_LOAD: max(open_share, *(model.num_slots_wanted() / model.num_slots for model in models))}

    async def _answer(
        self, method: str, message: Message, context: RayServegRPCContext, write: Write | None = None
    ) -> Message:
        """Returns the answer of a call. A refusal is an empty message, and a status in the context.

        Ray would send the code and the text of an error that is raised, but not its trailers.
        """
        call = self._calls.open(
            _SERVICE,
            method,
            metadata=context.invocation_metadata(),
            peer=context.peer(),
            remaining_seconds=None,  # Ray does not know it, but cancels the call at the deadline
            write=write or _write_nothing,
        )

        async def answer() -> Message | None:
            call.check_id()
            answered: Message | None = await getattr(self._service, method)(message, call)
            return answered

        try:
            outcome = await self._calls.settle(call, answer())
        finally:
            self._calls.close_call(call)
        if isinstance(outcome, Exception):
            code, text = status_of(outcome)
            context.set_code(code)
            context.set_details(text)
            context.set_trailing_metadata(list(trailers_of(outcome, call.request_id)))
        # Ray sends a message at the end of a stream, too. Every class makes no bytes of an empty message.
        return outcome if isinstance(outcome, Message) else Empty()

    async def _stream(
        self, method: str, message: Message, context: RayServegRPCContext
    ) -> AsyncIterator[Message]:
        """Yields the messages of a stream; a reader who leaves cancels the call, which frees its slots."""
        written = asyncio.Queue[Message | None]()

        async def write(piece: Message) -> None:
            written.put_nowait(piece)
            await written.join()  # a slow reader gets fewer and larger pieces

        answering = asyncio.create_task(self._answer(method, message, context, write))
        answering.add_done_callback(lambda _: written.put_nowait(None))
        try:
            while (piece := await written.get()) is not None:
                yield piece
                written.task_done()
            await answering
        finally:
            answering.cancel()


async def _write_nothing(_message: Message) -> None:
    raise AssertionError("the RPC has one answer")


def num_replicas(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Returns how many replicas the load needs, for Ray's autoscaler, which keeps its limits and delays."""
    loads = (context.aggregated_metrics or {}).get(_LOAD, {})
    if len(loads) < len(context.running_replicas):  # not all have reported yet
        return context.target_num_replicas, {}
    return sum(loads.values()) / _TARGET_LOAD, {}


def app(arguments: dict[str, object]) -> serve.Application:
    """Returns the application of a Serve config file, whose `args` are those of `Seq2Seq`."""
    return serve.deployment(Seq2Seq).bind(**arguments)
