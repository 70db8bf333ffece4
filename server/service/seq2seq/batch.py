"""Generates for the many sources of one call, and answers for each of them when its target is complete."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc

from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.errors import (
    EngineFailed,
    InvalidRequest,
    Overloaded,
    ServerError,
    is_about_all,
)
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.service.calls import Call, Calls, sized
from seq2seq_serve.server.service.read.requests import Decoding
from seq2seq_serve.server.service.seq2seq.generation import generate, pause, read_decoding
from seq2seq_serve.server.service.status import reason_of, status_of

_LEAST_OPEN = 64  # items that are decoded or wait at once; twice the slots if those are more


async def generate_batch(
    message: pb.GenerateBatchRequest, model: ServedModel, call: Call, calls: Calls
) -> None:
    """Decodes the items of a batch side by side. Each one is counted as a request.

    Args:
        message: The request.
        model: The model that it names.
        call: The call that it came with; the answers are sent to its caller.
        calls: Counts the items.

    Raises:
        ServerError: The whole batch is refused, for example because of its options.
    """
    decoding = await read_decoding(message.options, model, call)
    room, writing = asyncio.Semaphore(max(_LEAST_OPEN, 2 * model.num_slots)), asyncio.Lock()
    is_refused = False

    async def answer(index: int, item: pb.BatchItem) -> None:
        nonlocal is_refused
        its = call.item(index)
        response = pb.GenerateBatchResponse(index=index, tag=item.tag)
        code = grpc.StatusCode.OK
        try:
            try:
                response.response.CopyFrom(await _generated(item.sources, decoding, model, its))
            except Exception as error:
                code, text = status_of(error)
                if _ends_the_batch(error):
                    is_refused = True  # the call is counted once, in place of its items
                    raise
                its.log_bug(error)
                field = error.field if isinstance(error, InvalidRequest) else ""
                response.error.code, response.error.message = code.name, text
                response.error.reason, response.error.field = reason_of(error), field
                response.error.request_id = its.request_id
            async with writing:
                await call.send(response)
        except asyncio.CancelledError:
            code = call.code_of_leaving()
            raise
        finally:
            if not is_refused:
                calls.count(its, code)
            room.release()

    call.is_counted_by_request = True
    try:
        async with asyncio.TaskGroup() as tasks:
            for index, item in enumerate(message.items):
                await room.acquire()
                tasks.create_task(answer(index, item))
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


async def _generated(
    sources: Sequence[pb.Source], decoding: Decoding, model: ServedModel, call: Call
) -> pb.GenerateResponse:
    """Returns the answer to one item; waits while the queue is full."""
    while True:
        try:
            (answer,) = await generate([sources], decoding, model, call)
            return sized(answer)
        except Overloaded as error:
            await pause(error)


def _ends_the_batch(error: Exception) -> bool:
    """Whether every item would fail: not if a source is wrong, its answer too long, or a step failed."""
    if isinstance(error, InvalidRequest):
        return is_about_all(error)
    return isinstance(error, ServerError) and not isinstance(error, EngineFailed)
