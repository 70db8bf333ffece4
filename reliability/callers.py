"""Callers of the reliability benchmark: the status of one call, and loops of many calls."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from benchmarks.load.mix import MIX, Job, draw_jobs
from seq2seq_serve.client import AsyncClient, ClientError

PATIENT_SECONDS = 120.0
_IN_FLIGHT, _FEW = 64, 8


async def code_of(call: Awaitable[Any]) -> str:
    """Wait for a call; returns its status."""
    try:
        await call
    except ClientError as error:
        return error.code
    return "OK"


async def stream(client: AsyncClient, job: Job, timeout_seconds: float = PATIENT_SECONDS) -> None:
    """Read one stream to its end; the client never retries a stream by itself.

    Raises:
        ClientError: The stream fails.
    """
    async for _ in client.stream(job.source_ids, options=job.options(), timeout_seconds=timeout_seconds):
        pass


def endless_jobs(seed: int) -> Callable[[], Job]:
    """Returns a function that draws one job after the other."""
    seeds = random.Random(seed)
    return lambda: draw_jobs(1, MIX, seed=seeds.getrandbits(30))[0]


async def capacity(address: str, seconds: float) -> float:
    """Measure the requests per second of a closed loop that is always full; one at least is answered."""
    draw, done = endless_jobs(1), 0
    end = time.monotonic() + seconds

    async def worker(client: AsyncClient) -> None:
        nonlocal done
        while time.monotonic() < end:
            job = draw()
            try:
                await client.generate(job.source_ids, options=job.options())
                done += time.monotonic() < end
            except ClientError as error:  # happens only if the queue is too short for all of them
                if error.retry_after_seconds is None:
                    raise
                await asyncio.sleep(error.retry_after_seconds)

    async with AsyncClient(address, timeout_seconds=PATIENT_SECONDS) as client:
        await asyncio.gather(*(worker(client) for _ in range(_IN_FLIGHT)))
    return max(done, 1) / seconds


@asynccontextmanager
async def under_load(address: str, in_flight: int, seed: int) -> AsyncIterator[Counter[str]]:
    """Keep `in_flight` streams open while the block runs; when one ends, another starts.

    Yields:
        The statuses of the ended streams so far; complete after the block.
    """
    draw, codes, is_over = endless_jobs(seed), Counter[str](), asyncio.Event()

    async def worker(client: AsyncClient) -> None:
        while not is_over.is_set():
            codes[await code_of(stream(client, draw()))] += 1

    async with AsyncClient(address) as client:
        workers = [asyncio.create_task(worker(client)) for _ in range(in_flight)]
        try:
            yield codes
        finally:
            is_over.set()
            await asyncio.gather(*workers)


async def good_calls(address: str, number: int) -> Counter[str]:
    """Make valid calls, a few at a time; returns their statuses."""
    draw, codes, numbers = endless_jobs(8), Counter[str](), count()

    async def worker(client: AsyncClient) -> None:
        while next(numbers) < number:
            codes[await code_of(stream(client, draw()))] += 1

    async with AsyncClient(address) as client:
        await asyncio.gather(*(worker(client) for _ in range(_FEW)))
    return codes
