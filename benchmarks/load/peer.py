"""CTranslate2 behind a queue, as in a service built with it: CTranslate2 itself does not include a server.

A free worker takes the waiting requests, up to the largest batch. A call of CTranslate2 has one beam size, so
greedy requests and beams cannot share a batch; the kind of the oldest waiting request is served next.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from benchmarks.load.drive import Clock, open_loop
from benchmarks.load.mix import BEAM_SIZE, Job, Mode, Outcome, poisson_arrivals

_BEAM_SIZES = {Mode.GREEDY: 1, Mode.BEAM: BEAM_SIZE}


class Translator(Protocol):
    """The interface of CTranslate2 for the queue; the package is imported only where it is measured."""

    def translate_to_lengths(
        self, sources: Sequence[Sequence[int]], lengths: Sequence[int], beam_size: int
    ) -> list[list[int]]:
        """Translate one batch; each target gets its given length."""


class PeerQueue:
    """A queue in front of one translator and its workers.

    Args:
        peer: The translator.
        num_workers: Number of batches at once, the translator's `inter_threads`.
        max_batch_size: Most requests in a batch.
    """

    def __init__(self, peer: Translator, num_workers: int, max_batch_size: int) -> None:
        self._peer = peer
        self._num_workers = num_workers
        self._max_batch_size = max_batch_size
        self._waiting = {mode: deque[tuple[Outcome, asyncio.Event]]() for mode in _BEAM_SIZES}

    def open_loop(self, jobs: Sequence[Job], rate: float) -> list[Outcome]:
        """Run `jobs` that arrive as a Poisson process of `rate` per second, like the load generator's."""
        return asyncio.run(self._open_loop(jobs, rate))

    async def _open_loop(self, jobs: Sequence[Job], rate: float) -> list[Outcome]:
        self._changed = asyncio.Condition()
        workers = [asyncio.create_task(self._work()) for _ in range(self._num_workers)]
        arrivals = zip(poisson_arrivals(rate, seed=len(jobs)), jobs, strict=False)
        outcomes = asyncio.create_task(open_loop(self._answer, arrivals))
        # A worker ends only with an error.
        await asyncio.wait({outcomes, *workers}, return_when=asyncio.FIRST_COMPLETED)
        for worker in workers:
            if worker.done():
                outcomes.cancel()
                worker.result()
            worker.cancel()
        return await outcomes

    async def _answer(self, outcome: Outcome, _now: Clock) -> None:
        is_done = asyncio.Event()
        async with self._changed:
            self._waiting[outcome.job.mode].append((outcome, is_done))
            self._changed.notify()
        await is_done.wait()

    async def _work(self) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: any(self._waiting.values()))
                filled = [queue for queue in self._waiting.values() if queue]
                queue = min(filled, key=lambda queue: queue[0][0].arrival)
                batch = [queue.popleft() for _ in range(min(len(queue), self._max_batch_size))]
            jobs = [outcome.job for outcome, _ in batch]
            targets = await asyncio.to_thread(
                self._peer.translate_to_lengths,
                [job.source_ids for job in jobs],
                [job.num_tokens for job in jobs],
                _BEAM_SIZES[jobs[0].mode],
            )
            for (outcome, is_done), target in zip(batch, targets, strict=True):
                outcome.num_tokens = len(target)
                is_done.set()
