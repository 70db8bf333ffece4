"""Generates targets, for both services that do so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.engine.async_engine import Stream
from seq2seq_serve.server.engine.records import Request, Result
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.service.calls import Call, check_answer_bytes
from seq2seq_serve.server.service.seq2seq.answers import estimated_bytes, generate_response
from seq2seq_serve.server.service.seq2seq.requests import Job, engine_jobs, target_text, with_defaults
from seq2seq_serve.server.service.seq2seq.sources import read_sources


async def generate(
    messages: list[pb.GenerateRequest], model: ServedModel, call: Call
) -> list[pb.GenerateResponse]:
    """Decodes some requests together. If one fails, the others are cancelled.

    Args:
        messages: Emptied, so that their sources do not take memory while the requests wait.
        model: The model that the requests name.
        call: The call that they came with.

    Raises:
        ServerError: The error of the first request that is refused or fails.
    """
    read: list[tuple[list[Job], pb.GenerateOptions]] = []
    requests: list[Request] = []
    num_bytes = num_tokens = 0
    while messages:
        jobs, options = await _read(messages.pop(0), model, call, stream=False)
        read.append((jobs, options))
        requests += [job.request for job in jobs]
        num_bytes += sum(estimated_bytes(job, model, options) for job in jobs)
        num_tokens += sum(job.request.queue_tokens for job in jobs)
        check_answer_bytes(num_bytes)  # after each message: a refused call is not read further
        model.engine.check_size(len(requests), num_tokens)
        await asyncio.sleep(0)  # lets other calls run before the next sources are read
    with model.engine.submitted(requests, call.is_expired) as streams:
        following = iter(streams)
        results_of_all = [[await succeeded(next(following), call) for _ in jobs] for jobs, _ in read]

    def build() -> list[pb.GenerateResponse]:
        return [
            generate_response(jobs, results, model, options)
            for (jobs, options), results in zip(read, results_of_all, strict=True)
        ]

    return await call.built(num_bytes, build)


async def generate_pieces(
    messages: list[pb.GenerateRequest],
    model: ServedModel,
    call: Call,
    write: Callable[[pb.Piece], Awaitable[None]],
) -> pb.GenerateResponse:
    """Decodes one request, and writes each piece of whole characters when it is decoded.

    Args:
        messages: The request alone; emptied as by `generate`.
        model: The model that the request names.
        call: The call that it came with.
        write: Is called with each piece.

    Raises:
        ServerError: The request is refused or fails.
    """
    jobs, options = await _read(messages.pop(), model, call, stream=True)
    num_bytes = sum(estimated_bytes(job, model, options) for job in jobs)
    check_answer_bytes(num_bytes)
    results = []
    with model.engine.submitted([job.request for job in jobs], call.is_expired) as streams:
        for job, stream in zip(jobs, streams, strict=True):
            async for piece in _pieces(job, stream, model):
                if piece.hypothesis == 0 or len(jobs) == 1:  # a split source streams the best ones only
                    await write(piece)
            results.append(await succeeded(stream, call))
    return await call.built(num_bytes, partial(generate_response, jobs, results, model, options))


async def _read(
    message: pb.GenerateRequest, model: ServedModel, call: Call, *, stream: bool
) -> tuple[list[Job], pb.GenerateOptions]:
    """Returns the engine's requests for a message, and a copy of its options."""
    work = partial(engine_jobs, message, model, call, stream=stream)
    jobs = await read_sources(work, message, model, call)
    return jobs, with_defaults(message.options, model)


async def succeeded(stream: Stream, call: Call) -> Result:
    """Returns the result of a request, and adds it to the work of its call.

    Raises:
        ServerError: The request failed.
    """
    result = await stream.wait()
    call.work.add(stream.request, result)
    if result.error is not None:
        raise result.error
    return result


async def _pieces(job: Job, stream: Stream, model: ServedModel) -> AsyncIterator[pb.Piece]:
    """Yields the pieces of a request's targets until they are complete."""
    async for _, token_ids, result in stream.updates():
        for place, new in token_ids.items():
            text = job.texts.setdefault(place, target_text(job.request, model))
            yield pb.Piece(text=text.push(new), token_ids=new, hypothesis=place)
        if result is not None and result.error is None:
            rests = {place: text.finish() for place, text in job.texts.items()}
            rests[0] = rests.get(0, "") + job.part.separator
            for place, rest in rests.items():
                if rest:
                    yield pb.Piece(text=rest, hypothesis=place)
