"""The load generator: asyncio clients of the real gRPC API, in a process of their own.

Its functions are called through `Generator`, and say of themselves how busy their process was and how late
they sent, so that a reader can see who was the bottleneck.
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

from benchmarks.load_mix import Job, Outcome, poisson_arrivals, quantile
from client import AsyncClient, ClientError

_TIMEOUT_SECONDS = 120.0
_LAG_SECONDS = 0.01  # how often the event loop is asked whether it is on time


@dataclass(frozen=True)
class Run:
    """What one run of the generator saw.

    Attributes:
        cpu_share: Of one core, that the generator's process used.
        lateness_seconds: By which 99 % of the requests were sent after they were due, or earlier.
        lag_seconds: By which the generator's event loop woke up late, at p99: as much of any latency may be
            the generator's own.
    """

    outcomes: list[Outcome]
    cpu_share: float
    lateness_seconds: float
    lag_seconds: float


class Generator:
    """A process that makes load, pinned to its cores; used as a context manager.

    Args:
        cores: CPUs of the process.
    """

    def __init__(self, cores: Sequence[int]) -> None:
        self._pool = ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), initializer=_settle, initargs=(cores,)
        )

    def closed_loop(self, address: str, jobs: list[Job], *, in_flight: int, stream: bool) -> Run:
        """Send `jobs`, so many at once that `in_flight` are always unanswered."""
        return self._pool.submit(_run, _closed_loop, address, jobs, stream, float(in_flight)).result()

    def open_loop(self, address: str, jobs: list[Job], *, rate: float, stream: bool) -> Run:
        """Send `jobs` as a Poisson process of `rate` a second, whatever is answered."""
        return self._pool.submit(_run, _open_loop, address, jobs, stream, rate).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()


class _Caller:
    """Makes one call after another, and notes what became of each."""

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

    async def _stream(self, job: Job, outcome: Outcome) -> None:
        times = []
        async for event in self._client.stream(job.source_ids, options=job.options()):
            if event.WhichOneof("event") == "piece":
                times.append(self.now())
            else:
                outcome.num_tokens = len(event.result.hypotheses[0].token_ids)
        outcome.first = times[0]
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
    gc.freeze()  # else the collector looks through everything that was imported, while answers wait


def _run(loop: _Loop, address: str, jobs: list[Job], stream: bool, load: float) -> Run:
    return asyncio.run(_measure(loop, address, jobs, stream, load))


async def _measure(loop: _Loop, address: str, jobs: list[Job], stream: bool, load: float) -> Run:
    async with AsyncClient(address, timeout_seconds=_TIMEOUT_SECONDS) as client:
        await client.health()  # connected before the clock runs
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
