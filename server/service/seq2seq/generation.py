"""Generates targets, for both services that do so."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, aclosing, nullcontext
from functools import partial
from typing import TypeVar

from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.engine.async_engine import AsyncEngine, Stream
from seq2seq_serve.server.engine.request import Request
from seq2seq_serve.server.engine.result import Result
from seq2seq_serve.server.errors import InvalidRequest, Overloaded
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.service.call import BYTES_PER_TERM, BYTES_PER_TEXT_BYTE, SHORT_BYTES, Call
from seq2seq_serve.server.service.fair_thread import YieldPoint
from seq2seq_serve.server.service.read.inputs import FileCost, named_inputs
from seq2seq_serve.server.service.read.options import Decoding, read_options, read_target
from seq2seq_serve.server.service.read.sources import Reading, cost_of_file, read_sources
from seq2seq_serve.server.service.read.terms import Glossary
from seq2seq_serve.server.service.seq2seq.windows import MOST_PIECES_AT_ONCE, decode_windows
from seq2seq_serve.server.service.write.responses import (
    attention_bytes,
    checked,
    estimated_attention_bytes,
    estimated_bytes,
    generate_response,
    pieces,
    score_response,
    window_piece,
    with_token_times,
)
from seq2seq_serve.server.telemetry.record import ADMIN

_Attempted = TypeVar("_Attempted")

WritePiece = Callable[[pb.Piece], Awaitable[None]]

_HEADER_BYTES_PER_TEXT_BYTE = 8  # a GIF of 148 KB can take 20 ms
_SMALL_STREAM_BYTES = 2**14  # of an answer
_MEMORY_PER_BYTE = 6  # of an answer, while its alternatives are Python's objects


async def read(
    sources: Sequence[pb.Source], decoding: Decoding, call: Call, held: ExitStack
) -> list[Reading]:
    """Returns the sources of one target, or of several if they are split, read on the thread for their size.

    Before files wait for that thread, their headers are read, and there must be room for what is in them.

    Args:
        sources: The sources.
        decoding: How the target is decoded.
        call: The call that it came with.
        held: Counts the memory of arrays that are read from files, until it is closed.

    Raises:
        InvalidRequest: The sources are not the model's, do not fit, or a file exceeds a limit by its headers.
        ServerError: `Call.read` or `Call.room` raises it.
    """
    inputs = named_inputs(sources, decoding.model)
    work = partial(read_sources, decoding, call, inputs)
    num_file_bytes = sum(len(given.source.file) for given in inputs)
    num_array_bytes = num_file_bytes + sum(len(given.source.tensor.data) for given in inputs)
    num_text_bytes = sum(source.ByteSize() for source in sources) - num_array_bytes
    if decoding.glossary is not None:
        num_text_bytes += decoding.glossary.num_found_bytes(num_text_bytes)
        num_text_bytes += BYTES_PER_TERM * decoding.glossary.num_placeholders(sources[0].text)
    if not num_file_bytes:
        return await call.read(work, num_text_bytes + num_array_bytes // BYTES_PER_TEXT_BYTE)

    def measure(checkpoint: YieldPoint) -> list[FileCost]:
        costs = []
        for given in inputs:
            if given.kind == "file":
                checkpoint()
                costs.append(cost_of_file(given, decoding))
        return costs

    costs = await call.read(measure, min(num_file_bytes // _HEADER_BYTES_PER_TEXT_BYTE, SHORT_BYTES))
    try:
        room = await call.room(sum(cost.num_array_bytes for cost in costs))
    except Overloaded as error:
        error.args = (f"there is no room for what is in the files: send fewer at once ({error})",)
        raise
    held.enter_context(room)
    num_pixels = sum(cost.num_pixels for cost in costs)
    num_bytes = num_text_bytes + (num_array_bytes + num_pixels) // BYTES_PER_TEXT_BYTE
    readings = await call.read(work, num_bytes, num_file_bytes=sum(cost.num_bytes for cost in costs))
    room.shrink(sum(array.nbytes for one in readings for array in one.request.sources.values()))
    return readings


async def read_decoding(
    options: pb.GenerateOptions,
    model: ServedModel,
    call: Call,
    *,
    stream: bool = False,
    glossary: Glossary | None = None,
) -> Decoding:
    """Returns how the targets of a message are decoded, which is kept for equal options of the model.

    Callers share it if they may choose the same priorities: requests get their names later. The call counts
    the memory of a glossary until it ends, because its requests wait with it.

    Args:
        options: The options of the message.
        model: The model that it names.
        call: The call that it came with.
        stream: Whether the caller gets pieces.
        glossary: As for `read_options`; the call counts it already.

    Raises:
        ServerError: As `read_options`, or `Call.read` or `Call.hold` raises it.
    """
    read_from = options.SerializeToString(), stream, ADMIN in call.caller.roles
    decoding: Decoding | None = model.decodings.get(model, read_from) if model.decodings is not None else None
    if decoding is None:
        num_bytes = len(read_from[0])
        decoding = await call.read(
            lambda checkpoint: read_options(
                options, model, call.caller, stream=stream, checkpoint=checkpoint, glossary=glossary
            ),
            num_bytes + BYTES_PER_TERM * len(options.terms),
        )
        if model.decodings is not None:
            model.decodings.keep(model, read_from, decoding, num_bytes + decoding.num_bytes)
    if decoding.glossary is not None and decoding.glossary is not glossary:
        call.hold(decoding.num_bytes)
    return decoding


async def read_scoring(message: pb.ScoreRequest, model: ServedModel, call: Call) -> Decoding:
    """Returns how the target of a message is scored; raises as `read_decoding`."""
    return await call.read(lambda _: read_target(message, model, call.caller), message.target.ByteSize())


async def generate(
    items: list[Sequence[pb.Source]], decoding: Decoding, call: Call, write: WritePiece | None = None
) -> list[pb.GenerateResponse]:
    """Decodes the targets of some sources together. If one fails, the others are cancelled.

    Args:
        items: The sources of each answer; emptied, so that they do not take memory while the requests wait.
        decoding: How the targets are decoded.
        call: The call that it came with.
        write: Is called with each piece of whole characters when it is decoded; None writes none.

    Raises:
        ServerError: The error of the first request that is refused or fails; that of an `InvalidRequest`
            has the row of its item.
    """
    is_only = len(items) == 1
    if decoding.windows is not None:
        answers: list[pb.GenerateResponse] = []
        while items:
            try:
                answers.append(await _generate_windows(items.pop(0), decoding, call, write))
            except InvalidRequest as error:
                error.row = None if is_only else len(answers)
                raise
        return answers
    engine = decoding.model.engine
    readings_of_all: list[list[Reading]] = []
    requests: list[Request] = []
    num_bytes = num_tokens = num_attention_bytes = 0
    with ExitStack() as held:
        while items:
            try:
                readings = await read(items.pop(0), decoding, call, held)
            except InvalidRequest as error:
                error.row = None if is_only else len(readings_of_all)
                raise
            readings_of_all.append(readings)
            requests += [reading.request for reading in readings]
            num_bytes += sum(estimated_bytes(reading, decoding) for reading in readings)
            if decoding.options.word_timestamps:
                num_attention_bytes += sum(
                    estimated_attention_bytes(reading.request, decoding) for reading in readings
                )
            num_tokens += sum(reading.request.queue_tokens for reading in readings)
            call.check_answer_bytes(num_bytes)  # after each item: a refused call is not read further
            is_split = len(requests) > len(readings_of_all)
            engine.check_size(len(requests), num_tokens, "sentences" if is_split else "requests")
            if items:
                await asyncio.sleep(0)  # lets other calls run before the next sources are read
        pairs_of_all: list[list[tuple[Reading, Result]]] = []
        # A caller who does not read the pieces leaves the result with the engine.
        is_long_stream = write is not None and num_bytes > _SMALL_STREAM_BYTES
        num_held = _MEMORY_PER_BYTE * num_bytes if is_long_stream else 0
        with (
            call.holding(num_held, num_attention_bytes) if num_held or num_attention_bytes else nullcontext(),
            engine.submitted(requests, call.is_expired, is_accepted=call.is_accepted) as streams,
        ):
            held.close()  # the queue counts them
            for readings in readings_of_all:
                pairs_of_all.append([])
                for reading in readings:
                    if write is not None:
                        async for piece in pieces(reading, streams[0], decoding):
                            if piece.hypothesis == 0 or len(readings) == 1:  # several: the best ones only
                                await write(piece)
                    pair = reading, await succeeded(streams[0], call)
                    del streams[0]  # its result has the attention
                    if decoding.options.word_timestamps:
                        pair = await _timed(*pair, decoding, call)
                    pairs_of_all[-1].append(pair)
    return await call.build(
        num_bytes, lambda _: [generate_response(pairs, decoding) for pairs in pairs_of_all]
    )


async def _generate_windows(
    sources: Sequence[pb.Source], decoding: Decoding, call: Call, write: WritePiece | None
) -> pb.GenerateResponse:
    """Decodes a sound in windows, and writes a piece for each of them; as `generate`."""
    pairs: list[tuple[Reading, Result]] = []
    num_bytes = 0

    decode = partial(decoded_in_turn, decoding.model.engine, call)

    with ExitStack() as held:
        readings = await read(sources, decoding, call, held)
        del sources
        if len(readings) > 1:  # how many windows a sound in a row has is not known yet
            call.check_answer_bytes(sum(estimated_bytes(one, decoding) for one in readings))
        if decoding.options.word_timestamps:  # of an attempt, of the best one before it, of a piece's windows
            at_once = readings[:MOST_PIECES_AT_ONCE]
            num_attention_bytes = (2 + (len(readings) > 1)) * sum(
                estimated_attention_bytes(one.request, decoding) for one in at_once
            )
            await hold_attention(held, call, num_attention_bytes)
        async with aclosing(decode_windows(readings, decoding, decode)) as windows:
            async for window, result in windows:
                pair = window, result
                if decoding.options.word_timestamps:
                    pair = await _timed(*pair, decoding, call)
                pairs.append(pair)
                num_bytes += estimated_bytes(window, decoding)
                call.check_answer_bytes(num_bytes)
                if write is not None:
                    await write(window_piece(result, decoding))
        del readings
    return await call.build(num_bytes, lambda _: generate_response(pairs, decoding))


async def score(sources: Sequence[pb.Source], decoding: Decoding, call: Call) -> pb.ScoreResponse:
    """Returns the log-probabilities of a given target.

    Raises:
        ServerError: The sources do not fit, or the request is refused or fails.
    """
    with ExitStack() as held:
        (reading,) = await read(sources, decoding, call, held)
        del sources  # they would take memory while the request waits
        with decoding.model.engine.submitted([reading.request], call.is_expired) as (stream,):
            held.close()  # the queue counts them
            return score_response(reading, await succeeded(stream, call), decoding)


async def _timed(reading: Reading, result: Result, decoding: Decoding, call: Call) -> tuple[Reading, Result]:
    """Returns what `with_token_times` does, which may take a second."""
    return await call.build(attention_bytes(result), partial(with_token_times, reading, result, decoding))


async def decoded_in_turn(engine: AsyncEngine, call: Call, request: Request, is_repeated: bool) -> Result:
    """Returns the result of one of a call's many requests.

    Once the engine has accepted one of them, the others wait while the queue is full, and are decoded
    although the server drains.

    Args:
        engine: Decodes it.
        call: The call.
        request: The request.
        is_repeated: As for `Work.add`.

    Raises:
        ServerError: The request is refused or fails.
    """

    async def attempt() -> Result:
        with engine.submitted([request], call.is_expired, is_accepted=call.is_accepted) as (stream,):
            call.is_accepted = True
            return await succeeded(stream, call, is_repeated=is_repeated)

    return await with_patience(call, attempt)


async def hold_attention(held: ExitStack, call: Call, num_bytes: int) -> None:
    """Counts memory of attention until `held` ends; an accepted call waits for room.

    Raises:
        Overloaded: Too much is held, and the call is not accepted yet.
    """

    async def hold() -> None:
        held.enter_context(call.holding(0, num_bytes))

    await with_patience(call, hold)


async def with_patience(call: Call, attempt: Callable[[], Awaitable[_Attempted]]) -> _Attempted:
    """Returns the result of an attempt; that of an accepted call is repeated while the server is full."""
    while True:
        try:
            return await attempt()
        except Overloaded as error:
            if not call.is_accepted:
                raise
            # Not all of them come again at once.
            await asyncio.sleep(error.retry_after_seconds * random.uniform(0.5, 1.5))


async def succeeded(stream: Stream, call: Call, *, is_repeated: bool = False) -> Result:
    """Returns the result of a request, and adds it to the work of its call.

    Args:
        stream: The stream of the request.
        call: The call.
        is_repeated: As for `Work.add`.

    Raises:
        ServerError: The request failed.
    """
    result = await stream.wait()
    if call.pace is not None:
        await call.pace.turn()
    call.work.add(stream.request, result, is_repeated=is_repeated)
    return checked(result)
