"""A discrete-event model (SimPy) of servers with continuous batching.

A replica runs turns as the engine does: newcomers are admitted and encoded, then all rows get a token. A call
is a plain record. Simulating a turn takes the same time for any number of rows, because a replica keeps sums
over its rows, and finds the calls that end in a turn by the number of the turn. Turns in which no call comes
or goes pass as one event.

The rules are those of `server.engine.scheduler` and `server.engine.queue` for the calls of one caller; a test
compares both on the same calls. Not modelled: several callers and priorities, prefixes, scores and attention,
targets that end before their length, failures of single steps.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import simpy

from benchmarks.load.mix import BEAM_SIZE, Job, Mode
from benchmarks.scale.times import EngineTimes
from seq2seq_serve.server.config import QueueLimits
from seq2seq_serve.server.engine.scheduler import GATHERED_SHARE, SchedulerLimits

Process = Generator[simpy.Event, Any, None]

_PADDING_SHARE = 4  # as in the scheduler
_ENCODED_PER_STEP = 32  # as in a request's work
_RESIDENCE_WEIGHT = 0.1  # as in the queue, with the bounds of a retry delay
_LEAST_RETRY_SECONDS, _MOST_RETRY_SECONDS = 0.1, 30.0

OK, REFUSED, LATE, LOST = "OK", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "UNAVAILABLE"


@dataclass(eq=False, slots=True)
class Call:
    """One request and what became of it. Times are seconds since the simulation began; NaN until they happen.

    Attributes:
        arrival: Time at which the client sends it.
        source_length: Tokens of the source.
        num_tokens: Tokens of the target.
        deadline: Time after which it ends unfinished.
        client: Number of the client, which chooses a replica.
        replica: The replica that ended it.
        queued: Time at which it came to that replica.
        admitted: Time at which it got its slots.
        first: Time of its first token.
        end: Time at which it ended.
        code: Its status; empty until it ends.
        retry_after: Seconds that a refusal asks to wait.
        num_tries: Number of replicas that had it.
        num_slots: Number of rows that it may take at once.
        work: Its expected cost in steps of one slot.
    """

    arrival: float
    source_length: int
    num_tokens: int
    mode: Mode = Mode.GREEDY
    deadline: float = math.inf
    client: int = 0
    replica: Replica | None = None
    queued: float = math.nan
    admitted: float = math.nan
    first: float = math.nan
    end: float = math.nan
    code: str = ""
    retry_after: float = math.nan
    num_tries: int = 0
    num_slots: int = field(init=False)
    work: int = field(init=False)

    @classmethod
    def of(cls, job: Job, arrival: float) -> Call:
        """Returns the call of a job of the load benchmark."""
        return cls(arrival, len(job.source_ids), job.num_tokens, job.mode)

    def __post_init__(self) -> None:
        self.num_slots = BEAM_SIZE if self.mode is Mode.BEAM else 1
        num_steps = 1 + min(self.num_tokens, self.source_length)
        self.work = self.num_slots * num_steps + self.source_length // _ENCODED_PER_STEP


class Core:
    """A processor core that several replicas share: each of those that work gets the same share of it.

    Owned by the replicas of one machine. Without other replicas, work takes its own time.
    """

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._done = 0.0  # seconds that each working replica has had since the start
        self._at = 0.0  # the time of that number
        self._working: list[tuple[float, int, simpy.Event]] = []
        self._order = itertools.count()

    def run(self, seconds: float) -> simpy.Event:
        """Returns the event of the end of some work that takes `seconds` if nothing else runs."""
        self._advance()
        event = self._env.event()
        heapq.heappush(self._working, (self._done + seconds, next(self._order), event))
        self._plan()
        return event

    def _advance(self) -> None:
        now = self._env.now
        if self._working:
            self._done += (now - self._at) / len(self._working)
        self._at = now

    def _plan(self) -> None:
        """Wake up when the next work would end, unless other work begins or ends before."""
        if not self._working:
            return
        due, number, _ = self._working[0]
        size = len(self._working)
        timer = self._env.timeout(max(due - self._done, 0.0) * size)

        def end(_: simpy.Event) -> None:
            if self._working and self._working[0][1] == number and len(self._working) == size:
                self._advance()
                if self._done < due - 1e-9:  # other work came and went
                    return
                heapq.heappop(self._working)[2].succeed()
                self._plan()

        assert timer.callbacks is not None
        timer.callbacks.append(end)


class Replica:
    """One server with one engine, which runs turns while it has calls.

    Owned by the cluster. Invariant: each submitted call is reported once.

    Args:
        env: The simulation.
        index: Its number.
        times: Times of its turns.
        num_slots: Rows of the engine.
        report: Is called with each call that has ended.
        queue_limits: Bounds of the queue.
        limits: Bounds of an encode call.
        core: The core that it shares with other replicas; None gives it one of its own.

    Attributes:
        num_slots_wanted: Number of slots that its calls have or wait for.
        seen_load: What the last scrape of its gauges showed of `num_slots_wanted`.
        work_seconds: Time of its turns, without waiting for a shared core.
    """

    def __init__(
        self,
        env: simpy.Environment,
        index: int,
        times: EngineTimes,
        num_slots: int,
        report: Callable[[Call], None],
        *,
        queue_limits: QueueLimits | None = None,
        limits: SchedulerLimits | None = None,
        core: Core | None = None,
    ) -> None:
        self.index = index
        self.num_slots = num_slots
        self.num_slots_wanted = 0
        self.seen_load = 0
        self.work_seconds = 0.0
        self.is_alive = True
        self._env = env
        self._times = times
        self._turn_seconds = [times.turn_seconds(num_rows) for num_rows in range(num_slots + 1)]
        self._mode_seconds = {mode: times.mode_seconds(mode) for mode in Mode}
        self._report = report
        self._queue_limits = queue_limits or QueueLimits()
        self._limits = limits or SchedulerLimits()
        self._core = core
        self._waiting: deque[Call] = deque()
        self._waiting_tokens = 0
        self._waiting_slots = 0
        self._waiting_work = 0
        self._running: dict[Call, int] = {}  # with the number of turns before their admission
        self._newcomers: list[Call] = []
        self._slots_in_use = 0
        self._ending: dict[int, list[Call]] = {}  # by the number of turns after which they end
        self._ends: list[int] = []  # a heap of these numbers
        self._deadlines: list[tuple[float, int, Call]] = []  # a heap
        self._order = itertools.count()
        self._num_turns = 0
        self._num_rows = 0
        self._num_positions = 0
        self._modes_seconds = 0.0  # what the modes of all rows cost
        self._owed_seconds = 0.0  # processor time of gRPC since the last turn began
        # The turns that run now: when they began, seconds of the first, how much longer each is than the one
        # before it, and their number.
        self._began, self._first_seconds, self._growth, self._num_passing = 0.0, 0.0, 0.0, 0
        self._timer: simpy.Event | None = None  # the event of their end; None while it sleeps
        self._residence_seconds = 0.0
        self._residence_work = 0.0

    def submit(self, call: Call) -> None:
        """Queue a call, or end it at once because the queue is full or its deadline cannot be met."""
        now = self._env.now
        call.replica, call.queued = self, now
        call.num_tries += 1
        self._owed_seconds += self._times.call_seconds
        if not self.is_alive:
            self._end(call, LOST)
            return
        wait_seconds = self._wait_seconds(call)
        num_requests, num_tokens = len(self._waiting) + 1, self._waiting_tokens + call.source_length
        if now >= call.deadline:
            self._end(call, LATE)
        elif self._queue_limits.excess(num_requests, num_tokens) or now + wait_seconds > call.deadline:
            call.retry_after = min(max(wait_seconds, _LEAST_RETRY_SECONDS), _MOST_RETRY_SECONDS)
            self._end(call, REFUSED)
        else:
            self.num_slots_wanted += call.num_slots
            self._count_waiting(call, 1)
            self._waiting.append(call)
            if call.deadline < math.inf:
                heapq.heappush(self._deadlines, (call.deadline, next(self._order), call))
            if self._timer is None:
                self._begin_turns()
            elif len(self._waiting) == 1 and self._num_passing > 1:
                self._stop_after_this_turn()

    def kill(self) -> None:
        """End all calls, as a process that is killed does."""
        self.is_alive, self._timer = False, None
        calls = [*self._running, *self._waiting]
        self._running.clear()
        self._waiting.clear()
        self.num_slots_wanted = 0
        for call in calls:
            self._end(call, LOST)

    def _begin_turns(self) -> None:
        """Begin a turn, or all turns up to the next one in which a call comes or goes."""
        first_seconds = self._begin_turn()
        if not self._running:
            self._timer = None
            self._ending.clear()  # expired calls may be left
            self._ends.clear()
            return
        num_turns = 1
        if self._core is None and not self._newcomers and not self._deadlines:
            num_turns = self._ends[0] - self._num_turns
        growth = self._times.position_seconds * self._num_rows
        self._began, self._first_seconds, self._growth = self._env.now, first_seconds, growth
        self._sleep(num_turns)

    def _sleep(self, num_turns: int) -> None:
        """Wake up after a number of turns since `_began`."""
        self._num_passing = num_turns
        seconds = self._began + self._seconds_of(num_turns) - self._env.now
        self._timer = self._env.timeout(max(seconds, 0.0)) if self._core is None else self._core.run(seconds)
        assert self._timer.callbacks is not None
        self._timer.callbacks.append(self._end_turns)

    def _seconds_of(self, num_turns: int) -> float:
        """Returns the time of the first of the turns that run."""
        return num_turns * self._first_seconds + self._growth * num_turns * (num_turns - 1) / 2

    def _stop_after_this_turn(self) -> None:
        """Let a call that came while turns pass be admitted after the turn that runs now."""
        elapsed = self._env.now - self._began
        num_turns = int(elapsed / (self._first_seconds + self._growth * self._num_passing))  # at most
        while self._seconds_of(num_turns) < elapsed:
            num_turns += 1
        if max(num_turns, 1) < self._num_passing:
            self._sleep(max(num_turns, 1))

    def _begin_turn(self) -> float:
        """Expire and admit calls; returns the seconds of the turn."""
        while self._deadlines and self._deadlines[0][0] <= self._env.now:
            self._expire(heapq.heappop(self._deadlines)[2])
        longest, total, limits = 0, 0, self._limits
        max_tokens = limits.max_encode_tokens_beside if self._num_rows else limits.max_encode_tokens
        while self._waiting and self._may_admit():
            call = self._waiting[0]
            longest, total = max(longest, call.source_length), total + call.source_length
            padding = longest * (len(self._newcomers) + 1) - total
            is_full = total + padding // _PADDING_SHARE > max_tokens
            if call.num_slots > self.num_slots - self._slots_in_use or (self._newcomers and is_full):
                total -= call.source_length
                break
            self._waiting.popleft()
            self._count_waiting(call, -1)
            self._admit(call)
        times = self._times
        seconds = self._turn_seconds[self._num_rows] + self._modes_seconds
        seconds += times.position_seconds * self._num_positions
        if self._newcomers:
            seconds += times.encode_seconds + times.token_seconds * total
        seconds, self._owed_seconds = seconds + self._owed_seconds, 0.0
        return seconds

    def _may_admit(self) -> bool:
        num_free = self.num_slots - self._slots_in_use
        if self._newcomers or num_free >= self._waiting_slots:
            return num_free > 0
        return num_free * GATHERED_SHARE >= self.num_slots

    def _admit(self, call: Call) -> None:
        call.admitted = self._env.now
        self._slots_in_use += call.num_slots
        self._running[call] = self._num_turns
        self._newcomers.append(call)
        end = self._num_turns + call.num_tokens
        if end not in self._ending:
            self._ending[end] = []
            heapq.heappush(self._ends, end)
        self._ending[end].append(call)
        self._change_rows(call, 1, call.source_length)  # a beam begins with one row

    def _change_rows(self, call: Call, num_rows: int, num_positions: int) -> None:
        """Add rows of a call with their positions; negative numbers remove them."""
        self._num_rows += num_rows
        self._modes_seconds += num_rows * self._mode_seconds[call.mode]
        self._num_positions += num_positions

    def _end_turns(self, timer: simpy.Event) -> None:
        if timer is not self._timer:  # one that came before its time, or a killed replica's
            return
        now = self._env.now
        self.work_seconds += self._seconds_of(self._num_passing)
        self._num_turns += self._num_passing
        self._num_positions += self._num_rows * self._num_passing
        for call in self._newcomers:
            call.first = now
            if (num_others := self._num_rows_of(call) - 1) > 0:
                self._change_rows(call, num_others, num_others * (call.source_length + 1))
        self._newcomers.clear()
        if self._ends and self._ends[0] == self._num_turns:
            for call in self._ending.pop(heapq.heappop(self._ends)):
                if call in self._running:
                    self._leave(call)
                    self.num_slots_wanted -= call.num_slots
                    self._end(call, OK)
        if not self._num_rows:
            self._modes_seconds = 0.0  # drops what rounding has left
        if self.is_alive:
            self._begin_turns()

    def _num_rows_of(self, call: Call) -> int:
        """Returns the number of rows of a call after its first turn."""
        return call.num_slots if call.num_tokens > 1 else 1

    def _leave(self, call: Call) -> None:
        num_steps = self._num_turns - self._running.pop(call)
        num_rows = self._num_rows_of(call)
        self._change_rows(call, -num_rows, -num_rows * (call.source_length + num_steps))
        self._slots_in_use -= call.num_slots
        weight = _RESIDENCE_WEIGHT if self._residence_work else 1.0
        self._residence_seconds += weight * (self._env.now - call.admitted - self._residence_seconds)
        self._residence_work += weight * (call.work / call.num_slots - self._residence_work)

    def _expire(self, call: Call) -> None:
        if call in self._running:
            self._leave(call)
        elif not call.code:
            self._waiting.remove(call)
            self._count_waiting(call, -1)
        else:
            return
        self.num_slots_wanted -= call.num_slots
        self._end(call, LATE)

    def _end(self, call: Call, code: str) -> None:
        call.end = self._env.now + self._times.wire_seconds
        call.code = code
        self._report(call)

    def _count_waiting(self, call: Call, sign: int) -> None:
        self._waiting_slots += sign * call.num_slots
        self._waiting_tokens += sign * call.source_length
        self._waiting_work += sign * call.work

    def _wait_seconds(self, call: Call) -> float:
        """Returns the seconds until a new call would get its slots, as the server estimates them."""
        num_missing = call.num_slots + self._slots_in_use - self.num_slots
        seconds = num_missing * self._residence_seconds
        if self._residence_work:
            seconds += self._waiting_work * self._residence_seconds / self._residence_work
        return max(seconds, 0.0) / self.num_slots
