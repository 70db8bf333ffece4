"""A part of the reliability benchmark: small files of long sounds, beside short sounds and texts."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from grpc import aio

from reliability.place import (
    TINY,
    Bar,
    Figures,
    Place,
    at_least,
    at_most,
    nothing_left,
    settled,
    state,
    unexpected,
)
from reliability.watch import resident_bytes, watched
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.protos.seq2seq_v1_pb2_grpc import Seq2SeqStub

_SPEECH = "speech"
_SECONDS = 1500  # the longest sound of Whisper
_LOUD = 192_000, 8  # samples a second, and channels: the most that are read
_NUM_ITEMS = 400
_BATCH_SECONDS = 60.0
_TEXT_BYTES = 40_000
_PATIENT_SECONDS = 300.0
_BLOCK = 65_535  # samples of each channel in a frame of FLAC, the most there can be
_BITS = 16
_Result = TypeVar("_Result")


def sounds(place: Place) -> tuple[Figures, list[Bar]]:
    """Send the most expensive file that is read, then a batch of long sounds, beside short ones and texts."""
    seconds = place.count(_SECONDS, 60)
    with place.serving([place.bundle(TINY), _speech(place)]) as server:
        asyncio.run(_beside(server.address, _nothing))
        before, start = state(server), resident_bytes(server)
        with watched(server) as watch:
            loud_seconds, codes, waits = asyncio.run(
                _beside(server.address, partial(_loud, silence(seconds, *_LOUD)))
            )
            batch = partial(_batch, place.count(_NUM_ITEMS, 8), place.seconds(_BATCH_SECONDS, 5))
            of_items, codes_of_batch, waits_of_batch = asyncio.run(_beside(server.address, batch))
        after = settled(server, before)
    figures = {
        "codes": codes,
        "codes_beside_batch": codes_of_batch,
        "loud_seconds": loud_seconds,
        "items": of_items,
        "waits_seconds": waits,
        "waits_beside_batch_seconds": waits_of_batch,
        "bytes_over_start": watch.peak_bytes - start,
    }
    longest = {name: max(waits[name] + waits_of_batch[name]) for name in waits}
    return figures, [
        *(
            at_most(f"longest wait for a short {name}, seconds", wait, 5, is_timed=True)
            for name, wait in longest.items()
        ),
        at_least("answers beside the long sounds", codes["OK"], 2),
        at_least("items of the batch that were answered", of_items["OK"], 1),
        at_most("memory over that at the start, MiB", (watch.peak_bytes - start) / 2**20, 768),
        *watch.bars(0.5, "beside long sounds"),
        unexpected(codes, "OK"),
        # The batch has most of the memory, and is the same caller's.
        unexpected(codes_of_batch, "OK", "RESOURCE_EXHAUSTED", whose="calls beside the batch"),
        unexpected(of_items, "OK", whose="items"),
        *nothing_left(before, after),
    ]


def _speech(place: Place) -> Path:
    """Returns a bundle of a small Whisper with random weights; the first call imports it."""
    path = place.folder / _SPEECH
    if not path.exists():
        # Imports torch and transformers, which other parts do not need.
        from benchmarks.peers.checkpoints import make_checkpoint
        from benchmarks.peers.work import Checkpoint
        from seq2seq_serve.bundle.names import Precision
        from seq2seq_serve.export.huggingface.exporter import export_checkpoint
        from seq2seq_serve.training.config import TransformerConfig

        sizes = TransformerConfig(2000, 64, 128, 1, 1, 1, max_source_length=1500, max_target_length=64)
        with tempfile.TemporaryDirectory() as folder:
            make_checkpoint(Checkpoint("whisper", sizes, eos_id=0), Path(folder) / "whisper")
            export_checkpoint(Path(folder) / "whisper", path, [Precision.FP32], report=lambda _: None)
    return path


def _sound(content: bytes) -> pb.GenerateRequest:
    options = pb.GenerateOptions(max_new_tokens=1, long_source=pb.LONG_SOURCE_SEQUENTIAL, temperature=1)
    return pb.GenerateRequest(model=_SPEECH, sources=[pb.Source(file=content)], options=options)


async def _beside(
    address: str, attack: Callable[[Any], Awaitable[_Result]]
) -> tuple[_Result, Counter[str], dict[str, list[float]]]:
    """Send short sounds and texts, one after the other, until an attack has ended.

    Returns:
        The result of the attack, and the statuses of the others, and their times.
    """
    codes, waits = Counter[str](), {"sound": list[float](), "text": list[float]()}
    options = pb.GenerateOptions(max_new_tokens=1, long_source=pb.LONG_SOURCE_TRUNCATE)
    texts = [pb.Source(text="the cat. " * (_TEXT_BYTES // 9))]
    messages = {
        "sound": _sound(silence(5)),
        "text": pb.GenerateRequest(model=TINY, sources=texts, options=options),
    }
    async with aio.insecure_channel(address) as channel, aio.insecure_channel(address) as other:
        attacking = asyncio.ensure_future(attack(Seq2SeqStub(channel)))  # type: ignore[no-untyped-call]
        stub: Any = Seq2SeqStub(other)  # type: ignore[no-untyped-call]
        while True:
            for name, message in messages.items():
                started = time.monotonic()
                try:
                    await stub.Generate(message, timeout=_PATIENT_SECONDS)
                    codes["OK"] += 1
                except aio.AioRpcError as error:
                    codes[error.code().name] += 1
                waits[name].append(time.monotonic() - started)
            if attacking.done():
                return attacking.result(), codes, waits


async def _nothing(_: Any) -> None:
    pass


async def _loud(content: bytes, stub: Any) -> float:
    """Send a long sound; returns the seconds until its answer."""
    started = time.monotonic()
    await stub.Generate(_sound(content), timeout=_PATIENT_SECONDS)
    return time.monotonic() - started


async def _batch(num_items: int, seconds: float, stub: Any) -> Counter[str]:
    """Send a batch of long sounds; leave after some time and an answer. Returns the items' statuses."""
    codes, given = Counter[str](), _sound(silence(_SECONDS, 4_000))
    batch = pb.GenerateBatchRequest(model=_SPEECH, options=given.options)
    for _ in range(num_items):
        batch.items.add().sources.extend(given.sources)
    end = time.monotonic() + seconds
    call = stub.GenerateBatch(batch, timeout=_PATIENT_SECONDS)
    async for answer in call:
        codes["OK" if answer.HasField("response") else answer.error.code] += 1
        if time.monotonic() >= end:
            call.cancel()
            break
    return codes


