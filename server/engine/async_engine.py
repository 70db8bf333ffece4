"""The engine of a model: one queue in front of the cores that decode, on the event loop.

    submitted -> FairQueue -> a core with room -> turns -> Stream

Requests wait here, so that they are fair to each other, bounded and cancelled in one place. A core gets a
request when it has slots for it, and a few more ahead, so that it never waits between two steps. A core that
ends or hangs is started again: its requests end with `Unavailable`, and the queue goes on with the others.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter

from seq2seq_serve.bundle.adapters import Weights
from seq2seq_serve.server.config import QueueLimits
from seq2seq_serve.server.engine.queue import FairQueue
from seq2seq_serve.server.engine.request import Request
from seq2seq_serve.server.engine.result import FinishReason, Load, Result, Turn, Update
from seq2seq_serve.server.engine.scheduler import leaving_error
from seq2seq_serve.server.errors import InvalidRequest, Overloaded, ServerError, Unavailable

_log = logging.getLogger(__name__)

_AHEAD_SHARE = 8  # a core gets requests for its slots, and for one more in eight
_MOST_FAILING_SECONDS = 10.0  # after which a core whose steps fail is started again
_WATCH_SECONDS = 1.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 30.0  # between two tries to start a core

# A start runs every graph, and no turn of a sound machine takes several times as long.
_LEAST_TURN_SECONDS, _MOST_TURN_SECONDS, _TURN_PER_START = 60.0, 600.0, 5


class CoreHandle(ABC):
    """A core of an engine, in a thread or a process of its own.

    Owned by the engine; used on the event loop only.

    Args:
        num_slots: The number of sequences that it decodes at once.

    Attributes:
        requests: Those that were sent and have not ended, with the time of their sending.
        num_slots_wanted: The number of slots that they need.
        capacity: The most of these: its own slots, and some ahead of them.
        load: After its last turn.
        is_ready: Whether it takes requests.
        failing_since: When its turns began to raise; None while they do not.
        last_turn_at: When it last reported a turn, or was sent a request while it had none.
        longest_turn_seconds: A turn that takes longer hangs.
        num_silent_rounds: Of the watcher, without a sign of life.
        fault: Why the engine ended it, as the end of a sentence; empty if it has not.
        can_be_killed: Whether `kill` also ends it while it hangs.
    """

    can_be_killed = False

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.requests: dict[Request, float] = {}
        self.num_slots_wanted = 0
        self.capacity = num_slots + max(num_slots // _AHEAD_SHARE, 1)
        self.load = Load(0, 0, 0, 0)
        self.is_ready = False
        self.failing_since: float | None = None
        self.last_turn_at = time.monotonic()
        self.longest_turn_seconds = _LEAST_TURN_SECONDS
        self.num_silent_rounds = 0
        self.fault = ""

    @abstractmethod
    async def start(self, turned: Callable[[Sequence[Turn]], None], ended: Callable[[str], None]) -> None:
        """Build it, and wait until it is warm. It may be started again after its end.

        Args:
            turned: Is called on the event loop with its turns, one or more at a time.
            ended: Is called on the event loop if it ends by itself, with the cause.

        Raises:
            ValueError: It cannot be built; the message says why.
        """

    @abstractmethod
    def admit(self, requests: tuple[Request, ...]) -> None:
        """Send requests to it."""

    @abstractmethod
    def cancel(self, request: Request, *, is_expired: bool) -> None:
        """End a request that was sent to it."""

    @abstractmethod
    def write_adapter(self, place: int, weights: Weights) -> None:
        """Replace an adapter for the requests that are sent later."""

    @abstractmethod
    def watch(self) -> None:
        """Look whether it shows life: a round of the watcher, each second.

        Ages are counted in rounds: a watcher that was paused itself, as in a paused virtual machine, or whose
        event loop was blocked, would take sound cores for dead.
        """

    @abstractmethod
    def turn_seconds(self) -> float:
        """Returns the age of its present turn: 0 while it sleeps, infinite if it does not show any life."""

    def is_hung(self) -> bool:
        """Whether its present turn lasts longer than that of any sound core."""
        return self.turn_seconds() > self.longest_turn_seconds

    @abstractmethod
    def kill(self) -> None:
        """End it, so that it is started again; a thread ends after its turn."""

    def silent_seconds(self) -> float:
        """Returns the seconds since its last turn; 0 while it has nothing to do."""
        return time.monotonic() - self.last_turn_at if self.requests else 0.0

    @abstractmethod
    async def stop(self) -> None:
        """End it; its requests end in its last turn."""


class Stream:
    """The unread updates of one request.

    Owned by the engine. Tokens are collected while the reader is busy, so that a slow one gets fewer and
    larger pieces.

    Attributes:
        request: The request.
        core: The core that it was sent to; None while it waits.
        result: Its end; None until then.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.core: CoreHandle | None = None
        self.result: Result | None = None
        self._token_ids: dict[int, list[int]] = {}
        self._news: asyncio.Future[None] | None = None  # for which the reader waits

    def put(self, token_ids: Mapping[int, list[int]], result: Result | None) -> None:
        """Add new tokens, by their hypothesis, or the result, and wake the reader."""
        for place, new in token_ids.items():
            self._token_ids.setdefault(place, []).extend(new)
        self.result = self.result or result
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def updates(self) -> AsyncGenerator[Update]:
        """Yields new tokens when they come; the last update has the result."""
        result = None
        while result is None:
            if not self._token_ids and self.result is None:
                await self._wait_for_news()
            token_ids, self._token_ids, result = self._token_ids, {}, self.result
            yield Update(self.request, token_ids, result)

    async def wait(self) -> Result:
        """Returns the result once the request has ended."""
        while self.result is None:
            await self._wait_for_news()
        return self.result

    async def _wait_for_news(self) -> None:
        """Waits for the next `put`."""
        self._news = asyncio.get_running_loop().create_future()
        await self._news


