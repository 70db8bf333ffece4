"""The decoding engine: one thread that decides, runs and records, over and over.

It owns all mutable state of decoding. Other threads speak to it through two one-way doors: a queue of
commands in, and `deliver`, called on the engine's thread once a turn, out. Idle means asleep on the queue.
"""

from __future__ import annotations

import enum
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from server.backlog import Backlog, QueueLimits
from server.errors import EngineFailed, ServerError, Unavailable
from server.records import (
    Alignment,
    Array,
    Choice,
    FinishReason,
    Move,
    Request,
    Result,
    Selected,
    Sequence,
    StepPlan,
    StepResult,
    StepStats,
    Timings,
    Turn,
    Update,
)
from server.scheduler import Finished, Scheduler, SchedulerLimits
from server.search import untold
from server.slots import Slots

_log = logging.getLogger(__name__)

_FAILURES_TO_UNHEALTHY = 3  # turns in a row that raised
_STOP_SECONDS = 10.0
_RETRY_SECONDS = 10.0  # after which an engine whose steps fail is tried again


class Runner(Protocol):
    """What the engine needs of whoever runs the graphs; `server.runner.OnnxRunner` is the real one.

    Attributes:
        num_slots: Rows that there are buffers for.
        max_source_length: Positions of a row's memory.
        max_target_length: Positions of a row's cache.
        start_id: What a sequence is fed first.
        eos_id: What ends one.
    """

    num_slots: int
    max_source_length: int
    max_target_length: int
    start_id: int
    eos_id: int

    def warm_up(self) -> None:
        """Do first-time work, on the thread that will run everything else."""

    def encode(self, first_row: int, requests: list[Request]) -> None:
        """Encode newcomers into the memory of the rows from `first_row` on."""

    def prefill(self, first_row: int, sequences: tuple[Sequence, ...]) -> list[list[float]]:
        """Fill the caches of newcomers from their prefixes; the log-probabilities of each that is scored."""

    def step(self, rows: tuple[Sequence, ...]) -> Selected:
        """Feed every row its last token, and select its next one."""

    def move(self, moves: Iterable[Move]) -> int:
        """Carry out moves in order; returns the bytes copied."""

    def align(self, row: int, first_position: int, target_ids: tuple[int, ...], source_length: int) -> Array:
        """The attention `(T, source_length)` of some positions, after those that the row's cache has."""

    def close(self) -> None:
        """Give everything back, on the same thread; nothing else is called any more."""


class _Command(enum.Enum):
    WAKE = enum.auto()
    CANCEL = enum.auto()
    EXPIRE = enum.auto()
    STOP = enum.auto()


_Entry = tuple[_Command, Request | None]


