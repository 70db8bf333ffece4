"""The core of an engine: one thread that repeats decide, run and record.

It owns all mutable state of decoding. Other threads put commands into its inbox; it calls `deliver` with its
turns, on its own thread. A core without work sleeps on the inbox.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from operator import attrgetter
from typing import NamedTuple

from seq2seq_serve.bundle.adapters import Weights
from seq2seq_serve.server.engine.draft_model import DraftModel
from seq2seq_serve.server.engine.drafts import Drafter
from seq2seq_serve.server.engine.plan import Alignment, Runner, Selected, StepPlan, StepResult
from seq2seq_serve.server.engine.request import Array, Request
from seq2seq_serve.server.engine.result import FinishReason, Result, Timings, TokenScore, Turn, Update
from seq2seq_serve.server.engine.scheduler import (
    SHORT_ENCODE_SECONDS,
    Finished,
    Scheduler,
    SchedulerLimits,
)
from seq2seq_serve.server.engine.search import unsent_tokens
from seq2seq_serve.server.engine.state import Search
from seq2seq_serve.server.errors import ServerError

_log = logging.getLogger(__name__)

_FAILURES_TO_UNHEALTHY = 3  # turns in a row that raised
STOP_SECONDS = 10.0
# A delivery, and a piece of a stream, cost the handlers' thread about 0.1 ms. So the more rows of a core run,
# the more turns are delivered at once, and the more of its streams run, the more tokens have their pieces.
_SECONDS_PER_ROW, _MOST_SECONDS = 0.00005, 0.003
_SECONDS_PER_STREAM, _MOST_STREAM_SECONDS = 0.0003, 0.05
_NO_GAPS: Mapping[float, int] = {}
_NO_PLAN = StepPlan((), (), ())
_LAST_TOKEN_AT = attrgetter("last_token_at")  # of a search; 0 before its first token


def _no_action() -> None:
    pass


class Admit(NamedTuple):
    """Decode requests; the core has slots for them, or soon will."""

    requests: tuple[Request, ...]


class Cancel(NamedTuple):
    """End a request, unless it has ended.

    Attributes:
        is_expired: Whether the reason is its deadline; otherwise its caller has left.
    """

    request: Request
    is_expired: bool = False


class WriteAdapter(NamedTuple):
    """Replace an adapter, which no request has, by another one, for the requests that follow."""

    place: int
    weights: Weights


class Stop(NamedTuple):
    """End all requests, and the core."""


Command = Admit | Cancel | WriteAdapter | Stop


class Core:
    """Decodes requests, as many at once as have slots, in the order in which they are admitted.

    Owned by the handle through which an engine uses it. Everything but `send`, `stop`, `wait`, `watch` and
    `turn_seconds` runs on the core's own thread. An exception outside of encoding and steps ends that thread:
    the engine knows the requests that have not ended, answers them, and starts another core.

    Args:
        runner: Runs the graphs; used by this core only.
        model_name: For the log.
        deliver: Is called with one or more turns, on the core's thread; must not block.
        died: Is called at the end of that thread, unless `stop` ends it.
        limits: Bounds of a turn.
        drafter: Drafts tokens of rows; None if the runner takes one position of a row at a time.
        draft_runner: Runs a draft model, with as many slots; only with a drafter.
        held_seconds: The longest time, about, for which a turn waits to be delivered together with later
            ones; one with an end or a token that is streamed waits only if many rows run, and for 3 ms.
        clock: Returns monotonic seconds.

    Attributes:
        scheduler: Owned by the core.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        model_name: str,
        deliver: Callable[[list[Turn]], object],
        died: Callable[[], object] = _no_action,
        limits: SchedulerLimits | None = None,
        drafter: Drafter | None = None,
        draft_runner: Runner | None = None,
        held_seconds: float = 0.01,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model_name = model_name
        self._runner = runner
        self._deliver = deliver
        self._died = died
        self._clock = clock
        self.scheduler = Scheduler(
            runner.num_slots,
            start_ids=runner.start_ids,
            eos_ids=runner.eos_ids,
            has_decode=runner.has_decode,
            shares_memory=runner.shares_memory,
            repeats_steps=runner.repeats_steps,
            limits=limits,
            drafter=drafter,
        )
        self._draft_model: DraftModel | None = None
        if draft_runner is not None:
            assert drafter is not None
            self._draft_model = DraftModel(draft_runner, drafter, model_name, clock)
        self._eos_id = runner.eos_ids[0]
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._is_stopping = False
        self._is_asleep = False
        self._num_turns = 0
        self._watched_turn = 0  # in the last round of the watcher
        self._num_rounds = 0  # in which that turn lasted
        self._encode_seconds = 0.0  # of the last encode call
        self._streamed_at = clock()
        self._held_seconds = held_seconds
        self._held: list[Turn] = []
        self._delivered_at = clock()
        self._num_failures = 0
        self._warm_up: Future[None] = Future()
        self._thread = threading.Thread(target=self._loop, name=f"core-{model_name}", daemon=True)

    def start(self) -> None:
        """Start the thread and wait for its warm-up; an exception of the warm-up is raised here."""
        self._thread.start()
        self._warm_up.result()

    def send(self, command: Command) -> None:
        """Put a command into the inbox; thread-safe, does not wait."""
        self._inbox.put(command)

    def stop(self) -> None:
        """End the thread; unfinished requests do not get an end from it. Thread-safe."""
        self._died = _no_action
        if self._thread.is_alive():
            self.send(Stop())
            self._thread.join(STOP_SECONDS)

    def wait(self) -> None:
        """Wait until the thread has ended; thread-safe."""
        self._thread.join()

    def watch(self) -> None:
        """Look whether another turn has begun; called each second, by one thread.

        The watcher's rounds are counted, not the time: it is paused whenever the process is.
        """
        is_same = self._num_turns == self._watched_turn and not self._is_asleep
        self._watched_turn, self._num_rounds = self._num_turns, self._num_rounds + 1 if is_same else 0

    def turn_seconds(self) -> float:
        """Returns for how many rounds of the watcher the present turn has lasted. Thread-safe."""
        return float(self._num_rounds)

    def run_turn(self, *commands: Command) -> None:
        """Handle all commands, these before those in the inbox; then decide, run, record and report once.

        Runs on the core's thread. A test calls it to drive a core that was not started.
        """
        self._num_turns += 1
        finished: list[Finished] = []
        for command in commands:
            finished += self._handle(command)
        while not self._inbox.empty():
            finished += self._handle(self._inbox.get())
        plan = self.scheduler.schedule(self._clock())
        plan, result, failed = self._run(plan)
        finished += failed
        first: tuple[float, ...] = ()
        gaps = _NO_GAPS
        if result is not None:
            self._encode_seconds = result.encode_seconds or self._encode_seconds
            now = self._clock()
            running = [search for search in self.scheduler.running.values() if search.rows]
            last = Counter(map(_LAST_TOKEN_AT, running))
            new = [search for search in running if not search.last_token_at] if 0.0 in last else []
            gaps = {now - at: number for at, number in last.items() if at}
            before = []
            if plan.drafts or result.selected.further:
                before = [
                    (each, each.last_token_at, each.num_further_tokens, len(each.rows)) for each in running
                ]
            finished += self.scheduler.record(plan, result, now)
            first = tuple(now - search.request.arrival for search in new if search.last_token_at)
            if before:
                gaps = _gaps(before, now, result)
        self._deliver_turn(finished, plan, result, first, gaps)

    def _loop(self) -> None:
        try:
            self._runner.warm_up()
            if self._draft_model is not None:
                self._draft_model.warm_up()
        except Exception as error:
            try:
                self._close()
            except Exception:
                _log.exception("model %s: the memory of a runner cannot be freed", self.model_name)
            self._warm_up.set_exception(error)
            return
        self._warm_up.set_result(None)
        try:
            while not self._is_stopping:
                if self.scheduler.running or self.scheduler.waiting:
                    self.run_turn()
                else:
                    self._is_asleep = True
                    command = self._inbox.get()
                    self._is_asleep = False
                    self.run_turn(command)
                    del command  # has its requests, which may end long before the next sleep
            if self._held:
                self._deliver(self._held)
        except BaseException:
            _log.critical("model %s: the engine's thread ends", self.model_name, exc_info=True)
        try:
            self._close()
        except Exception:
            _log.exception("model %s: the memory of a runner cannot be freed", self.model_name)
        self._died()

    def _close(self) -> None:
        self._runner.close()
        if self._draft_model is not None:
            self._draft_model.runner.close()

    def _handle(self, command: Command) -> list[Finished]:
        match command:
            case Admit(requests):
                self.scheduler.add(requests)
            case Cancel(request, is_expired):
                return self.scheduler.cancel(request, is_expired=is_expired)
            case WriteAdapter(place, weights):
                self._runner.write_adapter(place, weights)
            case Stop():
                self._is_stopping = True
        return []

    def _run(self, plan: StepPlan) -> tuple[StepPlan, StepResult | None, list[Finished]]:
        """Run a plan. If its encode raises, the newcomers fail and the other rows go on."""
        failed: list[Finished] = []
        moved_bytes, encode_seconds = 0, 0.0
        started = self._clock()
        try:
            if self._draft_model is not None and plan.rows:
                plan = self._draft_model.extend(plan)
            moved_bytes = self._runner.move(plan.moves)
            attention = tuple(self._align(piece) for piece in plan.alignments)
            if plan.admitted:
                started = self._clock()
                first_row = len(plan.rows) - len(plan.admitted)
                try:
                    self._runner.encode(first_row, [sequence.request for sequence in plan.admitted])
                    if self._runner.has_decode and any(
                        sequence.cache_length or sequence.request.is_score for sequence in plan.admitted
                    ):
                        scores = self._runner.prefill(first_row, plan.admitted)
                        for sequence, log_probabilities in zip(plan.admitted, scores, strict=True):
                            sequence.token_scores += map(TokenScore, log_probabilities)
                except Exception:
                    self._num_failures += 1
                    self._log_failure("encode", [sequence.request for sequence in plan.admitted])
                    failed += self.scheduler.fail(plan.admitted)
                    plan = StepPlan((), (), plan.rows[:first_row], plan.alignments)
                encode_seconds = self._clock() - started
            if not plan.rows:
                return plan, None, failed
            started = self._clock()
            # Other rows only keep their memory, or `prefill` has scored them.
            num_rows = sum(
                sequence.num_branches > 0 and not (sequence.request.is_score and self._runner.has_decode)
                for sequence in plan.rows
            )
            positions = plan.rows + plan.drafts
            if num_rows:
                selected = self._runner.step(positions, plan.num_steps)
            else:
                selected = Selected([self._eos_id] * len(positions))
            step_seconds = (self._clock() - started) / (1 + len(selected.further))
        except Exception:
            self._num_failures += 1
            self._log_failure("step", dict.fromkeys(sequence.request for sequence in plan.rows))
            return plan, None, failed + self.scheduler.fail(plan.rows)
        if not failed:
            self._num_failures = 0
        result = StepResult(selected, num_rows, encode_seconds, step_seconds, moved_bytes, attention)
        return plan, result, failed

    def _align(self, piece: Alignment) -> Array | Exception:
        """Returns the attention of a piece, or the error that it raised, which fails only its request."""
        row, memory_length = piece.row, piece.row.memory_length
        assert row.row is not None
        try:
            return self._runner.align(
                row.row, piece.first_position, piece.target_ids, memory_length, row.request.adapter
            )
        except Exception as error:
            return error

    def _deliver_turn(
        self,
        finished: list[Finished],
        plan: StepPlan = _NO_PLAN,
        result: StepResult | None = None,
        first_token_seconds: tuple[float, ...] = (),
        inter_token_seconds: Mapping[float, int] = _NO_GAPS,
    ) -> None:
        """Deliver what the turn produced: new tokens, results, and the numbers for the metrics."""
        streaming = [search for search in self.scheduler.running.values() if search.request.stream]
        now = self._clock()
        is_due = now - self._streamed_at >= min(
            _SECONDS_PER_STREAM * (len(streaming) - 1), _MOST_STREAM_SECONDS
        )
        if is_due:
            self._streamed_at = now
        updates = [
            Update(search.request, new, None)
            for search in streaming
            if (is_due or not search.num_sent) and (new := unsent_tokens(search))
        ]
        for search, error in finished:
            if error is not None and error.__cause__ is not None:
                self._log_failure("engine", (search.request,), error.__cause__)
            # An error revokes no token that waits for its piece, but those of a beam were not decided.
            is_kept = search.request.beam is None and bool(search.num_sent)
            is_told = search.request.stream and (error is None or is_kept)
            new = unsent_tokens(search) if is_told else {}
            updates.append(Update(search.request, new, self._result(search, error)))
        if finished or plan.rows:
            admitted = [sequence.search for sequence in plan.admitted]
            turn = Turn(
                tuple(updates),
                num_rows=result.num_rows if result is not None else 0,
                num_steps=1 + len(result.selected.further) if result is not None else 1,
                step_seconds=result.step_seconds if result is not None else 0.0,
                encode_seconds=result.encode_seconds if result is not None else 0.0,
                queue_seconds=tuple(search.admitted_at - search.request.arrival for search in admitted),
                first_token_seconds=first_token_seconds,
                inter_token_seconds=inter_token_seconds,
                moved_bytes=result.moved_bytes if result is not None else 0,
                is_failing=self._num_failures >= _FAILURES_TO_UNHEALTHY,
            )
            self._held.append(turn)
            wait = self._held_seconds
            if any(held.updates for held in self._held):
                # The next turn may encode, and an end must not wait for a call that is longer than planned.
                is_short = self._encode_seconds < 1.5 * SHORT_ENCODE_SECONDS
                wait = min(wait, _SECONDS_PER_ROW * (len(plan.rows) - 1), _MOST_SECONDS) if is_short else 0.0
            if not self.scheduler.running or now - self._delivered_at >= wait:
                self._held[-1] = turn._replace(load=self.scheduler.load())
                turns, self._held, self._delivered_at = self._held, [], now
                self._deliver(turns)

    def _result(self, search: Search, error: ServerError | None) -> Result:
        reason = search.finish_reason
        assert reason is not None
        request = search.request
        hypotheses = [search.ended[place] for place in sorted(search.ended)]
        num_tokens = sum(
            max(len(hypothesis.token_ids) - len(request.prefix_ids), 0)  # one that ended may lack some of it
            + (hypothesis.finish_reason is FinishReason.EOS and not request.is_score)
            for hypothesis in hypotheses
        )
        return Result(
            finish_reason=reason,
            hypotheses=tuple(hypotheses),
            num_target_tokens=num_tokens,
            num_source_tokens=request.memory_length,
            timings=Timings(
                queue_seconds=max(search.admitted_at - request.arrival, 0.0),
                encode_seconds=search.encode_seconds,
                first_token_seconds=max(search.first_token_at - request.arrival, 0.0),
                total_seconds=self._clock() - request.arrival,
                draft_tokens=search.num_draft_tokens,
                accepted_tokens=search.num_accepted_tokens,
            ),
            start_ids=search.start_ids,
            error=error,
            num_bounded=sum(
                request.is_bounded and hypothesis.finish_reason is FinishReason.LENGTH
                for hypothesis in hypotheses
            ),
        )

    def _log_failure(
        self, what: str, requests: Iterable[Request], error: BaseException | bool = True
    ) -> None:
        ids = ", ".join(request.request_id for request in requests)
        _log.error("%s: the %s raised on model %s", ids, what, self.model_name, exc_info=error)


def _gaps(
    before: list[tuple[Search, float, int, int]], now: float, result: StepResult
) -> Mapping[float, int]:
    """Returns the times between tokens of a turn in which a request may have had several.

    Args:
        before: The running requests, with their `last_token_at`, `num_further_tokens` and number of rows
            before the turn. The tokens of several rows come side by side: their mean counts.
        now: The end of the turn.
        result: Of its steps.
    """
    gaps = Counter[float]()
    steps_seconds = result.step_seconds * (1 + len(result.selected.further))
    for search, last_token_at, num_before, num_rows in before:
        num_further = (search.num_further_tokens - num_before) / num_rows
        num_tokens = (search.last_token_at == now) + num_further
        if last_token_at:
            gaps[(now - last_token_at) / max(num_tokens, 1)] += round(num_tokens)
        elif num_further:
            gaps[steps_seconds / num_tokens] += round(num_further)
    return gaps