class AsyncEngine:
    """Decodes the requests of one model.

    Owned by the served model. Used on one event loop; other threads may call the methods that only read, such
    as `load` and `problem`.

    Args:
        model_name: For the log and for errors.
        cores: Equal cores, which are not started.
        limits: Bounds of the queue.
        record: Is called with every turn, for metrics, and with the number of requests that are refused.
        feeds_prefix: Whether steps read prefixes, one token each.
        clock: Returns monotonic seconds.

    Attributes:
        num_slots: The number of sequences that all cores decode at once.
    """

    def __init__(
        self,
        model_name: str,
        cores: Sequence[CoreHandle],
        limits: QueueLimits,
        record: Callable[[Turn], object],
        *,
        feeds_prefix: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model_name = model_name
        self.cores = tuple(cores)
        self.num_slots = sum(core.num_slots for core in cores)
        self._record = record
        self._feeds_prefix = feeds_prefix
        self._clock = clock
        self._queue = FairQueue(self.num_slots, limits, feeds_prefix=feeds_prefix)
        self._streams: dict[Request, Stream] = {}  # of all requests that have not ended
        self._timers: dict[Request, asyncio.TimerHandle] = {}  # of those with deadlines
        self._adapters: dict[int, Weights] = {}  # by place
        self._is_draining = False
        self._is_stopping = False
        self._restarts: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start all cores side by side.

        Raises:
            ValueError: One cannot be built; the message says why. None is left running.
        """
        try:
            await asyncio.gather(*map(self._start, self.cores))
        except BaseException:
            await self.stop()
            raise
        self._watching = asyncio.create_task(self._watch())

    def write_adapter(self, place: int, weights: Weights) -> None:
        """Replace the adapter of a place, which no unfinished request has, in all cores."""
        self._adapters[place] = weights
        for core in self.cores:
            if core.is_ready:
                core.write_adapter(place, weights)

    @contextmanager
    def submitted(
        self,
        requests: Sequence[Request],
        is_expired: Callable[[], bool] = lambda: False,
        *,
        is_accepted: bool = False,
    ) -> Iterator[list[Stream]]:
        """Queue the requests of a call, all or none; those that have not ended at exit are cancelled.

        Args:
            requests: They have one caller, one priority and one deadline.
            is_expired: Returns whether the deadline is the reason of a cancellation.
            is_accepted: Whether they continue a call that was accepted before: it is finished although the
                engine drains, and is sent again if the queue is full.

        Raises:
            InvalidRequest: They do not fit into an empty queue, so a retry cannot succeed.
            Unavailable: The engine is draining or stopped.
            DeadlineExceeded: The deadline has passed already.
            Overloaded: The queue is full, or the deadline would pass before a slot is free.
        """
        self.check_size(len(requests), sum(request.queue_tokens for request in requests))
        ordered = requests
        if not any(request.stream for request in requests):
            # A long target that began last would run alone at the end.
            ordered = sorted(requests, key=lambda request: -request.memory_length)
        num_held = sum(core.num_slots_wanted for core in self.cores)
        try:
            if self._is_stopping or (self._is_draining and not is_accepted):
                raise Unavailable(f"model {self.model_name} is shutting down")
            self._queue.add(ordered, num_held, self._clock())
        except ServerError as error:
            if not (is_accepted and isinstance(error, Overloaded)):
                self._record(Turn(num_refused=len(requests)))
            raise
        streams = [Stream(request) for request in requests]
        loop = asyncio.get_running_loop()
        for stream in streams:
            request = stream.request
            self._streams[request] = stream
            if request.deadline is not None:
                self._timers[request] = loop.call_at(request.deadline, self._expire, request)
        self._dispatch()
        try:
            yield streams
        finally:
            for stream in streams:
                if stream.result is None:
                    self._cancel(stream.request, is_expired=is_expired())

    def check_size(self, num_requests: int, num_tokens: int, unit: str = "requests") -> None:
        """Raises InvalidRequest if a call's requests or source tokens do not fit into an empty queue."""
        excess = self._queue.excess(num_requests, num_tokens, unit)
        if excess:
            raise InvalidRequest(f"the call has {excess} here: send fewer in one call", field="sources")

    def load(self) -> Load:
        """Returns the numbers of requests, slots and cache positions in use."""
        _, num_running, num_slots_in_use, num_cached = map(
            sum, zip(*(core.load for core in self.cores), strict=True)
        )
        num_open = self._queue.num_requests + sum(len(core.requests) for core in self.cores)
        return Load(max(num_open - num_running, 0), num_running, num_slots_in_use, num_cached)

    def num_slots_wanted(self) -> int:
        """Returns the number of slots that all accepted, unfinished requests need."""
        return self._queue.num_slots_wanted + sum(core.num_slots_wanted for core in self.cores)

    def silent_seconds(self) -> float:
        """Returns the longest time since a core's last turn; 0 for cores without work."""
        return max(core.silent_seconds() for core in self.cores)

    def problem(self) -> str | None:
        """Returns why no core decodes at present, or None."""
        alive = [core for core in self.cores if core.is_ready and not core.is_hung()]
        if any(core.failing_since is None for core in alive):
            return None
        if alive:
            return f"{self.model_name}: the engine's steps keep failing"
        if any(core.is_ready for core in self.cores):
            return (
                f"{self.model_name}: no sign of life from the engine for {self.silent_seconds():.0f} seconds"
            )
        return f"{self.model_name}: the engine has ended, and is being started again"

    def fatal_problem(self) -> str | None:
        """Returns the problem if only a restart of this process solves it, or None."""
        is_fatal = any(core.is_ready and core.is_hung() and not core.can_be_killed for core in self.cores)
        return self.problem() if is_fatal else None

    def drain(self) -> None:
        """Refuse new requests from now on, and finish the accepted ones."""
        self._is_draining = True

    async def stop(self) -> None:
        """End the cores; unfinished requests end with `Unavailable`."""
        self.drain()
        self._is_stopping = True
        tasks = [*self._restarts, *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(core.stop() for core in self.cores))
        for core in self.cores:
            core.load = Load(0, 0, 0, 0)
        error = Unavailable("the engine stopped before the target was complete")
        if self._streams:
            self._report(Turn(self._ends(self._streams, FinishReason.FAILED, error)))

    def _dispatch(self) -> None:
        """Send waiting requests to the cores that have room for them.

        A core whose steps fail gets some only if all cores fail.
        """
        if not self._queue.num_requests:
            return
        now, batches = self._clock(), dict[CoreHandle, list[Request]]()
        ready = [core for core in self.cores if core.is_ready]
        able = [core for core in ready if core.failing_since is None] or ready
        while able and self._queue.num_requests:
            core = min(able, key=attrgetter("num_slots_wanted"))
            if core.num_slots_wanted >= core.capacity:
                break
            request = self._queue.pop()
            if not core.requests:
                core.last_turn_at = now
            core.requests[request] = now
            core.num_slots_wanted += request.num_slots
            self._streams[request].core = core
            batches.setdefault(core, []).append(request)
        for core, requests in batches.items():
            core.admit(tuple(requests))

    def _expire(self, request: Request) -> None:
        self._cancel(request, is_expired=True)

    def _cancel(self, request: Request, *, is_expired: bool) -> None:
        stream = self._streams.get(request)
        if stream is None:
            return
        if stream.core is not None:
            stream.core.cancel(request, is_expired=is_expired)
            return
        reason = FinishReason.DEADLINE if is_expired else FinishReason.CANCELLED
        self._report(Turn(self._ends([request], reason, leaving_error(is_expired=is_expired))))

    def _ends(
        self, requests: Iterable[Request], reason: FinishReason, error: ServerError
    ) -> tuple[Update, ...]:
        """Returns the ends of requests that no core has ended."""
        now = self._clock()
        return tuple(
            Update(request, {}, Result.without_targets(request, reason, error, now - request.arrival))
            for request in requests
        )

    def _turned(self, core: CoreHandle, turns: Sequence[Turn]) -> None:
        try:
            core.load, core.last_turn_at = turns[-1].load or core.load, self._clock()
            if not turns[-1].is_failing:
                core.failing_since = None
            elif core.failing_since is None:
                core.failing_since = core.last_turn_at
            for turn in turns:
                self._report(turn)
            self._dispatch()
        except Exception:
            # A bug of ours: the readers that did not get their updates get an end when the core has ended.
            _log.critical("model %s: turns cannot be reported", self.model_name, exc_info=True)
            core.is_ready = False
            core.fault = "whose turns could not be reported"
            core.kill()

    def _report(self, turn: Turn) -> None:
        """Count a turn, and give its updates to the readers."""
        now, ended = self._clock(), list[Stream]()
        for update in turn.updates:
            stream = self._streams.get(update.request)
            if stream is None:  # it has ended while its core stopped
                continue
            stream.put(update.token_ids, update.result)
            if update.result is not None:
                ended.append(stream)
                del self._streams[update.request]
        for stream in ended:  # after every reader has its update
            request, result = stream.request, stream.result
            assert result is not None
            if (timer := self._timers.pop(request, None)) is not None:
                timer.cancel()
            if (core := stream.core) is None:
                self._queue.remove(request)
            else:
                core.num_slots_wanted -= request.num_slots
                held_seconds = now - core.requests.pop(request)
                num_steps = max(result.num_target_tokens // max(len(result.hypotheses), 1), 1)
                num_steps += len(request.prefix_ids) if self._feeds_prefix else 0
                self._queue.release(request, held_seconds, num_steps)
        self._record(turn)

    async def _start(self, core: CoreHandle) -> None:
        began = self._clock()
        await core.start(partial(self._turned, core), partial(self._ended, core))
        for place, weights in self._adapters.items():
            core.write_adapter(place, weights)
        slow_seconds = min(_TURN_PER_START * (self._clock() - began), _MOST_TURN_SECONDS)
        core.longest_turn_seconds = max(slow_seconds, _LEAST_TURN_SECONDS)
        core.requests, core.num_slots_wanted, core.fault = {}, 0, ""
        core.is_ready, core.failing_since, core.load = True, None, Load(0, 0, 0, 0)
        core.last_turn_at = self._clock()

    def _ended(self, core: CoreHandle, cause: str) -> None:
        """Answer the requests of a core that has ended by itself, and start it again."""
        core.is_ready, core.load = False, Load(0, 0, 0, 0)
        if self._is_stopping:
            return  # `stop` answers them
        if core.fault:
            cause = f"the server ended an instance {core.fault}"
        _log.critical(
            "model %s: %s; its %d requests end, and it is restarted",
            self.model_name,
            cause,
            len(core.requests),
        )
        task = asyncio.create_task(self._restart(core))
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)
        error = Unavailable(f"the engine of model {self.model_name} ended: send the request again")
        self._report(Turn(self._ends(core.requests, FinishReason.FAILED, error)))

    async def _restart(self, core: CoreHandle) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                self._report(Turn(num_core_restarts=1))
                await self._start(core)
            except Exception as error:
                _log.error("model %s: not started again: %s", self.model_name, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            else:
                _log.info("model %s: started again", self.model_name)
                self._dispatch()
                return

    async def _watch(self) -> None:
        """End cores that hang or keep failing; they are started again."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            now = self._clock()
            for core in self.cores:
                core.watch()
                if core.is_ready and (fault := _fault(core, now)):
                    core.fault = fault
                    core.kill()


def _fault(core: CoreHandle, now: float) -> str:
    """Returns why a core has to end, as `CoreHandle.fault`."""
    if core.failing_since is not None and now - core.failing_since > _MOST_FAILING_SECONDS:
        return f"whose steps failed for {now - core.failing_since:.0f} seconds"
    if not core.is_hung():
        return ""
    seconds = core.turn_seconds()
    if math.isinf(seconds):
        return f"that did not show life for {core.num_silent_rounds * _WATCH_SECONDS:.0f} seconds"
    return f"whose turn took {seconds:.0f} seconds, and at most {core.longest_turn_seconds:.0f} are usual"
