"""Generates targets, for both services that do so."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, aclosing, nullcontext
from functools import partial
from typing import TypeVar

from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.engine.async_engine import Stream
from seq2seq_serve.server.engine.request import Request
from seq2seq_serve.server.engine.result import Result
from seq2seq_serve.server.errors import InvalidRequest, Overloaded
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.service.call import BYTES_PER_TEXT_BYTE, SHORT_BYTES, Call
from seq2seq_serve.server.service.fair_thread import Checkpoint
from seq2seq_serve.server.service.read.inputs import cost_of_file, named_inputs
from seq2seq_serve.server.service.read.options import Decoding, read_options, read_target
from seq2seq_serve.server.service.read.sources import Reading, read_sources
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

_Attempted = TypeVar("_Attempted")

Write = Callable[[pb.Piece], Awaitable[None]]

_HEADER_BYTES_PER_TEXT_BYTE = 8  # a GIF of 148 KB can take 20 ms
_SMALL_STREAM_BYTES = 2**14  # of an answer
_MEMORY_PER_BYTE = 6  # of an answer, while its alternatives are Python's objects


async def read(sources: Sequence[pb.Source], decoding: Decoding, call: Call) -> list[Reading]:
    """Returns the sources of one target, or of several if they are split, read on the thread for their size.

    Before files wait for that thread, their headers are read.

    Args:
        sources: The sources.
        decoding: How the target is decoded.
        call: The call that it came with.

    Raises:
        InvalidRequest: The sources are not the model's, do not fit, or a file exceeds a limit by its headers.
        ServerError: `Call.read` raises it.
    """
    inputs = named_inputs(sources, decoding.model)
    work = partial(read_sources, decoding, call, inputs)
    num_file_bytes = sum(len(given.source.file) for given in inputs)
    num_array_bytes = num_file_bytes + sum(len(given.source.tensor.data) for given in inputs)
    num_text_bytes = sum(source.ByteSize() for source in sources) - num_array_bytes
    if not num_file_bytes:
        return await call.read(work, num_text_bytes + num_array_bytes // BYTES_PER_TEXT_BYTE)

    def measure(checkpoint: Checkpoint) -> int:
        num_pixels = 0
        for given in inputs:
            checkpoint()
            num_pixels += cost_of_file(given) if given.kind == "file" else 0
        return num_pixels

    num_pixels = await call.read(measure, min(num_file_bytes // _HEADER_BYTES_PER_TEXT_BYTE, SHORT_BYTES))
    num_bytes = num_text_bytes + (num_array_bytes + num_pixels) // BYTES_PER_TEXT_BYTE
    return await call.read(work, num_bytes, has_file=True)


async def read_decoding(
    options: pb.GenerateOptions, model: ServedModel, call: Call, *, stream: bool = False
) -> Decoding:
    """Returns how the targets of a message are decoded.

    Raises:
        ServerError: As `read_options`, or `Call.read` raises it.
    """
    return await call.read(
        lambda _: read_options(options, model, call.caller, stream=stream), options.ByteSize()
    )


async def read_scoring(message: pb.ScoreRequest, model: ServedModel, call: Call) -> Decoding:
    """Returns how the target of a message is scored; raises as `read_decoding`."""
    return await call.read(lambda _: read_target(message, model, call.caller), message.target.ByteSize())


async def generate(
    rows: list[Sequence[pb.Source]], decoding: Decoding, call: Call, write: Write | None = None
) -> list[pb.GenerateResponse]:
    """Decodes the targets of some sources together. If one fails, the others are cancelled.

    Args:
        rows: The sources of each target; emptied, so that they do not take memory while the requests wait.
        decoding: How the targets are decoded.
        call: The call that it came with.
        write: Is called with each piece of whole characters when it is decoded; None writes none.

    Raises:
        ServerError: The error of the first request that is refused or fails; an `InvalidRequest` has its row.
    """
    is_only = len(rows) == 1
    if decoding.windows is not None:
        answers: list[pb.GenerateResponse] = []
        while rows:
            try:
                answers.append(await _generate_windows(rows.pop(0), decoding, call, write))
            except InvalidRequest as error:
                error.row = None if is_only else len(answers)
                raise
        return answers
    engine = decoding.model.engine
    readings_of_all: list[list[Reading]] = []
    requests: list[Request] = []
    num_bytes = num_tokens = num_attention_bytes = 0
    while rows:
        try:
            readings = await read(rows.pop(0), decoding, call)
        except InvalidRequest as error:
            error.row = None if is_only else len(readings_of_all)
            raise
        readings_of_all.append(readings)
        requests += [reading.request for reading in readings]
        num_bytes += sum(estimated_bytes(reading, decoding) for reading in readings)
        if decoding.options.word_timestamps:
            num_attention_bytes += sum(estimated_attention_bytes(reading, decoding) for reading in readings)
        num_tokens += sum(reading.request.queue_tokens for reading in readings)
        call.check_answer_bytes(num_bytes)  # after each row: a refused call is not read further
        engine.check_size(len(requests), num_tokens)
        await asyncio.sleep(0)  # lets other calls run before the next sources are read
    pairs_of_all: list[list[tuple[Reading, Result]]] = []
    # A caller who does not read the pieces leaves the result with the engine.
    is_long_stream = write is not None and num_bytes > _SMALL_STREAM_BYTES
    num_held = _MEMORY_PER_BYTE * num_bytes if is_long_stream else 0
    with (
        call.holding(num_held, num_attention_bytes) if num_held or num_attention_bytes else nullcontext(),
        engine.submitted(requests, call.is_expired, is_accepted=call.is_accepted) as streams,
    ):
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
    sources: Sequence[pb.Source], decoding: Decoding, call: Call, write: Write | None
) -> pb.GenerateResponse:
    """Decodes a sound in windows, and writes a piece for each of them; as `generate`.

    Once the engine has accepted a request of the call, the others wait while the queue is full, and are
    decoded although the server drains.
    """
    readings = await with_patience(call, partial(read, sources, decoding, call))
    del sources
    pairs: list[tuple[Reading, Result]] = []
    num_bytes = 0

    async def decode(request: Request, is_repeated: bool) -> Result:
        async def attempt() -> Result:
            engine, is_accepted = decoding.model.engine, call.is_accepted
            with engine.submitted([request], call.is_expired, is_accepted=is_accepted) as (stream,):
                call.is_accepted = True
                return await succeeded(stream, call, is_repeated=is_repeated)

        return await with_patience(call, attempt)

    num_held = sum(array.nbytes for one in readings for array in one.request.sources.values())
    if len(readings) > 1:  # how many windows a sound in a row has is not known yet
        call.check_answer_bytes(sum(estimated_bytes(one, decoding) for one in readings))
    num_attention_bytes = 0
    if decoding.options.word_timestamps:  # of an attempt, and of the best one before it
        at_once = readings[:MOST_PIECES_AT_ONCE]
        num_attention_bytes = 2 * sum(estimated_attention_bytes(one, decoding) for one in at_once)
    seconds = readings[0].sound_seconds

    async def hold() -> None:
        try:
            held.enter_context(call.holding(num_held, num_attention_bytes))
        except Overloaded as error:
            text = f"no room for {seconds:.0f} seconds more of sound: send fewer sounds at once ({error})"
            error.args = (text,)
            raise

    with ExitStack() as held:
        await with_patience(call, hold)
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


async def score(reading: Reading, decoding: Decoding, call: Call) -> pb.ScoreResponse:
    """Returns the log-probabilities of a given target; raises the ServerError of a request that fails."""
    with decoding.model.engine.submitted([reading.request], call.is_expired) as (stream,):
        return score_response(reading, await succeeded(stream, call), decoding)


async def _timed(reading: Reading, result: Result, decoding: Decoding, call: Call) -> tuple[Reading, Result]:
    """Returns what `with_token_times` does, which may take a second."""
    return await call.build(attention_bytes(result), partial(with_token_times, reading, result, decoding))


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
    call.work.add(stream.request, result, is_repeated=is_repeated)
    return checked(result)
