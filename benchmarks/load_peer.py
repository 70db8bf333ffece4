"""CTranslate2 behind a queue, as a service over it is built: it has no server of its own.

Whoever is free takes what waits, up to the largest batch. One call has one beam size, so greedy requests and
beams cannot share a batch: the oldest request decides which of them come next.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from benchmarks.load_mix import BEAM_SIZE, Job, Mode, Outcome, poisson_arrivals

_BEAM_SIZES = {Mode.GREEDY: 1, Mode.BEAM: BEAM_SIZE}


class Translator(Protocol):
    """What the queue needs of CTranslate2, which is imported only where it is measured."""

    def translate_to_lengths(
        self, sources: Sequence[Sequence[int]], lengths: Sequence[int], beam_size: int
    ) -> list[list[int]]:
        """One batch, each target as long as its length says."""


class PeerQueue:
    """One translator with its workers.

    Args:
        peer: The translator.
        num_workers: Its `inter_threads`: batches at once.
        max_batch_size: Requests.
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
        """Take `jobs` in as a Poisson process of `rate` a second, the same one as the load generator's."""
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
        """The next batch; empty when no more will come."""
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
