"""The service `seq2seq.v1.Seq2Seq`: from a message to the engine and back."""

from __future__ import annotations

from functools import partial

from protos import seq2seq_v1_pb2 as pb
from protos import seq2seq_v1_pb2_grpc as pb_grpc
from server.models import Models
from server.service.answers import model_message, score_response
from server.service.calls import Calls, Context, send, sized
from server.service.generation import generate, generate_pieces, succeeded
from server.service.requests import score_request


class Seq2SeqService(pb_grpc.Seq2SeqServicer):
    """Holds nothing of its own: a call's state is in its `Call` and its mailbox."""

    def __init__(self, models: Models, calls: Calls) -> None:
        self._models = models
        self._calls = calls

    async def Generate(  # noqa: N802 (the name is the contract's)
        self, message: pb.GenerateRequest, context: Context
    ) -> pb.GenerateResponse:
        """Answer once, with the whole target."""
        async with self._calls.open("Generate", context) as call:
            with call.using(message.model) as model:
                (answer,) = await generate([message], model, call)
                return sized(answer)

    async def GenerateStream(  # noqa: N802
        self, message: pb.GenerateRequest, context: Context
    ) -> None:
        """Answer with pieces of whole characters, then with the whole."""

        # The first write sends the initial metadata, and with it commits the call: until a request has its
        # first token, a client may retry it elsewhere (gRFC A6).
        async def write(piece: pb.Piece) -> None:
            await send(context, pb.GenerateStreamResponse(piece=piece))

        async with self._calls.open("GenerateStream", context) as call:
            with call.using(message.model) as model:
                answer = await generate_pieces(message, model, call, write)
                await send(context, pb.GenerateStreamResponse(result=answer))

    async def Score(  # noqa: N802
        self, message: pb.ScoreRequest, context: Context
    ) -> pb.ScoreResponse:
        """Answer with the log-probabilities of a given target."""
        async with self._calls.open("Score", context) as call:
            with call.using(message.model) as model:
                request = await call.texts.run(
                    partial(score_request, message, model, call),
                    message.ByteSize(),
                    call.caller.name,
                    call.deadline,
                )
                with model.submitted([request], call.is_expired) as (mailbox,):
                    result = await succeeded(mailbox)
                return score_response(request, result, model)

    async def ListModels(  # noqa: N802
        self, _message: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        """Answer with every served model."""
        async with self._calls.open("ListModels", context):
            return pb.ListModelsResponse(models=[model_message(model) for model in self._models])

    async def GetModel(  # noqa: N802
        self, message: pb.GetModelRequest, context: Context
    ) -> pb.GetModelResponse:
        """Answer with one model."""
        async with self._calls.open("GetModel", context) as call:
            with call.using(message.model) as model:
                return pb.GetModelResponse(model=model_message(model))
