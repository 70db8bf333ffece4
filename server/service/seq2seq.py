"""The service `seq2seq.v1.Seq2Seq`: from a message to the engine and back."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from functools import partial

from protos import seq2seq_v1_pb2 as pb
from protos import seq2seq_v1_pb2_grpc as pb_grpc
from server.deliveries import Mailbox
from server.models import Models, ServedModel
from server.records import Result
from server.service.answers import generate_response, model_message, score_response
from server.service.calls import Call, Calls, Context
from server.service.requests import Job, engine_jobs, score_request, target_text
from server.stopping import StoppedText

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Seq2Seq"].full_name


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
            model = call.model(message.model)
            jobs = await _jobs(message, model, call, stream=False)
            with ExitStack() as stack:
                mailboxes = [
                    stack.enter_context(model.submitted(job.request, call.is_expired)) for job in jobs
                ]
                results = [_succeeded(await mailbox.wait_for_result()) for mailbox in mailboxes]
            return generate_response(jobs, results, model, message.options)

    async def GenerateStream(  # noqa: N802
        self, message: pb.GenerateRequest, context: Context
    ) -> None:
        """Answer with pieces of whole characters, then with the whole."""
        # The first write sends the initial metadata, and with it commits the call: until a request has its
        # first token, a client may retry it elsewhere (gRFC A6).
        async with self._calls.open("GenerateStream", context) as call:
            model = call.model(message.model)
            jobs = await _jobs(message, model, call, stream=True)
            results = []
            with ExitStack() as stack:
                mailboxes = [
                    stack.enter_context(model.submitted(job.request, call.is_expired)) for job in jobs
                ]
                for job, mailbox in zip(jobs, mailboxes, strict=True):
                    follow = partial(target_text, message, model, len(job.request.prefix_ids))
                    async for piece in _pieces(mailbox, follow, job.part.separator):
                        if piece.hypothesis == 0 or len(jobs) == 1:  # sentences are joined by their best
                            await context.write(pb.GenerateStreamResponse(piece=piece))
                    results.append(_succeeded(await mailbox.wait_for_result()))
            answer = generate_response(jobs, results, model, message.options)
            await context.write(pb.GenerateStreamResponse(result=answer))

    async def Score(  # noqa: N802
        self, message: pb.ScoreRequest, context: Context
    ) -> pb.ScoreResponse:
        """Answer with the log-probabilities of a given target."""
        async with self._calls.open("Score", context) as call:
            model = call.model(message.model)
            request = score_request(message, model, call)
            with model.submitted(request, call.is_expired) as mailbox:
                result = await mailbox.wait_for_result()
            return score_response(request, _succeeded(result), model)

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
            return pb.GetModelResponse(model=model_message(call.model(message.model)))


async def _jobs(message: pb.GenerateRequest, model: ServedModel, call: Call, *, stream: bool) -> list[Job]:
    """What the engine shall do. A text that may be long is cut into tokens while others are served."""
    make = partial(engine_jobs, message, model, call, stream=stream)
    if message.options.long_source in (pb.LONG_SOURCE_TRUNCATE, pb.LONG_SOURCE_SPLIT):
        return await asyncio.to_thread(make)
    return make()


async def _pieces(
    mailbox: Mailbox, follow: Callable[[], StoppedText], separator: str
) -> AsyncIterator[pb.Piece]:
    """What a request's targets grow by, until they are complete."""
    texts = defaultdict[int, StoppedText](follow)
    result = None
    while result is None:
        token_ids, result = await mailbox.take()
        for place, new in token_ids.items():
            yield pb.Piece(text=texts[place].push(new), token_ids=new, hypothesis=place)
    if result.error is None:
        rests = {place: text.finish() for place, text in texts.items()}
        rests[0] = rests.get(0, "") + separator
        for place, rest in rests.items():
            if rest:
                yield pb.Piece(text=rest, hypothesis=place)


def _succeeded(result: Result) -> Result:
    if result.error is not None:
        raise result.error
    return result
