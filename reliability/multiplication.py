"""A part of the reliability benchmark: options of one message that hold for many of its items."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from grpc import aio

from reliability.callers import good_calls
from reliability.payloads import varint
from reliability.place import TINY, Bar, Figures, Place, at_most, nothing_left, settled, state, unexpected
from reliability.watch import resident_bytes, watched
from seq2seq_serve.protos import open_inference_pb2 as oip
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb

_NUM_ITEMS = 512
_NUM_ROWS = 256
_NUM_IDS, _TOO_MANY_IDS = 1024, 1_000_000
_AT_ONCE = 8
_UNKNOWN_BYTES = 4 * 2**20 - 40_000
_UNKNOWN_FIELD = b"\xba\x3e"  # of the number 999, with a length
_BATCH, _INFER = "/seq2seq.v1.Seq2Seq/GenerateBatch", "/inference.GRPCInferenceService/ModelInfer"


def multiplication(place: Place) -> tuple[Figures, list[Bar]]:
    """Send messages whose options hold for hundreds of items, while another caller streams and probes."""
    num_items = place.count(_NUM_ITEMS, 16)
    peaks: dict[str, float] = {}
    gaps: dict[str, float] = {}
    codes: dict[str, Counter[str]] = {}
    with place.serving(TINY) as server:
        asyncio.run(good_calls(server.address, 8))
        before, start = state(server), resident_bytes(server)
        for name, (path, raw, times) in _messages(num_items).items():
            with watched(server) as watch:
                codes[name] = asyncio.run(_send(server.address, path, raw, times))
            peaks[name], gaps[name] = watch.peak_bytes - start, watch.stream_gap_seconds
        good = asyncio.run(good_calls(server.address, 8))
        after = settled(server, before)
    figures = {"bytes_over_start": peaks, "stream_gap_seconds": gaps, "codes": codes}
    return figures, [
        at_most("memory over that at the start, MiB", max(peaks.values()) / 2**20, 256),
        at_most("longest gap of another stream, seconds", max(gaps.values()), 0.3, is_timed=True),
        unexpected(sum(codes.values(), Counter[str]()), "OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"),
        unexpected(good, "OK", whose="good calls afterwards"),
        *nothing_left(before, after),
    ]


def _messages(num_items: int) -> Mapping[str, tuple[str, bytes, int]]:
    """Returns messages by what they multiply: the method's path, the bytes, and how often they are sent."""
    ids = np.arange(4, 4 + _NUM_IDS).tolist()
    item = pb.BatchItem(sources=[pb.Source(token_ids=pb.TokenIds(values=[5, 6, 2]))])

    def batch(num_ids: int, number: int, num_biases: int = 0) -> bytes:
        options = pb.GenerateOptions(suppressed_token_ids=(ids * (num_ids // len(ids) + 1))[:num_ids])
        options.logit_bias.update(dict.fromkeys(range(ids[-1] + 1, ids[-1] + 1 + num_biases), 0.5))
        options.max_new_tokens = 4
        return pb.GenerateBatchRequest(items=[item] * number, options=options).SerializeToString()

    unknown = _UNKNOWN_FIELD + varint(_UNKNOWN_BYTES) + bytes(_UNKNOWN_BYTES)
    infer = _infer(min(num_items, _NUM_ROWS), ids)
    return {
        "ids for a batch": (_BATCH, batch(_NUM_IDS, num_items), 1),
        "ids and biases for a batch, at once": (_BATCH, batch(_NUM_IDS, num_items, _NUM_IDS), 4),
        "too many ids for a batch": (_BATCH, batch(_TOO_MANY_IDS, 5), 1),
        "an unknown field beside a batch": (_BATCH, batch(0, num_items) + unknown, 1),
        "parameters for rows": (_INFER, infer, 1),
        "parameters for rows, at once": (_INFER, infer, _AT_ONCE),
    }


def _infer(num_rows: int, ids: list[int]) -> bytes:
    message = oip.ModelInferRequest(model_name=TINY)
    rows = message.inputs.add(name="input_ids", datatype="INT64", shape=[num_rows, 3])
    rows.contents.int64_contents.extend([5, 6, 2] * num_rows)
    message.parameters["suppressed_token_ids"].string_param = str(ids)
    message.parameters["max_new_tokens"].int64_param = 4
    return message.SerializeToString()


async def _send(address: str, path: str, raw: bytes, times: int) -> Counter[str]:
    """Returns the statuses of calls that are made at once, whose answers are read and forgotten."""
    codes = Counter[str]()
    async with aio.insecure_channel(address) as channel:
        call: Callable[[bytes], Any] = channel.unary_stream(path)

        async def one() -> None:
            answering = call(raw)
            try:
                while await answering.read() is not aio.EOF:
                    pass
                codes["OK"] += 1
            except aio.AioRpcError as error:
                codes[error.code().name] += 1

        await asyncio.gather(*(one() for _ in range(times)))
    return codes