class Engine:
    """Decodes the requests of one model, all that fit at once.

    Owned by the service. Everything but the methods marked thread-safe happens on the engine's own thread.

    Args:
        runner: Runs the graphs; the engine's alone from here on.
        model_name: For the log.
        deliver: Takes what a turn produced, on the engine's thread; must not block.
        queue_limits: What may wait.
        limits: What bounds a turn.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        model_name: str,
        deliver: Callable[[Turn], None],
        queue_limits: QueueLimits | None = None,
        limits: SchedulerLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model_name = model_name
        self.num_slots = runner.num_slots
        self.max_source_length = runner.max_source_length
        self.max_target_length = runner.max_target_length
        self.is_healthy = True  # whether its steps succeed, and its thread lives
        self._runner = runner
        self._deliver = deliver
        self._clock = clock
        self._backlog = Backlog(runner.num_slots, queue_limits or QueueLimits())
        self._scheduler = Scheduler(
            Slots(runner.num_slots),
            self._backlog,
            start_id=runner.start_id,
            eos_id=runner.eos_id,
            limits=limits,
        )
        self._eos_id = runner.eos_id
        self._commands: queue.SimpleQueue[_Entry] = queue.SimpleQueue()
        self._door = threading.Lock()  # whoever has it may let requests in, or close
        self._is_draining = False
        self._is_stopping = False
        self._is_asleep = False
        self._has_died = False
        self._last_turn_at = clock()
        self._num_failures = 0
        self._warm_up: Future[None] = Future()
        self._thread = threading.Thread(target=self._loop, name=f"engine-{model_name}", daemon=True)

    def start(self) -> None:
        """Start the thread, and return when it has warmed up; what that raises is raised here."""
        self._thread.start()
        self._warm_up.result()

    def submit(self, *requests: Request) -> None:
        """Take the requests of a call in, all or none; thread-safe, never waits.

        Args:
            requests: Of one caller, priority and deadline; an empty queue would take them all.

        Raises:
            Unavailable: Draining or stopped.
            DeadlineExceeded: The deadline has passed already.
            Overloaded: The queue is full, or the deadline would pass before there is a slot.
        """
        with self._door:
            if self._is_draining:
                raise Unavailable(f"model {self.model_name} is shutting down")
            self._backlog.add(requests, self._scheduler.slots.num_reserved, self._clock())
            # With the door, so that it comes before the STOP of whoever drains.
            self._commands.put((_Command.WAKE, None))

    def cancel(self, request: Request, *, is_expired: bool = False) -> None:
        """End a request whose caller went away, or whose deadline its caller's clock saw pass first.

        Thread-safe, and nothing where it has ended already.
        """
        self._commands.put((_Command.EXPIRE if is_expired else _Command.CANCEL, request))

    def drain(self) -> None:
        """Refuse newcomers from now on, and finish who is in; thread-safe."""
        with self._door:
            self._is_draining = True

    def stop(self) -> None:
        """End the thread; what is unfinished ends with `Unavailable`."""
        self.drain()
        if self._thread.is_alive():
            self._commands.put((_Command.STOP, None))
            self._thread.join(_STOP_SECONDS)

    def may_take(self) -> bool:
        """Whether it should get requests beside engines that are healthy; thread-safe.

        Where its steps fail it is tried with some now and then: only a step that succeeds shows that it is
        healthy again.
        """
        return self.is_healthy or (not self._has_died and self._clock() - self._last_turn_at > _RETRY_SECONDS)

    def num_waiting(self) -> int:
        """Requests that were accepted and have no slot yet; thread-safe."""
        return len(self._backlog)

    def num_running(self) -> int:
        """Requests being decoded; thread-safe."""
        return len(self._scheduler.running)

    def num_slots_in_use(self) -> int:
        """Slots that they hold, those included that a beam has not filled; thread-safe."""
        return self._scheduler.slots.num_reserved

    def num_cached(self) -> int:
        """Cache positions in use, of all slots; thread-safe."""
        return sum(sequence.cache_length for sequence in self._scheduler.slots.rows)

    def num_slots_wanted(self) -> int:
        """Slots of all requests that were accepted and have not ended; thread-safe."""
        return self._backlog.num_slots_wanted + self._scheduler.slots.num_reserved

    def silent_seconds(self) -> float:
        """Since the last sign of life: none while asleep for want of work, else since a turn began.

        Infinity once the thread has ended unexpectedly.
        """
        if self._has_died:
            return math.inf
        return 0.0 if self._is_asleep else self._clock() - self._last_turn_at

    def run_turn(self, *first: _Entry) -> None:
        """Carry out the commands, those given first, then decide, run, record and report, once.

        On the engine's thread; a test may drive an engine that was not started by calling it.
        """
        self._last_turn_at = self._clock()
        finished: list[Finished] = []
        try:
            for command in first:
                finished += self._obey(*command)
            while not self._commands.empty():
                finished += self._obey(*self._commands.get())
            now = self._clock()
            finished += self._scheduler.expire(now)
            plan = self._scheduler.schedule(now)
            plan, result, failed = self._run(plan)
            finished += failed
            gaps: tuple[float, ...] = ()
            if result is not None:
                now = self._clock()
                running = list(self._scheduler.running.values())
                running = running[: len(running) - len(plan.admitted)]
                gaps = tuple(now - search.last_token_at for search in running if search.rows)
                finished += self._scheduler.record(plan, result, now)
            self._report(_Ran(finished, plan, result, gaps))
        except Exception:
            # A bug of ours: nobody may be left waiting for an answer.
            _log.exception("model %s: the engine failed outside of a step", self.model_name)
            self._note_failure()
            self._abandon(finished, EngineFailed("the engine failed"))

    def _loop(self) -> None:
        try:
            self._runner.warm_up()
        except Exception as error:
            try:
                self._runner.close()
            except Exception:
                _log.exception("model %s: what it took cannot be given back", self.model_name)
            self._warm_up.set_exception(error)
            return
        self._warm_up.set_result(None)
        try:
            while not self._is_stopping:
                if self._scheduler.has_work:
                    self.run_turn()
                else:
                    self._is_asleep = True
                    command = self._commands.get()
                    self._is_asleep = False
                    self.run_turn(command)
            self._abandon([], Unavailable("the server stopped before the target was complete"))
            self._runner.close()
        except BaseException:  # whatever ends the thread, no caller may be left waiting
            self._die()

    def _die(self) -> None:
        """End all requests and refuse newcomers: this thread ends unexpectedly."""
        self._has_died, self.is_healthy = True, False
        _log.critical("model %s: the engine's thread ends", self.model_name, exc_info=True)
        self.drain()
        self._abandon([], EngineFailed("the engine's thread ended"))

    def _abandon(self, finished: list[Finished], error: ServerError) -> None:
        """End all requests. A failure of this, too, must not end the thread: it would seem asleep."""
        try:
            self._report(_Ran(finished + self._scheduler.abandon(error)))
        except Exception:
            _log.exception("model %s: nobody could be told of the failure", self.model_name)

    def _obey(self, command: _Command, request: Request | None) -> list[Finished]:
        if command is _Command.STOP:
            self._is_stopping = True
        elif request is not None:
            return self._scheduler.cancel(request, is_expired=command is _Command.EXPIRE)
        return []

    def _run(self, plan: StepPlan) -> tuple[StepPlan, StepResult | None, list[Finished]]:
        """Carry out a plan. Where an encode raises, the plan goes on without its newcomers."""
        failed: list[Finished] = []
        moved_bytes, encode_seconds = 0, 0.0
        started = self._clock()
        try:
            moved_bytes = self._runner.move(plan.moves)
            attention = tuple(self._align(piece) for piece in plan.alignments)
            if plan.admitted:
                started = self._clock()
                first_row = len(plan.rows) - len(plan.admitted)
                try:
                    self._runner.encode(first_row, [sequence.request for sequence in plan.admitted])
                    if any(sequence.token_ids or sequence.request.is_score for sequence in plan.admitted):
                        scores = self._runner.prefill(first_row, plan.admitted)
                        for sequence, log_probabilities in zip(plan.admitted, scores, strict=True):
                            sequence.choices += map(Choice, log_probabilities)
                except Exception:
                    self._note_failure()
                    self._log_failure("encode", [sequence.request for sequence in plan.admitted])
                    failed += self._scheduler.fail(plan.admitted)
                    plan = StepPlan((), (), plan.rows[:first_row], plan.alignments)
                encode_seconds = self._clock() - started
            if not plan.rows:
                return plan, None, failed
            started = self._clock()
            if any(sequence.num_branches for sequence in plan.rows):
                selected = self._runner.step(plan.rows)
            else:
                selected = Selected([self._eos_id] * len(plan.rows))
            step_seconds = self._clock() - started
        except Exception:
            self._note_failure()
            self._log_failure("step", dict.fromkeys(sequence.request for sequence in plan.rows))
            return plan, None, failed + self._scheduler.fail(plan.rows)
        self._num_failures, self.is_healthy = 0, True
        return plan, StepResult(selected, encode_seconds, step_seconds, moved_bytes, attention), failed

    def _align(self, piece: Alignment) -> Array | Exception:
        """Returns the attention of a piece, or the error that it raised, which ends its request only."""
        row, source_length = piece.row, piece.row.source_length
        assert row.row is not None
        try:
            return self._runner.align(row.row, piece.first_position, piece.target_ids, source_length)
        except Exception as error:
            return error

    def _report(self, ran: _Ran) -> None:
        """Deliver what the turn produced: new tokens, results, and the numbers for the metrics."""
        streaming = dict.fromkeys(s.search for s in ran.plan.rows if s.search.request.stream)
        updates = [
            Update(search.request, news, None)
            for search in streaming
            if search.finish_reason is None and (news := untold(search))
        ]
        results = []
        for finished in ran.finished:
            search = finished.search
            if finished.error is not None and finished.error.__cause__ is not None:
                self._log_failure("engine", (search.request,), finished.error.__cause__)
            result = self._result(finished)
            results.append(result)
            new = untold(search) if search.request.stream and result.error is None else {}
            updates.append(Update(search.request, new, result))
            if search.admitted_turn is not None:
                num_steps = self._scheduler.num_turns - search.admitted_turn
                self._backlog.release(search.request, self._clock() - search.admitted_at, num_steps)
        if ran.finished or ran.plan.rows:
            self._deliver(Turn(tuple(updates), self._stats(ran, tuple(results))))

    def _result(self, finished: Finished) -> Result:
        search, error, reason = finished.search, finished.error, finished.search.finish_reason
        assert reason is not None
        request = search.request
        hypotheses = [
            replace(search.ended[place], attention=np.concatenate(search.alignments[place]))
            if error is None and request.attention
            else search.ended[place]
            for place in sorted(search.ended)
        ]
        num_tokens = sum(
            len(hypothesis.token_ids)
            - len(request.prefix_ids)
            + (hypothesis.finish_reason is FinishReason.EOS and not request.is_score)
            for hypothesis in hypotheses
        )
        return Result(
            finish_reason=reason,
            hypotheses=tuple(hypotheses),
            num_target_tokens=num_tokens,
            num_source_tokens=request.source_length,
            timings=Timings(
                queue_seconds=max(search.admitted_at - request.arrival, 0.0),
                encode_seconds=search.encode_seconds,
                first_token_seconds=max(search.first_token_at - request.arrival, 0.0),
                total_seconds=self._clock() - request.arrival,
            ),
            error=error,
            num_bounded=sum(
                request.is_bounded and hypothesis.finish_reason is FinishReason.LENGTH
                for hypothesis in hypotheses
            ),
        )

    def _stats(self, ran: _Ran, results: tuple[Result, ...]) -> StepStats:
        result = ran.result
        admitted = [sequence.search for sequence in ran.plan.admitted]
        return StepStats(
            num_rows=ran.num_stepped if result is not None else 0,
            step_seconds=result.step_seconds if result is not None else 0.0,
            encode_seconds=result.encode_seconds if result is not None else 0.0,
            queue_seconds=tuple(search.admitted_at - search.request.arrival for search in admitted),
            first_token_seconds=tuple(
                search.first_token_at - search.request.arrival for search in admitted if search.first_token_at
            ),
            inter_token_seconds=ran.inter_token_seconds,
            results=results,
            moved_bytes=result.moved_bytes if result is not None else 0,
        )

    def _note_failure(self) -> None:
        self._num_failures += 1
        self.is_healthy = self._num_failures < _FAILURES_TO_UNHEALTHY

    def _log_failure(
        self, what: str, requests: Iterable[Request], error: BaseException | bool = True
    ) -> None:
        ids = ", ".join(request.request_id for request in requests)
        _log.error("%s: the %s raised on model %s", ids, what, self.model_name, exc_info=error)


_NO_PLAN = StepPlan((), (), ())


@dataclass(frozen=True, slots=True)
class _Ran:
    """The work of a turn, before it is reported."""

    finished: list[Finished]
    plan: StepPlan = _NO_PLAN
    result: StepResult | None = None
    inter_token_seconds: tuple[float, ...] = ()

    @property
    def num_stepped(self) -> int:
        """Rows that went on."""
        return sum(sequence.num_branches > 0 for sequence in self.plan.rows)
