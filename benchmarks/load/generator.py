"""The load generator: asyncio clients of the real gRPC API, in a separate process.

Callers use `Generator`. Each run reports the processor time of its process and the lateness of its requests,
so that a reader can see whether the generator was the bottleneck.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Self

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
        return self._pool.submit(_run, _closed_loop, address, jobs, stream, float(in_flight)).result()

    def open_loop(self, address: str, jobs: list[Job], *, rate: float, stream: bool) -> Run:
        """Send `jobs` as a Poisson process of `rate` per second, without waiting for answers."""
        return self._pool.submit(_run, _open_loop, address, jobs, stream, rate).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()


class _Caller:
    """Makes calls, and records the outcome of each."""

    def __init__(self, client: AsyncClient, stream: bool) -> None:
        self._client = client
        self._call = self._stream if stream else self._unary
        self._started = time.perf_counter()
        self.outcomes: list[Outcome] = []

    def now(self) -> float:
        return time.perf_counter() - self._started

    async def call(self, job: Job, arrival: float) -> None:
        outcome = Outcome(job, arrival, sent=self.now())
        self.outcomes.append(outcome)
        try:
            await self._call(job, outcome)
        except ClientError as error:
            outcome.code, outcome.retry_after_seconds = error.code, error.retry_after_seconds
        outcome.end = self.now()

    async def _unary(self, job: Job, outcome: Outcome) -> None:
        answer = await self._client.generate(job.source_ids, options=job.options())
        outcome.num_tokens = len(answer.hypotheses[0].token_ids)
        outcome.queue_seconds = answer.timings.queue_seconds
        outcome.first_token_seconds = answer.timings.first_token_seconds

    async def _stream(self, job: Job, outcome: Outcome) -> None:
        times = []
        async for event in self._client.stream(job.source_ids, options=job.options()):
            if event.WhichOneof("event") == "piece":
                times.append(self.now())
            else:
                outcome.num_tokens = len(event.result.hypotheses[0].token_ids)
        outcome.first = times[0] if times else self.now()  # a target that ends at once has no pieces
        outcome.gaps = tuple(after - before for before, after in pairwise(times))


_Loop = Callable[[_Caller, list[Job], float], Awaitable[None]]


async def _closed_loop(caller: _Caller, jobs: list[Job], in_flight: float) -> None:
    waiting = iter(jobs)

    async def worker() -> None:
        for job in waiting:
            await caller.call(job, caller.now())

    await asyncio.gather(*(worker() for _ in range(int(in_flight))))


async def _open_loop(caller: _Caller, jobs: list[Job], rate: float) -> None:
    async with asyncio.TaskGroup() as group:
        for job, arrival in zip(jobs, poisson_arrivals(rate, seed=jobs[0].seed), strict=False):
            await asyncio.sleep(arrival - caller.now())
            group.create_task(caller.call(job, arrival))


def _settle(cores: Sequence[int]) -> None:
    os.sched_setaffinity(0, cores)
    gc.collect()
    gc.freeze()  # otherwise the collector scans all imported objects while answers wait


def _run(loop: _Loop, address: str, jobs: list[Job], stream: bool, load: float) -> Run:
    return asyncio.run(_measure(loop, address, jobs, stream, load))


async def _measure(loop: _Loop, address: str, jobs: list[Job], stream: bool, load: float) -> Run:
    async with AsyncClient(address, timeout_seconds=_TIMEOUT_SECONDS) as client:
        await client.health()  # connects before the clock starts
        caller, cpu_before, lags = _Caller(client, stream), time.process_time(), list[float]()
        watching = asyncio.create_task(_watch_lag(lags))
        await loop(caller, jobs, load)
        cpu_share = (time.process_time() - cpu_before) / caller.now()
        watching.cancel()
    lateness = [outcome.sent - outcome.arrival for outcome in caller.outcomes]
    return Run(caller.outcomes, cpu_share, quantile(lateness, 0.99), quantile(lags, 0.99))


async def _watch_lag(lags: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(_LAG_SECONDS)
        lags.append(time.perf_counter() - before - _LAG_SECONDS)
