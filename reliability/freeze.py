"""A part of the reliability benchmark: texts that are slow to split, by every RPC that takes text."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import count
from typing import Any

from benchmarks.serving import RunningServer
from reliability.callers import PATIENT_SECONDS, code_of
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
from reliability.watch import Watch, watched
from seq2seq_serve.client import AsyncClient
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb

_MAX_GAP_SECONDS = 0.5
_LONG_BYTES, _SHORT_BYTES = 262_144, 16_384  # limits for 256 tokens: split or truncated texts, others
_AT_ONCE, _MANY = 8, 200
_CROWD_SECONDS = 1.0  # time in which all calls of a crowd have arrived
_HURRIED_SECONDS = 0.3  # the deadline of every fourth caller
_EXPECTED = ("OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED")

# Each is repeated up to the limit: unclosed quotation marks and parentheses, many ends of sentences, endless
# words, and the characters for which normalising, merging or skipping takes longest.
_UNITS = (
    "« ",
    "“ a. ",
    "( ",
    "가。",
    "Mr. ",
    "a",
    "the ",
    "가 ",
    "\n",
    "\u200b",
    "a\t",
    "\u0301\u0323",
    "\u1112\u1161\u11ab",
    "\ufdfa",
    "👨\u200d",
)

_Call = Callable[[AsyncClient, str, float], Awaitable[Any]]


def freeze(place: Place) -> tuple[Figures, list[Bar]]:
    """Send every text by every RPC, some with short deadlines; then many long ones at once, and SIGTERM."""
    units = _UNITS[: place.count(len(_UNITS), 3)]
    num_many = place.count(_MANY, 20)
    with (
        place.serving(TINY) as server,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as callers,
    ):
        before = state(server)
        attacks = {
            "each hard text": partial(_attack, units=units),
            f"{num_many} of the longest": partial(_crowd, number=num_many),
        }
        watches: dict[str, Watch] = {}
        codes: dict[str, Counter[str]] = {}
        for name, attack in attacks.items():
            with watched(server) as watches[name]:
                codes[name] = callers.submit(_by_client, server.address, attack).result()
        after = settled(server, before)
        end_seconds, code, ended = asyncio.run(_end_under(server, num_many))
    all_codes = sum(codes.values(), Counter[str]())
    figures: Figures = {
        "codes": all_codes,
        "ended": ended,
        "stream_seconds": {name: watch.stream_gap_seconds for name, watch in watches.items()},
        "probe_seconds": {name: watch.probe_seconds for name, watch in watches.items()},
    }
    return figures, [
        *(bar for name, watch in watches.items() for bar in watch.bars(_MAX_GAP_SECONDS, name)),
        unexpected(all_codes, *_EXPECTED),
        at_least("texts that were answered or refused", codes["each hard text"].total(), len(units)),
        unexpected(ended, *_EXPECTED, "UNAVAILABLE", whose="calls at SIGTERM"),
        at_most("exit code after SIGTERM", code, 0),
        at_most("seconds from SIGTERM to the exit", end_seconds, 5, is_timed=True),
        *nothing_left(before, after),
    ]


def _text(unit: str, num_bytes: int) -> str:
    return (unit * num_bytes).encode()[:num_bytes].decode(errors="ignore")


def _with(num_bytes: int, **options: Any) -> _Call:
    def call(client: AsyncClient, unit: str, seconds: float) -> Awaitable[Any]:
        text = _text(unit, num_bytes)
        return client.generate(text, options=pb.GenerateOptions(**options), timeout_seconds=seconds)

    return call


def _prefixed(client: AsyncClient, unit: str, seconds: float) -> Awaitable[Any]:
    options = pb.GenerateOptions(target_prefix=pb.Target(text=_text(unit, _SHORT_BYTES)))
    return client.generate("a", options=options, timeout_seconds=seconds)


def _scored(client: AsyncClient, unit: str, seconds: float) -> Awaitable[Any]:
    text = _text(unit, _SHORT_BYTES)
    return client.score(text, text, timeout_seconds=seconds)


_WAYS: tuple[_Call, ...] = (
    _with(_LONG_BYTES, long_source=pb.LONG_SOURCE_SPLIT),
    _with(_LONG_BYTES, long_source=pb.LONG_SOURCE_SPLIT_ALWAYS),
    _with(_LONG_BYTES, long_source=pb.LONG_SOURCE_TRUNCATE, max_new_tokens=1),
    _with(_SHORT_BYTES),
    _prefixed,
    _scored,
)


def _by_client(address: str, work: Callable[[AsyncClient], Awaitable[Counter[str]]]) -> Counter[str]:
    """Run `work` with its own client; returns its result."""

    async def run() -> Counter[str]:
        async with AsyncClient(address, timeout_seconds=PATIENT_SECONDS) as client:
            return await work(client)

    return asyncio.run(run())


async def _attack(client: AsyncClient, units: tuple[str, ...]) -> Counter[str]:
    """Send every text by every RPC; returns the number of calls by status."""
    codes, calls = Counter[str](), [(unit, way) for unit in units for way in _WAYS]
    numbers = count()

    async def worker() -> None:
        while calls:
            unit, way = calls.pop()
            seconds = _HURRIED_SECONDS if next(numbers) % 4 == 3 else PATIENT_SECONDS
            codes[await code_of(way(client, unit, seconds))] += 1

    await asyncio.gather(*(worker() for _ in range(_AT_ONCE)))
    return codes


async def _crowd(client: AsyncClient, number: int) -> Counter[str]:
    """Send `number` of the longest texts at once; returns the number of calls by status."""
    longest = _WAYS[2]
    calls = (code_of(longest(client, "the ", PATIENT_SECONDS)) for _ in range(number))
    return Counter(await asyncio.gather(*calls))


async def _end_under(server: RunningServer, number: int) -> tuple[float, int, Counter[str]]:
    """Terminate the server while a crowd waits; returns seconds to the exit, exit code, calls by status."""
    async with AsyncClient(server.address, timeout_seconds=PATIENT_SECONDS) as client:
        crowd = asyncio.create_task(_crowd(client, number))
        await asyncio.sleep(_CROWD_SECONDS)
        begun = time.monotonic()
        server.process.terminate()
        code = await asyncio.to_thread(server.wait)
        seconds = time.monotonic() - begun
        return seconds, code, await crowd
