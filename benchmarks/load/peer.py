"""CTranslate2 behind a queue, as in a service built with it: CTranslate2 itself does not include a server.

A free worker takes the waiting requests, up to the largest batch. A call of CTranslate2 has one beam size, so
greedy requests and beams cannot share a batch; the kind of the oldest waiting request is served next.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

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
        self._waiting: dict[Mode, deque[Outcome]] = {mode: deque() for mode in _BEAM_SIZES}
        self._changed = threading.Condition()
        self._is_over = False
        self._started = 0.0

    def open_loop(self, jobs: list[Job], rate: float) -> list[Outcome]:
        """Run `jobs` that arrive as a Poisson process of `rate` per second, like the load generator's."""
        outcomes = []
        self._is_over, self._started = False, time.perf_counter()
        with ThreadPoolExecutor(self._num_workers) as pool:
            workers = [pool.submit(self._work) for _ in range(self._num_workers)]
            for job, arrival in zip(jobs, poisson_arrivals(rate, seed=len(jobs)), strict=False):
                time.sleep(max(arrival - self._now(), 0.0))
                outcomes.append(Outcome(job, arrival, sent=self._now()))
                with self._changed:
                    self._waiting[job.mode].append(outcomes[-1])
                    self._changed.notify()
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
            for worker in workers:
                worker.result()
        return outcomes

    def _work(self) -> None:
        while batch := self._take():
            jobs = [outcome.job for outcome in batch]
            targets = self._peer.translate_to_lengths(
                [job.source_ids for job in jobs],
                [job.num_tokens for job in jobs],
                _BEAM_SIZES[jobs[0].mode],
            )
            for outcome, target in zip(batch, targets, strict=True):
                outcome.end = self._now()
                outcome.num_tokens = len(target)

    def _take(self) -> list[Outcome]:
        """Wait for the next batch; returns an empty one when no more requests will arrive."""
        with self._changed:
            while not any(self._waiting.values()):
                if self._is_over:
                    return []
                self._changed.wait()
            filled = [queue for queue in self._waiting.values() if queue]
            queue = min(filled, key=lambda queue: queue[0].arrival)
            return [queue.popleft() for _ in range(min(len(queue), self._max_batch_size))]

    def _now(self) -> float:
        return time.perf_counter() - self._started
