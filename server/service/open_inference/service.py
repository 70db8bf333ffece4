"""The service `inference.GRPCInferenceService`, for clients of Triton and KServe."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from seq2seq_serve import __version__
from seq2seq_serve.protos import open_inference_pb2 as pb
from seq2seq_serve.protos.seq2seq_v1_pb2 import Piece
from seq2seq_serve.server.errors import InvalidRequest, Unavailable, UnknownModel
from seq2seq_serve.server.models.repository import Repository, VersionState
from seq2seq_serve.server.models.served import ServedModel, check_right
from seq2seq_serve.server.service.calls import RemoteCall
from seq2seq_serve.server.service.health import Health
from seq2seq_serve.server.service.open_inference.answers import (
    Answer,
    answer_message,
    last_answer,
    piece_answer,
    whole_answer,
)
from seq2seq_serve.server.service.open_inference.models import (
    EXTENSIONS,
    SERVER_NAME,
    config_message,
    metadata_message,
    statistics_message,
)
from seq2seq_serve.server.service.open_inference.requests import Inference, own_fields, read_inference
from seq2seq_serve.server.service.seq2seq.generation import generate, read_decoding
from seq2seq_serve.server.service.status import status_of

_STRICT_ERRORS = "triton_grpc_error"  # metadata with which an error ends the stream with its status
_MAX_OPEN_IN_STREAM = 64  # requests; the next one is read when one of them is answered

_BYTES_PER_TEXT_BYTE = 16  # of a message, which take as long to read as a byte of text

_Made = TypeVar("_Made")


class InferenceService:
    """Without state of its own: a call's state is in its `RemoteCall` and its streams."""

    def __init__(self, repository: Repository, health: Health) -> None:
        self._repository = repository
        self._health = health

    async def ServerLive(self, _message: pb.ServerLiveRequest, _call: RemoteCall) -> pb.ServerLiveResponse:
        """Answers false if the process should be restarted."""
        return pb.ServerLiveResponse(live=self._health.unhealthy() is None)

    async def ServerReady(self, _message: pb.ServerReadyRequest, _call: RemoteCall) -> pb.ServerReadyResponse:
        """Answers whether callers may send requests."""
        return pb.ServerReadyResponse(ready=self._health.unready() is None)

    async def ModelReady(self, message: pb.ModelReadyRequest, call: RemoteCall) -> pb.ModelReadyResponse:
        """Answers whether callers may send requests for a model; an unknown model is not ready.

        An adapter that is not loaded is ready if it can be served with its base.
        """
        try:
            async with call.calls.models.use(call, message.name, message.version, loads=False) as model:
                return pb.ModelReadyResponse(ready=self._health.is_serving(model))
        except (UnknownModel, Unavailable):
            return pb.ModelReadyResponse(ready=False)

    async def ServerMetadata(
        self, _message: pb.ServerMetadataRequest, _call: RemoteCall
    ) -> pb.ServerMetadataResponse:
        """Answers with the server's name, version and extensions."""
        return pb.ServerMetadataResponse(name=SERVER_NAME, version=__version__, extensions=EXTENSIONS)

    async def ModelMetadata(
        self, message: pb.ModelMetadataRequest, call: RemoteCall
    ) -> pb.ModelMetadataResponse:
        """Answers with the tensors of a model."""
        async with call.calls.models.use(call, message.name, message.version, loads=False) as model:
            return metadata_message(model)

    async def ModelConfig(self, message: pb.ModelConfigRequest, call: RemoteCall) -> pb.ModelConfigResponse:
        """Answers with the tensors and limits of a model."""
        async with call.calls.models.use(call, message.name, message.version, loads=False) as model:
            return pb.ModelConfigResponse(config=config_message(model))

    async def ModelStatistics(
        self, message: pb.ModelStatisticsRequest, call: RemoteCall
    ) -> pb.ModelStatisticsResponse:
        """Answers with the statistics of one model, or of all."""
        models = call.calls.models
        if not message.name:  # an adapter's are those of its base
            asked = [model for model in models.seen_by(call.caller) if model.base is None]
        else:
            async with models.use(call, message.name, message.version, loads=False) as model:
                asked = [model]
        stats = [statistics_message(model, models.statistics_of(model)) for model in asked]
        return pb.ModelStatisticsResponse(model_stats=stats)

    async def RepositoryIndex(
        self, message: pb.RepositoryIndexRequest, call: RemoteCall
    ) -> pb.RepositoryIndexResponse:
        """Answers with every version on disk, its state, and why it is not served."""
        _check_repository(message.repository_name)
        index = await self._repository.index()
        return pb.RepositoryIndexResponse(
            models=[
                pb.RepositoryIndexResponse.ModelIndex(
                    name=one.model_name, version=one.version, state=state, reason=reason
                )
                for one, state, reason in index
                if call.caller.may_use(one.model_name) and (state is VersionState.READY or not message.ready)
            ]
        )

    async def RepositoryModelLoad(
        self, message: pb.RepositoryModelLoadRequest, call: RemoteCall
    ) -> pb.RepositoryModelLoadResponse:
        """Serves a model's newest version, or the one that the parameter `version` names."""
        name, parameters = _changed_model(message, ("version",), call)
        version = parameters.get("version", "")
        if not isinstance(version, str):
            raise InvalidRequest("the parameter version must be a string", field="parameters[version]")
        await self._repository.load(name, version)
        return pb.RepositoryModelLoadResponse(model_name=name, is_loaded=True)

    async def RepositoryModelUnload(
        self, message: pb.RepositoryModelUnloadRequest, call: RemoteCall
    ) -> pb.RepositoryModelUnloadResponse:
        """Stops serving a model. Accepted requests are finished."""
        name, _ = _changed_model(message, ("unload_dependents",), call)
        await self._repository.unload(name)
        return pb.RepositoryModelUnloadResponse(model_name=name, is_unloaded=True)

    async def ModelInfer(self, message: pb.ModelInferRequest, call: RemoteCall) -> pb.ModelInferResponse:
        """Answers once, with the targets of all rows."""
        answering = self.infer(message, call, answer_message)
        del message
        return await answering

    async def ModelStreamInfer(self, messages: AsyncIterator[pb.ModelInferRequest], call: RemoteCall) -> None:
        """Answers each request with one response per piece; requests are decoded side by side."""
        is_strict = (_STRICT_ERRORS, "true") in call.metadata
        following = partial(call.calls.next_message, aiter(messages))

        async def answer_whole(message: pb.ModelInferRequest, its: RemoteCall) -> None:
            with its.holding(message.ByteSize()):
                answering = self.infer_in_stream(message, its, _event, its.send)
                del message
                await answering

        async def answer(message: pb.ModelInferRequest, its: RemoteCall) -> None:
            failed = pb.ModelInferResponse(model_name=message.model_name, id=message.id)
            answering = answer_whole(message, its)
            del message
            error = await call.calls.run(its, answering, lambda _: is_strict)
            if error is not None:
                text = status_of(error).text
                await its.send(pb.ModelStreamInferResponse(error_message=text, infer_response=failed))

        await call.calls.answer_items(call, following, _MAX_OPEN_IN_STREAM, answer, first_number=1)

    async def infer(
        self, message: pb.ModelInferRequest, call: RemoteCall, make: Callable[[Answer], _Made]
    ) -> _Made:
        """Returns what `make` makes of the answer to all rows of a request.

        Raises:
            ServerError: The request is refused or fails.
        """
        async with call.calls.models.use(call, message.model_name, message.model_version) as model:
            with own_fields(model):
                inference = await _read(message, model, call)
                del message  # its inputs would take memory while the requests wait
                limited = _limited(call, inference)
                decoding = await read_decoding(inference.options, model, limited)
                answers = await generate(inference.rows, decoding, limited)
                num_bytes = sum(answer.ByteSize() for answer in answers)
                return await call.build(num_bytes, lambda _: make(whole_answer(inference, answers, model)))

    async def infer_in_stream(
        self,
        message: pb.ModelInferRequest,
        call: RemoteCall,
        make: Callable[[Answer], _Made],
        write: Callable[[_Made], Awaitable[None]],
    ) -> None:
        """Writes what `make` makes of each piece of an answer, and of its end; raises as `infer`."""
        async with call.calls.models.use(call, message.model_name, message.model_version) as model:
            with own_fields(model):
                inference = await _read(message, model, call)
                del message  # its inputs would take memory while the request waits
                if len(inference.rows) != 1 or inference.options.num_hypotheses > 1:
                    raise InvalidRequest(
                        "a request in a stream may have one row and one hypothesis: send a request for each "
                        "row, or call ModelInfer",
                        field="inputs",
                    )

                async def write_piece(piece: Piece) -> None:
                    made = await call.build(
                        piece.ByteSize(), lambda _: make(piece_answer(inference, piece, model))
                    )
                    await write(made)

                limited = _limited(call, inference)
                decoding = await read_decoding(inference.options, model, limited, stream=True)
                (answer,) = await generate(inference.rows, decoding, limited, write_piece)
                last = await call.build(
                    answer.ByteSize(), lambda _: make(last_answer(inference, answer, model))
                )
                await write(last)
                if inference.has_empty_final:
                    await write(make(Answer(model, inference, is_final=True)))


