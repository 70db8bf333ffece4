"""The service `seq2seq.v1.Seq2Seq`: from a message to the engine and back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Unavailable,
    is_about_all,
)
from seq2seq_serve.server.service.calls import RemoteCall
from seq2seq_serve.server.service.live.stream import Command, LiveStream
from seq2seq_serve.server.service.seq2seq.generation import (
    generate,
    read_decoding,
    read_scoring,
    score,
    with_patience,
)
from seq2seq_serve.server.service.status import status_of
from seq2seq_serve.server.service.write.responses import model_message

_LEAST_OPEN = 64  # items of a batch that are decoded or wait at once; twice the slots if those are more


class Seq2SeqService:
    """Without state of its own: a call's state is in its `RemoteCall` and its streams."""

    async def Generate(self, message: pb.GenerateRequest, call: RemoteCall) -> pb.GenerateResponse:
        """Answers once, with the whole target."""
        async with call.calls.models.use(call, message.model) as model:
            decoding = await read_decoding(message.options, model, call)
            rows: list[Sequence[pb.Source]] = [message.sources]
            del message  # `generate` keeps only what it needs of it
            (answer,) = await generate(rows, decoding, call)
            return answer

    async def GenerateStream(self, message: pb.GenerateRequest, call: RemoteCall) -> None:
        """Answers with pieces of whole characters, then with the whole target."""

        # The first write sends the initial metadata, which commits the call: before the first piece, a client
        # may retry the call on another server (gRFC A6).
        async def write(piece: pb.Piece) -> None:
            await call.send(pb.GenerateStreamResponse(piece=piece))

        async with call.calls.models.use(call, message.model) as model:
            decoding = await read_decoding(message.options, model, call, stream=True)
            rows: list[Sequence[pb.Source]] = [message.sources]
            del message
            answers = await generate(rows, decoding, call, write)
            await call.send(pb.GenerateStreamResponse(result=answers.pop()))

    async def GenerateBatch(self, message: pb.GenerateBatchRequest, call: RemoteCall) -> None:
        """Answers for each of many sources when its target is complete; each is recorded as a call.

        An error that every item would have, for example of the options, refuses the whole batch.
        """
        async with call.calls.models.use(call, message.model) as model:
            decoding = await read_decoding(message.options, model, call)
            if call.calls.is_draining:
                raise Unavailable("the server is shutting down")
            call.is_accepted = not message.refuses_items
            items = enumerate(message.items)
            join = _joined if message.joins_answers else None

            async def following() -> tuple[int, pb.BatchItem] | None:
                return next(items, None)

            async def generate_and_send(
                item: pb.BatchItem, response: pb.GenerateBatchResponse, its: RemoteCall
            ) -> None:
                (answer,) = await with_patience(its, lambda: generate([item.sources], decoding, its))
                response.response.CopyFrom(answer)
                await its.send(response)

            async def answer(numbered: tuple[int, pb.BatchItem], its: RemoteCall) -> None:
                index, item = numbered
                response = pb.GenerateBatchResponse(index=index, tag=item.tag)
                error = await call.calls.run(its, generate_and_send(item, response, its), _ends_the_batch)
                if error is not None:
                    response.error.CopyFrom(_batch_error(error, its.request_id))
                    await its.send(response)

            most_open = max(_LEAST_OPEN, 2 * model.engine.num_slots)
            await call.calls.answer_items(call, following, most_open, answer, join=join)

    async def Transcribe(self, messages: AsyncIterator[pb.TranscribeRequest], call: RemoteCall) -> None:
        """Answers with the text of a sound while it comes, then with the whole text."""
        first = await call.calls.next_message(messages)
        if first is None or first.WhichOneof("message") != "start":
            raise InvalidRequest("the first message must have start", field="start")

        async def commands() -> AsyncIterator[bytes | Command]:
            while (message := await call.calls.next_message(messages)) is not None:
                kind = message.WhichOneof("message")
                if kind == "start":
                    raise InvalidRequest("only the first message may have start", field="start")
                if kind is not None:
                    yield message.sound if kind == "sound" else Command.FINISH_SEGMENT

        async with call.calls.models.use(call, first.start.model) as model:
            statistics = call.calls.models.statistics_of(model.base or model)
            stream = LiveStream(first.start, model, call, call.calls.live, statistics, call.send)
            whole = await stream.run(commands())
            seconds = whole.usage.source_seconds
            await call.send(pb.TranscribeResponse(result=whole, received_seconds=seconds))

    async def Score(self, message: pb.ScoreRequest, call: RemoteCall) -> pb.ScoreResponse:
        """Answers with the log-probabilities of a given target."""
        async with call.calls.models.use(call, message.model) as model:
            decoding = await read_scoring(message, model, call)
            scoring = score(message.sources, decoding, call)
            del message  # its sources would take memory while the request waits
            return await scoring

    async def ListModels(self, _message: pb.ListModelsRequest, call: RemoteCall) -> pb.ListModelsResponse:
        """Answers with every served model that the caller may use."""
        return pb.ListModelsResponse(
            models=[model_message(model) for model in call.calls.models.seen_by(call.caller)]
        )

    async def GetModel(self, message: pb.GetModelRequest, call: RemoteCall) -> pb.GetModelResponse:
        """Answers with the named model, or the first one."""
        async with call.calls.models.use(call, message.model, loads=False) as model:
            return pb.GetModelResponse(model=model_message(model))


def _batch_error(error: Exception, request_id: str) -> pb.BatchError:
    code, text, reason, field = status_of(error)
    return pb.BatchError(
        code=code.name,
        message=text,
        reason=reason,
        field=field or "",
        request_id=request_id,
        retry_after_seconds=error.retry_after_seconds if isinstance(error, Overloaded) else None,
    )


def _joined(answers: list[bytes]) -> bytes:
    """Returns several answers of a batch as one message."""
    first, *others = answers
    whole = pb.GenerateBatchResponse.FromString(first)
    for each in others:
        whole.more.add().ParseFromString(each)
    return whole.SerializeToString()


def _ends_the_batch(error: Exception) -> bool:
    """Whether every item would fail: an option is wrong, or the deadline of the call has passed."""
    return is_about_all(error) if isinstance(error, InvalidRequest) else isinstance(error, DeadlineExceeded)
