"""The load generator: asyncio clients of the real gRPC API, in a separate process.

Callers use `Generator`. Each run reports the processor time of its process and the lateness of its requests,
so that a reader can see whether the generator was the bottleneck.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import selectors
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import TracebackType
from typing import Any, Self

from benchmarks.load import drive
from benchmarks.load.mix import Job, Outcome, poisson_arrivals, quantile
from seq2seq_serve.client import AsyncClient, ClientError

_TIMEOUT_SECONDS = 120.0
_LAG_SECONDS = 0.01  # interval at which the lag of the event loop is measured


@dataclass(frozen=True)
class Run:
    """Measurements of one run of the generator.

    Attributes:
        cpu_share: Processor time of the generator's process, as a share of one core.
        lateness_seconds: p99 of the time between the due time of a request and its sending.
        lag_seconds: p99 of the delay with which the generator's event loop woke up. A measured latency may
            include this delay.
    """

    outcomes: list[Outcome]
    cpu_share: float
    lateness_seconds: float
    lag_seconds: float


class Generator:
    """A process that generates load, pinned to its cores; a context manager.

    Args:
        cores: CPU numbers of the process.
    """

    def __init__(self, cores: Sequence[int]) -> None:
        self._pool = ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), initializer=_settle, initargs=(cores,)
        )

    def closed_loop(self, address: str, jobs: list[Job], *, in_flight: int, stream: bool) -> Run:
        """Send `jobs`, with `in_flight` of them unanswered at any time."""
        loop = partial(drive.closed_loop, jobs=jobs, in_flight=in_flight)
        return self._pool.submit(_run, loop, address, stream).result()

    def open_loop(self, address: str, jobs: list[Job], *, rate: float, stream: bool) -> Run:
        """Send `jobs` as a Poisson process of `rate` per second, without waiting for answers."""
        arrivals = list(zip(poisson_arrivals(rate, seed=jobs[0].seed), jobs, strict=False))
        loop = partial(drive.open_loop, arrivals=arrivals)
        return self._pool.submit(_run, loop, address, stream).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()


async def _answer(client: AsyncClient, stream: bool, outcome: Outcome, now: drive.Clock) -> None:
    """Call the server with the job of an outcome."""
    job = outcome.job
    try:
        if not stream:
            answer = await client.generate(job.source_ids, options=job.options())
            outcome.num_tokens = len(answer.hypotheses[0].token_ids)
            outcome.queue_seconds = answer.timings.queue_seconds
            outcome.first_token_seconds = answer.timings.first_token_seconds
            return
        times = []
        async for event in client.stream(job.source_ids, options=job.options()):
            if event.WhichOneof("event") == "piece":
                times += [now()] * len(event.piece.token_ids)
            else:
                outcome.num_tokens = len(event.result.hypotheses[0].token_ids)
        # The server sends no piece of an empty target, so its end counts as its first token.
        outcome.first = times[0] if times else now()
        outcome.gaps = tuple(after - before for before, after in pairwise(times))
    except ClientError as error:
        outcome.code, outcome.retry_after_seconds = error.code, error.retry_after_seconds


def _settle(cores: Sequence[int]) -> None:
    os.sched_setaffinity(0, cores)
    gc.collect()
    gc.freeze()  # otherwise the collector scans all imported objects while answers wait


def _run(loop: Callable[..., Coroutine[Any, Any, list[Outcome]]], address: str, stream: bool) -> Run:
    with asyncio.Runner(loop_factory=precise_loop) as runner:
        return runner.run(_measure(loop, address, stream))


def precise_loop() -> asyncio.AbstractEventLoop:
    """Returns a loop whose timers are not rounded up to milliseconds, as those of epoll are."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


async def _measure(
    loop: Callable[..., Coroutine[Any, Any, list[Outcome]]], address: str, stream: bool
) -> Run:
    async with AsyncClient(address, timeout_seconds=_TIMEOUT_SECONDS) as client:
        await client.health()  # connects before the clock starts
        cpu_before, began, lags = time.process_time(), time.perf_counter(), list[float]()
        watching = asyncio.create_task(_watch_lag(lags))
        outcomes = await loop(partial(_answer, client, stream))
        cpu_share = (time.process_time() - cpu_before) / (time.perf_counter() - began)
        watching.cancel()
    lateness = [outcome.sent - outcome.arrival for outcome in outcomes]
    return Run(outcomes, cpu_share, quantile(lateness, 0.99), quantile(lags, 0.99))


async def _watch_lag(lags: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(_LAG_SECONDS)
        lags.append(time.perf_counter() - before - _LAG_SECONDS)
