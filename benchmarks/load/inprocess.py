"""Drives the engine without gRPC: the closed loop of every benchmark that measures it within its process."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.load.mix import BEAM_SIZE, Job, Mode, Outcome
from seq2seq_serve.bundle.names import SOURCE_IDS
from seq2seq_serve.server.engine.core import Admit, Core
from seq2seq_serve.server.engine.request import Beam, Request, Sampling
from seq2seq_serve.server.engine.result import Result, Turn
from seq2seq_serve.server.models.loading import LIMITS
from seq2seq_serve.server.runner.runner import OnnxRunner


@dataclass(slots=True)
class Decoded:
    """A request that was sent, in seconds since the loop began, and its result."""

    sent: float
    end: float = float("nan")
    result: Result | None = None


class InProcessEngine:
    """An engine driven from one thread: the speed that a server would reach if gRPC were free.

    Args:
        runner: Runs the graphs; used by this engine only.
        on_turn: Is called with each turn on the engine's thread, before the next requests are sent.

    Attributes:
        totals: Turns and admissions, and the seconds of steps and encode calls, since it was cleared.
    """

    def __init__(self, runner: OnnxRunner, on_turn: Callable[[Turn], object] | None = None) -> None:
        self.totals: dict[str, float] = defaultdict(float)
        self._on_turn = on_turn
        self._loop: _Loop | None = None
        self._core = Core(
            runner, model_name="benchmark", deliver=self._deliver, limits=LIMITS[runner.provider]
        )
        self._core.start()

    def decode(self, requests: Iterable[Request], in_flight: int, *, by_batch: bool = False) -> list[Decoded]:
        """Keep `in_flight` requests in the engine, and return all in their order.

        Args:
            requests: Are taken one by one, as they are sent.
            in_flight: Number of requests at once.
            by_batch: Whether the next ones are sent only when all earlier ones have ended.
        """
        self._loop = loop = _Loop(requests, in_flight, by_batch=by_batch)
        self._core.send(Admit(tuple(loop.next_requests())))
        loop.done.wait()
        return list(loop.decoded.values())

    def closed_loop(self, jobs: list[Job], in_flight: int, *, by_batch: bool = False) -> list[Outcome]:
        """Decode jobs; returns their outcomes in order."""
        requests = (engine_request(job, time.monotonic()) for job in jobs)
        return [
            _outcome(job, decoded)
            for job, decoded in zip(jobs, self.decode(requests, in_flight, by_batch=by_batch), strict=True)
        ]

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
            return self.closed_loop(jobs, batch_size, by_batch=True)
        batches = [jobs[i : i + batch_size] for i in range(0, len(jobs), batch_size)]
        padded = [
            dataclasses.replace(job, num_tokens=max(one.num_tokens for one in batch))
            for batch in batches
            for job in batch
        ]
        outcomes = self.closed_loop(padded, batch_size, by_batch=True)
        for outcome, job in zip(outcomes, jobs, strict=True):  # tokens beyond a job's own length do not count
            outcome.num_tokens = min(outcome.num_tokens, job.num_tokens)
        return outcomes

    def stop(self) -> None:
        """End the engine's thread."""
        self._core.stop()

    def _deliver(self, turn: Turn) -> None:
        for name, number in (
            ("turns", 1),
            ("encodes", bool(turn.queue_seconds)),
            ("step_seconds", turn.step_seconds),
            ("encode_seconds", turn.encode_seconds),
            ("moved_bytes", turn.moved_bytes),
        ):
            self.totals[name] += number
        if self._on_turn is not None:
            self._on_turn(turn)
        loop = self._loop
        assert loop is not None
        loop.note(turn)
        self._core.send(Admit(tuple(loop.next_requests())))


class _Loop:
    """The state of one loop; after the first requests, only the engine's thread uses it."""

    def __init__(self, requests: Iterable[Request], in_flight: int, *, by_batch: bool) -> None:
        self._requests = iter(requests)
        self._in_flight = in_flight
        self._by_batch = by_batch
        self._num_open = 0
        self._started = time.perf_counter()
        self.decoded: dict[Request, Decoded] = {}
        self.done = threading.Event()

    def next_requests(self) -> Iterator[Request]:
        if self._by_batch and self._num_open:
            return
        while self._num_open < self._in_flight and (request := next(self._requests, None)) is not None:
            self._num_open += 1
            self.decoded[request] = Decoded(self._now())
            yield request
        if not self._num_open:
            self.done.set()

    def note(self, turn: Turn) -> None:
        now = self._now()
        for update in turn.updates:
            if update.result is not None:
                decoded = self.decoded[update.request]
                decoded.end, decoded.result = now, update.result
                self._num_open -= 1

    def _now(self) -> float:
        return time.perf_counter() - self._started


def _outcome(job: Job, decoded: Decoded) -> Outcome:
    result = decoded.result
    assert result is not None
    outcome = Outcome(job, arrival=decoded.sent, sent=decoded.sent, end=decoded.end)
    if result.error is None:
        outcome.num_tokens = len(result.best.token_ids)
    else:
        outcome.code = type(result.error).__name__
    return outcome


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
