"""From requests to answers, for every service that generates."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

from protos import seq2seq_v1_pb2 as pb
from server.deliveries import Mailbox
from server.models import ServedModel
from server.records import Request, Result
from server.service.answers import estimated_bytes, generate_response
from server.service.calls import Call, check_answer_bytes
from server.service.requests import Job, engine_jobs, target_text
from server.stopping import StoppedText


async def generate(
    messages: Sequence[pb.GenerateRequest], model: ServedModel, call: Call
) -> list[pb.GenerateResponse]:
    """Decode some requests together; where one fails the others are taken back.

    Raises:
        ServerError: Of the first that is refused or fails.
    """
    jobs_of_all: list[list[Job]] = []
    requests: list[Request] = []
    num_bytes = num_tokens = 0
    for message in messages:
        jobs = await _jobs(message, model, call, stream=False)
        jobs_of_all.append(jobs)
        requests += [job.request for job in jobs]
        num_bytes += sum(estimated_bytes(job, message.options) for job in jobs)
        num_tokens += sum(job.request.source_length for job in jobs)
        check_answer_bytes(num_bytes)  # by what is known so far: no more is cut of a call that is refused
        model.check_size(len(requests), num_tokens)
        await asyncio.sleep(0)  # a turn for other calls before the next text is cut into tokens
    with model.submitted(requests, call.is_expired) as mailboxes:
        boxes = iter(mailboxes)
        results_of_all = [[await succeeded(next(boxes)) for _ in jobs] for jobs in jobs_of_all]

    def build() -> list[pb.GenerateResponse]:
        return [
            generate_response(jobs, results, model, message.options)
            for jobs, results, message in zip(jobs_of_all, results_of_all, messages, strict=True)
        ]

    return await call.built(num_bytes, build)


async def generate_pieces(
    message: pb.GenerateRequest,
    model: ServedModel,
    call: Call,
    write: Callable[[pb.Piece], Awaitable[None]],
) -> pb.GenerateResponse:
    """Decode one request, and write every piece of whole characters as it comes.

    Raises:
        ServerError: The request is refused or fails.
    """
    jobs = await _jobs(message, model, call, stream=True)
    num_bytes = sum(estimated_bytes(job, message.options) for job in jobs)
    check_answer_bytes(num_bytes)
    results = []
    with model.submitted([job.request for job in jobs], call.is_expired) as mailboxes:
        for job, mailbox in zip(jobs, mailboxes, strict=True):
            follow = partial(target_text, job.request, model)
            async for piece in _pieces(mailbox, follow, job.part.separator):
                if piece.hypothesis == 0 or len(jobs) == 1:  # sentences are joined by their best
                    await write(piece)
            results.append(await succeeded(mailbox))
    return await call.built(num_bytes, partial(generate_response, jobs, results, model, message.options))


async def succeeded(mailbox: Mailbox) -> Result:
    """The result of a request that ends well.

    Raises:
        ServerError: It does not.
    """
    result = await mailbox.wait_for_result()
    if result.error is not None:
        raise result.error
    return result


async def _jobs(message: pb.GenerateRequest, model: ServedModel, call: Call, *, stream: bool) -> list[Job]:
    """Returns the engine's requests. A text that may be long is cut into tokens while others are served."""
    return await call.texts.run(
        lambda checkpoint: engine_jobs(message, model, call, checkpoint, stream=stream),
        message.ByteSize(),
        call.caller.name,
        call.deadline,
    )


async def _pieces(
    mailbox: Mailbox, follow: Callable[[], StoppedText], separator: str
) -> AsyncIterator[pb.Piece]:
    """Yields the pieces by which a request's targets grow, until they are complete."""
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
