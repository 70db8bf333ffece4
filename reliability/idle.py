"""A part of the reliability benchmark: calls that are opened and not used, beside short calls of others."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from grpc import aio

from reliability.callers import code_of, good_calls
from reliability.place import TINY, Bar, Figures, Place, at_most, nothing_left, settled, state, unexpected
from reliability.watch import Watch, beside, resident_bytes, watch_memory
from seq2seq_serve.client import AsyncClient
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb

_GENERATE, _CHECK, _WATCH = (
    "/seq2seq.v1.Seq2Seq/Generate",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
)
_EVERY_SECONDS = 0.05
_HELD_SECONDS = 5.0
_LEAVING_SECONDS = 0.5  # for gRPC to end the calls
_NUM_SILENT, _NUM_WATCHES, _NUM_PROBES, _NUM_CANCELLED = 24, 6000, 200, 20_000
_PROBE_BYTES = 4 * 2**20 - 64
_NUM_CONNECTIONS, _AT_ONCE = 2, 200
_OWN = (("grpc.use_local_subchannel_pool", 1),)  # one connection a channel
_SHORT = pb.GenerateOptions(max_new_tokens=2)

Attack = Callable[[Sequence[Any]], Awaitable[object]]  # by channels


@dataclass
class _Others(Watch):
    """Measurements beside another caller with a short request every 50 ms."""

    start_bytes: float = 0.0
    longest_seconds: float = 0.0
    codes: Counter[str] = field(default_factory=Counter)


def idle(place: Place) -> tuple[Figures, list[Bar]]:
    """Open calls without a message, watches, long probes, and calls that are cancelled at once."""
    seconds = place.seconds(_HELD_SECONDS, 0.5)
    attacks: dict[str, Attack] = {
        "calls without a message": partial(_silent, place.count(_NUM_SILENT, 24), seconds),
        "watches": partial(_watch, place.count(_NUM_WATCHES, 24), seconds),
        "long probes": partial(_probe, place.count(_NUM_PROBES, 24)),
        "cancelled calls": partial(_cancel, place.count(_NUM_CANCELLED, 2 * _AT_ONCE)),
    }
    others: dict[str, _Others] = {}
    with place.serving(TINY) as server:
        asyncio.run(good_calls(server.address, 8))
        before = state(server)
        for name, attack in attacks.items():
            # A process of its own: the calls of others would wait for its event loop, too.
            process = multiprocessing.get_context("spawn").Process(target=_run, args=(server.address, attack))
            others[name] = one = _Others(start_bytes=resident_bytes(server))
            with beside(partial(watch_memory, server, one), partial(_call, server.address, one)):
                process.start()
                process.join()
            assert process.exitcode == 0, name
        after = settled(server, before)
    figures = {
        name: {
            "longest_seconds": one.longest_seconds,
            "bytes_over_start": one.peak_bytes - one.start_bytes,
            "codes": one.codes,
        }
        for name, one in others.items()
    }
    return figures, [
        *(
            at_most(f"longest call of others beside {name}, seconds", one.longest_seconds, 1, is_timed=True)
            for name, one in others.items()
        ),
        at_most(
            "memory over that at the start, MiB",
            max(one.peak_bytes - one.start_bytes for one in others.values()) / 2**20,
            256,
        ),
        unexpected(
            sum((one.codes for one in others.values()), Counter[str]()), "OK", whose="calls of others"
        ),
        *nothing_left(before, after),
    ]


def _call(address: str, others: _Others, is_over: threading.Event) -> None:
    async def one(client: AsyncClient) -> None:
        started = time.perf_counter()
        others.codes[await code_of(client.generate([5, 6, 2], options=_SHORT))] += 1
        others.longest_seconds = max(others.longest_seconds, time.perf_counter() - started)

    async def run() -> None:
        async with AsyncClient(address) as client, asyncio.TaskGroup() as tasks:
            while not is_over.is_set():
                tasks.create_task(one(client))
                await asyncio.sleep(_EVERY_SECONDS)

    asyncio.run(run())


def _run(address: str, attack: Attack) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            channels = [
                await stack.enter_async_context(aio.insecure_channel(address, options=_OWN))
                for _ in range(_NUM_CONNECTIONS)
            ]
            await attack(channels)
            await asyncio.sleep(_LEAVING_SECONDS)

    asyncio.run(run())


async def _silent(number: int, seconds: float, channels: Sequence[Any]) -> None:
    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.sleep(seconds)
        yield b""

    await _hold([channels[0].stream_unary(_GENERATE)(nothing()) for _ in range(number)], seconds)


async def _watch(number: int, seconds: float, channels: Sequence[Any]) -> None:
    streams = [channels[place % len(channels)].unary_stream(_WATCH) for place in range(number)]
    await _hold([stream(b"") for stream in streams], seconds)


async def _hold(calls: Sequence[Any], seconds: float) -> None:
    await asyncio.sleep(seconds)
    for call in calls:
        call.cancel()


async def _probe(number: int, channels: Sequence[Any]) -> None:
    call = channels[0].unary_unary(_CHECK)
    await asyncio.gather(*(call(bytes(_PROBE_BYTES)) for _ in range(number)), return_exceptions=True)


async def _cancel(number: int, channels: Sequence[Any]) -> None:
    request = pb.GenerateRequest(sources=[pb.Source(token_ids=pb.TokenIds(values=[5, 6, 2]))])
    raw, unsent = request.SerializeToString(), number
    while unsent > 0:
        calls = [channels[place % len(channels)].unary_unary(_GENERATE)(raw) for place in range(_AT_ONCE)]
        unsent -= len(calls)
        await _hold(calls, 0.001)
        await asyncio.sleep(0)
