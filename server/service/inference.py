"""The service `inference.GRPCInferenceService`: what clients of Triton and KServe speak."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import grpc

from protos import open_inference_pb2 as pb
from protos import open_inference_pb2_grpc as pb_grpc
from protos.seq2seq_v1_pb2 import Piece
from server import VERSION
from server.errors import InvalidRequest, ServerError, Unavailable, UnknownModel
from server.models import Models, ServedModel
from server.repository import Repository, State
from server.service.calls import Call, Calls, Context, send, sized
from server.service.generation import generate, generate_pieces
from server.service.health import Health
from server.service.inference_answers import (
    empty_response,
    inference_response,
    last_response,
    piece_response,
)
from server.service.inference_models import (
    EXTENSIONS,
    SERVER_NAME,
    config_message,
    metadata_message,
    statistics_message,
)
from server.service.inference_requests import Inference, read_inference
from server.service.status import status_of

_STRICT_ERRORS = "triton_grpc_error"  # metadata: an error ends the stream with its status
_MAX_OPEN_IN_STREAM = 64  # requests; who sends more is read when one has its answer

_log = logging.getLogger(__name__)

_Write = Callable[[pb.ModelStreamInferResponse], Awaitable[None]]


class InferenceService(pb_grpc.GRPCInferenceServiceServicer):
    """Holds nothing of its own: a call's state is in its `Call` and its mailboxes."""

    def __init__(self, models: Models, repository: Repository, calls: Calls, health: Health) -> None:
        self._models = models
        self._repository = repository
        self._calls = calls
        self._health = health

    async def ServerLive(  # noqa: N802 (the names are the protocol's)
        self, _message: pb.ServerLiveRequest, context: Context
    ) -> pb.ServerLiveResponse:
        """Answer with whether the process need not be restarted."""
        async with self._calls.open("ServerLive", context):
            return pb.ServerLiveResponse(live=self._health.unhealthy() is None)

    async def ServerReady(  # noqa: N802
        self, _message: pb.ServerReadyRequest, context: Context
    ) -> pb.ServerReadyResponse:
        """Answer with whether requests may come."""
        async with self._calls.open("ServerReady", context):
            return pb.ServerReadyResponse(ready=self._health.unready() is None)

    async def ModelReady(  # noqa: N802
        self, message: pb.ModelReadyRequest, context: Context
    ) -> pb.ModelReadyResponse:
        """Answer with whether requests for a model may come; an unknown one is not ready."""
        async with self._calls.open("ModelReady", context) as call:
            try:
                with call.using(message.name, message.version) as model:
                    return pb.ModelReadyResponse(ready=self._health.is_serving(model))
            except (UnknownModel, Unavailable):
                return pb.ModelReadyResponse(ready=False)

    async def ServerMetadata(  # noqa: N802
        self, _message: pb.ServerMetadataRequest, context: Context
    ) -> pb.ServerMetadataResponse:
        """Answer with the server's name and version, and the extensions that it has."""
        async with self._calls.open("ServerMetadata", context):
            return pb.ServerMetadataResponse(name=SERVER_NAME, version=VERSION, extensions=EXTENSIONS)

    async def ModelMetadata(  # noqa: N802
        self, message: pb.ModelMetadataRequest, context: Context
    ) -> pb.ModelMetadataResponse:
        """Answer with the tensors of a model."""
        async with self._calls.open("ModelMetadata", context) as call:
            with call.using(message.name, message.version) as model:
                return metadata_message(model)

    async def ModelConfig(  # noqa: N802
        self, message: pb.ModelConfigRequest, context: Context
    ) -> pb.ModelConfigResponse:
        """Answer with the tensors and limits of a model."""
        async with self._calls.open("ModelConfig", context) as call:
            with call.using(message.name, message.version) as model:
                return pb.ModelConfigResponse(config=config_message(model))

    async def ModelStatistics(  # noqa: N802
        self, message: pb.ModelStatisticsRequest, context: Context
    ) -> pb.ModelStatisticsResponse:
        """Answer with what one model or all have done."""
        async with self._calls.open("ModelStatistics", context) as call:
            if not message.name:
                return pb.ModelStatisticsResponse(model_stats=map(statistics_message, self._models))
            with call.using(message.name, message.version) as model:
                return pb.ModelStatisticsResponse(model_stats=[statistics_message(model)])

    async def RepositoryIndex(  # noqa: N802
        self, message: pb.RepositoryIndexRequest, context: Context
    ) -> pb.RepositoryIndexResponse:
        """Answer with every version that there is, and whether it is served."""
        async with self._calls.open("RepositoryIndex", context):
            _check_repository(message.repository_name)
            index = await self._repository.index()
            return pb.RepositoryIndexResponse(
                models=[
                    pb.RepositoryIndexResponse.ModelIndex(
                        name=one.model_name,
                        version=one.version,
                        state=state,
                        reason=reason,
                    )
                    for one, state, reason in index
                    if state is State.READY or not message.ready
                ]
            )

    async def RepositoryModelLoad(  # noqa: N802
        self, message: pb.RepositoryModelLoadRequest, context: Context
    ) -> pb.RepositoryModelLoadResponse:
        """Serve a model's newest version, or the one that the parameter `version` names."""
        async with self._calls.open("RepositoryModelLoad", context):
            name, parameters = _changed_model(message, ("version",))
            version = parameters.get("version", "")
            if not isinstance(version, str):
                raise InvalidRequest("the parameter version must be a string", field="parameters[version]")
            await self._repository.load(name, version)
            return pb.RepositoryModelLoadResponse(model_name=name, is_loaded=True)

    async def RepositoryModelUnload(  # noqa: N802
        self, message: pb.RepositoryModelUnloadRequest, context: Context
    ) -> pb.RepositoryModelUnloadResponse:
        """Serve a model no more. Who has been accepted gets an answer."""
        async with self._calls.open("RepositoryModelUnload", context):
            name, _ = _changed_model(message, ("unload_dependents",))
            await self._repository.unload(name)
            return pb.RepositoryModelUnloadResponse(model_name=name, is_unloaded=True)

    async def ModelInfer(  # noqa: N802
        self, message: pb.ModelInferRequest, context: Context
    ) -> pb.ModelInferResponse:
        """Answer once, with the targets of all rows."""
        async with self._calls.open("ModelInfer", context) as call:
            with call.using(message.model_name, message.model_version) as model:
                inference = read_inference(message)
                answers = await generate(inference.rows, model, _limited(call, inference))
                num_bytes = sum(answer.ByteSize() for answer in answers)
                build = partial(inference_response, message, inference, answers, model)
                return sized(await call.built(num_bytes, build))

    async def ModelStreamInfer(  # noqa: N802
        self, messages: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> None:
        """Answer each request with a response a piece; several requests are answered side by side."""
        is_strict = (_STRICT_ERRORS, "true") in (context.invocation_metadata() or ())
        writing, room = asyncio.Lock(), asyncio.Semaphore(_MAX_OPEN_IN_STREAM)

        async def write(response: pb.ModelStreamInferResponse) -> None:
            async with writing:
                await send(context, response)

        async def answer(message: pb.ModelInferRequest, call: Call) -> None:
            code = grpc.StatusCode.OK
            try:
                with call.using(message.model_name, message.model_version) as model:
                    await self._answer_in_stream(message, model, call, write)
            except asyncio.CancelledError:
                code = grpc.StatusCode.CANCELLED
                raise
            except Exception as error:
                code, text = status_of(error)
                if is_strict:
                    raise
                if not isinstance(error, ServerError):
                    _log.exception("%s ModelStreamInfer: a bug", call.request_id)
                failed = pb.ModelInferResponse(model_name=message.model_name, id=message.id)
                await write(pb.ModelStreamInferResponse(error_message=text, infer_response=failed))
            finally:
                self._calls.count(call, code)
                room.release()

        async with self._calls.open("ModelStreamInfer", context) as call:
            call.is_counted_by_request = True
            refusal: Exception | None = None
            try:
                try:
                    async with asyncio.TaskGroup() as tasks:
                        incoming = aiter(messages)
                        for number in itertools.count(1):
                            try:
                                message = await self._calls.next_message(incoming)
                            except Unavailable as error:
                                refusal = error
                                break
                            if message is None:
                                break
                            await room.acquire()
                            request_id = f"{call.request_id}-{number}"
                            its = dataclasses.replace(call, request_id=request_id, arrival=time.monotonic())
                            tasks.create_task(answer(message, its))
                except ExceptionGroup as group:
                    refusal = group.with_traceback(None).exceptions[0]
                if refusal is not None:
                    raise refusal
            finally:
                del refusal  # whose frames refer to it, and to messages

    async def _answer_in_stream(
        self, message: pb.ModelInferRequest, model: ServedModel, call: Call, write: _Write
    ) -> None:
        inference = read_inference(message)
        if len(inference.rows) != 1 or inference.rows[0].options.num_hypotheses > 1:
            raise InvalidRequest(
                "a request of a stream has one row and one hypothesis: send a request for each",
                field="inputs",
            )

        async def write_piece(piece: Piece) -> None:
            response = piece_response(message, inference, piece, model)
            await write(pb.ModelStreamInferResponse(infer_response=response))

        answer = await generate_pieces(inference.rows[0], model, _limited(call, inference), write_piece)
        last = last_response(message, inference, answer, model)
        await write(pb.ModelStreamInferResponse(infer_response=last))
        if inference.has_empty_final:
            empty = empty_response(message, model, is_final=True)
            await write(pb.ModelStreamInferResponse(infer_response=empty))


def _changed_model(
    message: pb.RepositoryModelLoadRequest | pb.RepositoryModelUnloadRequest, known: tuple[str, ...]
) -> tuple[str, dict[str, Any]]:
    """The name of the model that shall be loaded or unloaded, and the parameters."""
    name = message.model_name
    if name:
        _check_repository(message.repository_name)
    else:
        name = message.repository_name  # where KServe's own protocol has the model's name
    if not name:
        raise InvalidRequest("the model's name is missing", field="model_name")
    parameters = {}
    for key, parameter in message.parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if key not in known or kind is None:
            raise InvalidRequest(
                f"no parameter is named {key[:100]!r}, or it has no value: there is {', '.join(known)}",
                field=f"parameters[{key[:100]}]",
            )
        parameters[key] = getattr(parameter, kind)
    return name, parameters


def _check_repository(name: str) -> None:
    if name:
        raise InvalidRequest("this server has one repository, without a name", field="repository_name")


def _limited(call: Call, inference: Inference) -> Call:
    """The call with the request's own timeout, where that ends before."""
    if inference.timeout_seconds is None:
        return call
    deadline = call.arrival + inference.timeout_seconds
    return dataclasses.replace(call, deadline=min(deadline, call.deadline or deadline))