def silence(seconds: int, rate: int = 16_000, num_channels: int = 1) -> bytes:
    """Returns a FLAC file with the fewest bytes: `_BLOCK` samples of a channel take three."""
    num_samples = seconds * rate
    sizes = _BLOCK.to_bytes(2, "big") * 2 + bytes(6)
    described = rate << 44 | (num_channels - 1) << 41 | (_BITS - 1) << 36 | num_samples
    info = sizes + described.to_bytes(8, "big") + bytes(16)
    frames = b"".join(_frames(num_samples, num_channels))
    return b"fLaC" + b"\x80" + len(info).to_bytes(3, "big") + info + frames


def _frames(num_samples: int, num_channels: int) -> Iterator[bytes]:
    for number, first in enumerate(range(0, num_samples, _BLOCK)):
        length = min(_BLOCK, num_samples - first)
        head = b"\xff\xf8" + bytes([0x70, (num_channels - 1) << 4 | 0x08])
        head += chr(number).encode("utf-8", "surrogatepass") + (length - 1).to_bytes(2, "big")
        head += _crc(head, 0x07, 8)
        frame = head + bytes(3) * num_channels  # a constant subframe, and its sample
        yield frame + _crc(frame, 0x8005, 16)


def _crc(octets: bytes, polynomial: int, num_bits: int) -> bytes:
    remainder, top = 0, 1 << num_bits - 1
    for octet in octets:
        remainder ^= octet << num_bits - 8
        for _ in range(8):
            remainder = (remainder << 1 ^ (polynomial if remainder & top else 0)) & (2 * top - 1)
    return remainder.to_bytes(num_bits // 8, "big")
