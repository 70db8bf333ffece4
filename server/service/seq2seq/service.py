"""The service `seq2seq.v1.Seq2Seq`: from a message to the engine and back."""

from __future__ import annotations

from collections.abc import Sequence

from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.service.calls import RemoteCall
from seq2seq_serve.server.service.seq2seq.batch import generate_batch
from seq2seq_serve.server.service.seq2seq.generation import (
    generate,
    read,
    read_decoding,
    read_scoring,
    score,
)
from seq2seq_serve.server.service.write.responses import model_message


class Seq2SeqService:
    """Without state of its own: a call's state is in its `RemoteCall` and its streams."""

    async def Generate(self, message: pb.GenerateRequest, call: RemoteCall) -> pb.GenerateResponse:
        """Answers once, with the whole target."""
        with call.use_model(message.model) as model:
            decoding = await read_decoding(message.options, model, call)
            rows: list[Sequence[pb.Source]] = [message.sources]
            del message  # `generate` keeps only what it needs of it
            (answer,) = await generate(rows, decoding, call)
            return call.sized(answer)

    async def GenerateStream(self, message: pb.GenerateRequest, call: RemoteCall) -> None:
        """Answers with pieces of whole characters, then with the whole target."""

        # The first write sends the initial metadata, which commits the call: before the first piece, a client
        # may retry the call on another server (gRFC A6).
        async def write(piece: pb.Piece) -> None:
            await call.send(pb.GenerateStreamResponse(piece=piece))

        with call.use_model(message.model) as model:
            decoding = await read_decoding(message.options, model, call, stream=True)
            rows: list[Sequence[pb.Source]] = [message.sources]
            del message
            (answer,) = await generate(rows, decoding, call, write)
            await call.send(pb.GenerateStreamResponse(result=answer))

    async def GenerateBatch(self, message: pb.GenerateBatchRequest, call: RemoteCall) -> None:
        """Answers for each of many sources when its target is complete."""
        with call.use_model(message.model) as model:
            await generate_batch(message, model, call)

    async def Score(self, message: pb.ScoreRequest, call: RemoteCall) -> pb.ScoreResponse:
        """Answers with the log-probabilities of a given target."""
        with call.use_model(message.model) as model:
            decoding = await read_scoring(message, model, call)
            (reading,) = await read(message.sources, decoding, call)
            del message  # its sources would take memory while the request waits
            return await score(reading, decoding, call)

    async def ListModels(self, _message: pb.ListModelsRequest, call: RemoteCall) -> pb.ListModelsResponse:
        """Answers with every served model."""
        return pb.ListModelsResponse(models=[model_message(model) for model in call.calls.models])

    async def GetModel(self, message: pb.GetModelRequest, call: RemoteCall) -> pb.GetModelResponse:
        """Answers with the named model, or the first one."""
        with call.use_model(message.model) as model:
            return pb.GetModelResponse(model=model_message(model))
