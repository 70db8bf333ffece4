"""Runs the engine without gRPC; jobs are submitted one by one or in whole batches."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.load.mix import BEAM_SIZE, Job, Mode, Outcome
from seq2seq_serve.bundle.manifest import load_bundle
from seq2seq_serve.bundle.names import SOURCE_IDS
from seq2seq_serve.server.config import RunnerConfig
from seq2seq_serve.server.engine.core import Admit, Core
from seq2seq_serve.server.engine.request import Beam, Request, Sampling
from seq2seq_serve.server.engine.result import Turn
from seq2seq_serve.server.models.loading import LIMITS
from seq2seq_serve.server.runner.runner import OnnxRunner


class InProcessEngine:
    """An engine driven from one thread: the speed that a server would reach if gRPC were free.

    Args:
        bundle: Folder of a bundle.
        config: The server's configuration of the runner.

    Attributes:
        totals: Turns and admissions, and the seconds of steps and encode calls, since it was cleared.
    """

    def __init__(self, bundle: Path, config: RunnerConfig) -> None:
        runner = OnnxRunner(load_bundle(bundle), config)
        self.totals: dict[str, float] = defaultdict(float)
        self._core = Core(
            runner, model_name="benchmark", deliver=self._deliver, limits=LIMITS[runner.provider]
        )
        self._core.start()
        self._loop: _Loop | None = None

    def closed_loop(self, jobs: list[Job], in_flight: int) -> list[Outcome]:
        """Keep `in_flight` jobs in the engine: when one ends, the next one is submitted."""
        return self._run(_Loop(jobs, in_flight, by_batch=False))

    def static_batches(self, jobs: list[Job], batch_size: int, *, is_padded: bool) -> list[Outcome]:
        """Submit each batch after the previous one has ended completely.

        Args:
            jobs: The jobs of all batches; their number is a multiple of `batch_size`.
            batch_size: Number of requests in a batch.
            is_padded: Whether every row is decoded to the longest target of its batch, as in a batch of fixed
                shape. Otherwise, a row leaves the batch when it ends.
        """
        assert len(jobs) % batch_size == 0
        if not is_padded:
            return self._run(_Loop(jobs, batch_size, by_batch=True))
        batches = [jobs[i : i + batch_size] for i in range(0, len(jobs), batch_size)]
        padded = [
            dataclasses.replace(job, num_tokens=max(one.num_tokens for one in batch))
            for batch in batches
            for job in batch
        ]
        outcomes = self._run(_Loop(padded, batch_size, by_batch=True))
        lengths = {id(one): job.num_tokens for one, job in zip(padded, jobs, strict=True)}
        for outcome in outcomes:  # tokens beyond a job's own length do not count
            outcome.num_tokens = min(outcome.num_tokens, lengths[id(outcome.job)])
        return outcomes

    def stop(self) -> None:
        """End the engine's thread."""
        self._core.stop()

    def _run(self, loop: _Loop) -> list[Outcome]:
        self._loop = loop
        self._core.send(Admit(tuple(loop.next_requests())))
        loop.done.wait()
        return list(loop.outcomes.values())

    def _deliver(self, turn: Turn) -> None:
        loop = self._loop
        assert loop is not None
        for name, number in (
            ("turns", 1),
            ("encodes", bool(turn.queue_seconds)),
            ("step_seconds", turn.step_seconds),
            ("encode_seconds", turn.encode_seconds),
            ("moved_bytes", turn.moved_bytes),
        ):
            self.totals[name] += number
        loop.note(turn)
        self._core.send(Admit(tuple(loop.next_requests())))


class _Loop:
    """The state of one run; after the first requests, only the engine's thread uses it."""

    def __init__(self, jobs: list[Job], in_flight: int, *, by_batch: bool) -> None:
        self._jobs = iter(jobs)
        self._in_flight = in_flight
        self._by_batch = by_batch
        self._num_left = len(jobs)
        self._num_open = 0
        self._started = time.perf_counter()
        self.outcomes: dict[Request, Outcome] = {}
        self.done = threading.Event()

    def next_requests(self) -> Iterator[Request]:
        if self._by_batch and self._num_open:
            return
        while self._num_open < self._in_flight and (job := next(self._jobs, None)) is not None:
            self._num_open += 1
            request = engine_request(job, time.monotonic())
            now = time.perf_counter() - self._started
            self.outcomes[request] = Outcome(job, arrival=now, sent=now)
            yield request

    def note(self, turn: Turn) -> None:
        now = time.perf_counter() - self._started
        for update in turn.updates:
            if update.result is None:
                continue
            outcome = self.outcomes[update.request]
            outcome.end = now
            if update.result.error is None:
                outcome.num_tokens = len(update.result.best.token_ids)
            else:
                outcome.code = type(update.result.error).__name__
            self._num_open -= 1
            self._num_left -= 1
        if not self._num_left:
            self.done.set()


def engine_request(job: Job, arrival: float) -> Request:
    """Returns the engine's record of a job, the same as the service creates from `Job.options`."""
    return Request(
        request_id="",
        sources={SOURCE_IDS: np.array(job.source_ids)},
        memory_length=len(job.source_ids),
        max_new_tokens=job.num_tokens,
        arrival=arrival,
        beam=Beam(BEAM_SIZE) if job.mode is Mode.BEAM else None,
        sampling=Sampling(1.0, 0, 1.0, 0.0, job.seed) if job.mode is Mode.SAMPLING else None,
    )
