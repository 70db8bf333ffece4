"""Generates for the many sources of one call, and answers for each of them when its target is complete."""

from __future__ import annotations

from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.errors import (
    EngineFailed,
    InvalidRequest,
    ServerError,
    Unavailable,
    is_about_all,
)
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.service.calls import RemoteCall
from seq2seq_serve.server.service.seq2seq.generation import generate, read_decoding, with_patience
from seq2seq_serve.server.service.status import reason_of, status_of

_LEAST_OPEN = 64  # items that are decoded or wait at once; twice the slots if those are more


async def generate_batch(message: pb.GenerateBatchRequest, model: ServedModel, call: RemoteCall) -> None:
    """Decodes the items of a batch side by side. Each one is recorded as a call.

    Args:
        message: The request.
        model: The model that it names.
        call: The call that it came with; the answers are sent to its caller.

    Raises:
        ServerError: The whole batch is refused, for example because of its options.
    """
    decoding = await read_decoding(message.options, model, call)
    if call.calls.is_draining:
        raise Unavailable("the server is shutting down")
    call.is_accepted = True
    items = enumerate(message.items)

    async def following() -> tuple[int, pb.BatchItem] | None:
        return next(items, None)

    async def generate_and_send(
        item: pb.BatchItem, response: pb.GenerateBatchResponse, its: RemoteCall
    ) -> None:
        (answer,) = await with_patience(its, lambda: generate([item.sources], decoding, its))
        response.response.CopyFrom(answer)
        await call.send(response)

    async def answer(numbered: tuple[int, pb.BatchItem], its: RemoteCall) -> None:
        index, item = numbered
        response = pb.GenerateBatchResponse(index=index, tag=item.tag)
        error = await call.calls.run(its, generate_and_send(item, response, its), _ends_the_batch)
        if error is not None:
            response.error.CopyFrom(_batch_error(error, its.request_id))
            await call.send(response)

    await call.calls.answer_items(call, following, max(_LEAST_OPEN, 2 * model.engine.num_slots), answer)


def _batch_error(error: Exception, request_id: str) -> pb.BatchError:
    code, text = status_of(error)
    return pb.BatchError(
        code=code.name,
        message=text,
        reason=reason_of(error),
        field=error.field if isinstance(error, InvalidRequest) else "",
        request_id=request_id,
    )


def _ends_the_batch(error: Exception) -> bool:
    """Whether every item would fail: not if a source is wrong, its answer too long, or a step failed."""
    if isinstance(error, InvalidRequest):
        return is_about_all(error)
    return isinstance(error, ServerError) and not isinstance(error, EngineFailed)
