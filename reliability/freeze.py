"""A part of the reliability benchmark: texts that are slow to split, by every RPC that takes text."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from benchmarks.serving import RunningServer
from reliability.callers import PATIENT_SECONDS, code_of
from reliability.place import TINY, Figures, Place
from seq2seq_serve.client import AsyncClient
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb

_MAX_GAP_SECONDS = 0.5
_STREAM_TOKENS = 200
_LONG_BYTES, _SHORT_BYTES = 262_144, 16_384  # limits for 256 tokens: split or truncated texts, others
_AT_ONCE, _MANY = 8, 200
_CROWD_SECONDS = 1.0  # time in which all calls of a crowd have arrived
_HURRIED_SECONDS = 0.3  # the deadline of every fourth caller
_EXPECTED = ("OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED")

# Each is repeated up to the limit: unclosed quotation marks and parentheses, many ends of sentences, endless
# words, and the characters for which normalising, merging or skipping takes longest.
_UNITS = ("« ", "“ a. ", "( ", "가。", "Mr. ", "a", "the ", "가 ", "\n", "\u200b", "a\t")
_UNITS += ("\u0301\u0323", "\u1112\u1161\u11ab", "\ufdfa", "👨\u200d")

_Call = Callable[[AsyncClient, str, float], Awaitable[Any]]


@dataclass
class _Watch:
    """Measurements of other callers.

    Attributes:
        stream_gap_seconds: The longest time between two pieces, also of two streams that follow each other.
        probe_seconds: The longest time to an answer of `/healthz`.
        num_failed: The number of streams and probes that failed.
    """

    stream_gap_seconds: float = 0.0
    probe_seconds: float = 0.0
    num_failed: int = 0


def freeze(place: Place) -> Figures:
    """Send every text by every RPC, some with short deadlines; then many long ones at once, and SIGTERM."""
    units, num_many = _UNITS[: place.count(len(_UNITS), 3)], place.count(_MANY, 20)
    attacks = {
        "each hard text": partial(_attack, units=units),
        f"{num_many} of the longest": partial(_crowd, number=num_many),
    }
    codes, figures = Counter[str](), dict[str, Any]()
    spawn = multiprocessing.get_context("spawn")
    with place.serving(TINY) as server, ProcessPoolExecutor(1, spawn) as callers:
        with place.checked(server):
            for name, attack in attacks.items():
                with _watched(server) as watch:
                    found = callers.submit(_by_client, server.address, attack).result()
                codes += found
                figures[name] = {"codes": found, "watch": vars(watch)}
                gap, probe = watch.stream_gap_seconds, watch.probe_seconds
                place.at_most(f"longest gap of a stream, {name}", gap, _MAX_GAP_SECONDS, is_timed=True)
                place.at_most(f"longest wait for /healthz, {name}", probe, _MAX_GAP_SECONDS, is_timed=True)
                place.at_most(f"streams and probes that failed, {name}", watch.num_failed, 0)
        end_seconds, exit_code, ended = asyncio.run(_end_under(server, num_many))
    place.expect(codes, *_EXPECTED)
    place.expect(ended, *_EXPECTED, "UNAVAILABLE", whose="calls at SIGTERM")
    place.at_most("exit code after SIGTERM", abs(exit_code), 0)
    place.at_most("seconds from SIGTERM to the exit", end_seconds, 5, is_timed=True)
    return figures | {"ended": ended}


@contextmanager
def _watched(server: RunningServer) -> Iterator[_Watch]:
    """Measure consecutive streams, and probes, each in its own thread."""
    watch, is_over = _Watch(), threading.Event()

    def probes() -> None:
        while not is_over.wait(0.02):
            started = time.perf_counter()
            try:
                with urllib.request.urlopen(f"{server.metrics_url}/healthz", timeout=30):
                    pass
            except OSError:
                watch.num_failed += 1
            watch.probe_seconds = max(watch.probe_seconds, time.perf_counter() - started)

    async def streams() -> None:
        options, last = pb.GenerateOptions(min_new_tokens=_STREAM_TOKENS), math.inf
        async with AsyncClient(server.address) as client:
            while not is_over.is_set():
                try:
                    async for _ in client.stream([5, 6, 7], options=options):
                        now = time.perf_counter()
                        watch.stream_gap_seconds, last = max(watch.stream_gap_seconds, now - last), now
                except Exception:
                    watch.num_failed += 1

    with ThreadPoolExecutor(2) as pool:
        watching = [pool.submit(probes), pool.submit(lambda: asyncio.run(streams()))]
        try:
            yield watch
        finally:
            is_over.set()
    for one in watching:
        one.result()


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


_LONGEST = _with(_LONG_BYTES, long_source=pb.LONG_SOURCE_TRUNCATE, max_new_tokens=1)
_WAYS: tuple[_Call, ...] = (
    _with(_LONG_BYTES, long_source=pb.LONG_SOURCE_SPLIT),
    _with(_LONG_BYTES, long_source=pb.LONG_SOURCE_SPLIT_ALWAYS),
    _LONGEST,
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
    codes, calls, numbers = Counter[str](), [(unit, way) for unit in units for way in _WAYS], count()

    async def worker() -> None:
        while calls:
            unit, way = calls.pop()
            seconds = _HURRIED_SECONDS if next(numbers) % 4 == 3 else PATIENT_SECONDS
            codes[await code_of(way(client, unit, seconds))] += 1

    await asyncio.gather(*(worker() for _ in range(_AT_ONCE)))
    return codes


async def _crowd(client: AsyncClient, number: int) -> Counter[str]:
    """Send `number` of the longest texts at once; returns the number of calls by status."""
    calls = (code_of(_LONGEST(client, "the ", PATIENT_SECONDS)) for _ in range(number))
    return Counter(await asyncio.gather(*calls))


async def _end_under(server: RunningServer, number: int) -> tuple[float, int, Counter[str]]:
    """Terminate the server while a crowd waits; returns seconds to the exit, exit code, calls by status."""
    async with AsyncClient(server.address, timeout_seconds=PATIENT_SECONDS) as client:
        crowd = asyncio.create_task(_crowd(client, number))
        await asyncio.sleep(_CROWD_SECONDS)
        begun = time.monotonic()
        server.process.terminate()
        exit_code = await asyncio.to_thread(server.wait)
        return time.monotonic() - begun, exit_code, await crowd
