"""A part of the reliability benchmark: texts that are slow to split, by every RPC that takes text."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from benchmarks.load.mix import ONLY_GREEDY, draw_jobs
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
from seq2seq_serve.client import AsyncClient
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb

_MAX_GAP_SECONDS = 0.5
_PROBE_SECONDS = 0.02
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


@dataclass
class _Watch:
    """The longest pauses of a continuously read stream, and of `/healthz`.

    Attributes:
        lag_seconds: The longest delay with which this process woke up; the other values may include it.
    """

    stream_seconds: float = 0.0
    probe_seconds: float = 0.0
    lag_seconds: float = 0.0
    num_failed: int = 0


def freeze(place: Place) -> tuple[Figures, list[Bar]]:
    """Send every text by every RPC, some with short deadlines; then many long ones at once, and SIGTERM."""
    units = _UNITS[: place.count(len(_UNITS), 3)]
    num_many = place.count(_MANY, 20)
    with (
        place.serving(TINY) as server,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as callers,
    ):
        before = state(server)
        watched = partial(_watched, server, callers)
        idle = asyncio.run(watched(partial(time.sleep, place.seconds(5))))[0]
        hard, codes = asyncio.run(watched(partial(_by_client, server.address, partial(_attack, units=units))))
        many, many_codes = asyncio.run(
            watched(partial(_by_client, server.address, partial(_crowd, number=num_many)))
        )
        after = settled(server, before)
        end_seconds, code, ended = asyncio.run(_end_under(server, num_many))
    watches = {"idle": idle, "hard": hard, "many": many}
    figures: Figures = {
        "codes": codes + many_codes,
        "ended": ended,
        "stream_seconds": {name: watch.stream_seconds for name, watch in watches.items()},
        "probe_seconds": {name: watch.probe_seconds for name, watch in watches.items()},
        "lag_seconds": {name: watch.lag_seconds for name, watch in watches.items()},
    }
    num_failed = sum(watch.num_failed for watch in watches.values())
    return figures, [
        *(
            bar
            for name, watch in (("each hard text", hard), (f"{num_many} of the longest", many))
            for bar in (
                at_most(
                    f"longest gap of a stream, {name}", watch.stream_seconds, _MAX_GAP_SECONDS, is_timed=True
                ),
                at_most(
                    f"longest wait for /healthz, {name}",
                    watch.probe_seconds,
                    _MAX_GAP_SECONDS,
                    is_timed=True,
                ),
            )
        ),
        at_most("streams and probes that failed", num_failed, 0),
        unexpected(codes + many_codes, *_EXPECTED),
        at_least("texts that were answered or refused", codes.total(), len(units)),
        unexpected(ended, *_EXPECTED, "UNAVAILABLE", whose="calls at SIGTERM"),
        at_most("exit code after SIGTERM", code, 0),
        at_most("seconds from SIGTERM to the exit", end_seconds, 5, is_timed=True),
        *nothing_left(before, after),
    ]


async def _watched(
    server: RunningServer, callers: ProcessPoolExecutor, work: Callable[[], Any]
) -> tuple[_Watch, Any]:
    """Run `work` in the callers' process; returns the waiting times of others meanwhile, and its result."""
    watch, is_over = _Watch(), asyncio.Event()

    async def read() -> None:
        draws = (job for seed in count() for job in draw_jobs(8, ONLY_GREEDY, seed=seed))
        async with AsyncClient(server.address, timeout_seconds=PATIENT_SECONDS) as client:
            last = time.perf_counter()
            while not is_over.is_set():
                job = next(draws)
                try:
                    async for _ in client.stream(job.source_ids, options=job.options()):
                        now = time.perf_counter()
                        watch.stream_seconds, last = max(watch.stream_seconds, now - last), now
                except Exception:
                    watch.num_failed += 1

    def ask() -> None:
        with urllib.request.urlopen(f"{server.metrics_url}/healthz", timeout=PATIENT_SECONDS):
            pass

    async def probe() -> None:
        while not is_over.is_set():
            begun = time.perf_counter()
            try:
                await asyncio.to_thread(ask)
            except OSError:
                watch.num_failed += 1
            ended = time.perf_counter()
            watch.probe_seconds = max(watch.probe_seconds, ended - begun)
            await asyncio.sleep(_PROBE_SECONDS)
            lag_seconds = time.perf_counter() - ended - _PROBE_SECONDS
            watch.lag_seconds = max(watch.lag_seconds, lag_seconds)

    watching = asyncio.gather(read(), probe())
    try:
        return watch, await asyncio.get_running_loop().run_in_executor(callers, work)
    finally:
        is_over.set()
        await watching


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
