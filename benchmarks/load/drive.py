"""Closed and open loops over anything that answers jobs: a server, the engine without gRPC, a model.

An answer is a coroutine function that fills an outcome's fields. It runs on the driver's event loop, whose
clock may be a virtual one. Times are seconds since the loop began.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from benchmarks.load.mix import Job, Outcome

Clock = Callable[[], float]
Answer = Callable[[Outcome, Clock], Awaitable[None]]


class _Caller:
    """Makes calls, and records the outcome of each in the order of sending."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._time = asyncio.get_running_loop().time
        self._began = self._time()
        self.outcomes: list[Outcome] = []

    def now(self) -> float:
        return self._time() - self._began

    async def call(self, job: Job, arrival: float) -> None:
        outcome = Outcome(job, arrival, sent=self.now())
        self.outcomes.append(outcome)
        await self._answer(outcome, self.now)
        outcome.end = self.now()


async def closed_loop(answer: Answer, jobs: Iterable[Job], in_flight: int) -> list[Outcome]:
    """Send jobs with `in_flight` of them unanswered at any time; returns their outcomes in order."""
    caller, waiting = _Caller(answer), iter(jobs)

    async def work() -> None:
        for job in waiting:
            await caller.call(job, caller.now())

    await asyncio.gather(*(work() for _ in range(in_flight)))
    return caller.outcomes


async def open_loop(answer: Answer, arrivals: Iterable[tuple[float, Job]]) -> list[Outcome]:
    """Send jobs at their times, without waiting for answers; returns their outcomes in order."""
    caller = _Caller(answer)
    async with asyncio.TaskGroup() as group:
        for arrival, job in arrivals:
            await asyncio.sleep(arrival - caller.now())
            group.create_task(caller.call(job, arrival))
    return caller.outcomes