async def _read(message: pb.ModelInferRequest, model: ServedModel, call: RemoteCall) -> Inference:
    """Returns the contents of a request; a large one is read on a thread, as each number is an object."""
    return await call.read(
        lambda _: read_inference(message, model), message.ByteSize() // _BYTES_PER_TEXT_BYTE
    )


def _event(answer: Answer) -> pb.ModelStreamInferResponse:
    return pb.ModelStreamInferResponse(infer_response=answer_message(answer))


def _changed_model(
    message: pb.RepositoryModelLoadRequest | pb.RepositoryModelUnloadRequest,
    known: tuple[str, ...],
    call: RemoteCall,
) -> tuple[str, dict[str, Any]]:
    """Returns the name of the model to load or unload, and the parameters."""
    name = message.model_name
    if name:
        _check_repository(message.repository_name)
    else:
        name = message.repository_name  # KServe's own protocol has the model's name there
    if not name:
        raise InvalidRequest("the model's name is missing", field="model_name")
    check_right(call.caller, name)
    parameters = {}
    for key, parameter in message.parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if key not in known or kind is None:
            raise InvalidRequest(
                f"the parameter {key[:100]!r} is unknown or has no value: send {', '.join(known)}, or none",
                field=f"parameters[{key[:100]}]",
            )
        parameters[key] = getattr(parameter, kind)
    return name, parameters


def _check_repository(name: str) -> None:
    if name:
        raise InvalidRequest(
            "this server has one repository, without a name: leave it out", field="repository_name"
        )


def _limited(call: RemoteCall, inference: Inference) -> RemoteCall:
    """Returns the call with the timeout of the request as its deadline, if that comes first."""
    if inference.timeout_seconds is None:
        return call
    deadline = call.arrival + inference.timeout_seconds
    return dataclasses.replace(call, deadline=min(deadline, call.deadline or deadline))
