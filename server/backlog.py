"""The queue of the requests that wait for a slot, fair to every caller.

Of the most urgent requests, those of the caller that has been served least come first. This is the virtual
token counter of Sheng et al. 2024 (arXiv:2401.00588), which counts slots times steps here instead of tokens.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from server.errors import DeadlineExceeded, Overloaded
from server.records import Request

MOST_URGENT, LEAST_URGENT = -10, 10

_RESIDENCE_WEIGHT = 0.1  # of the latest request in the averages
_LEAST_RETRY_SECONDS, _MOST_RETRY_SECONDS = 0.1, 30.0
_MAX_STALE = 16  # entries of a heap that may be out of date, beyond the number of those that are not

Item = TypeVar("Item")


@dataclass(frozen=True)
class QueueLimits:
    """How requests wait for a slot of one engine.

    Attributes:
        max_waiting_requests: Beyond it a request is refused, or takes the place of another one.
        max_waiting_tokens: The same bound for the tokens of their sources together.
        aging_seconds: Waiting time that outweighs any difference of priority.
    """

    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 262_144
    aging_seconds: float = 20.0

    def __post_init__(self) -> None:
        for name in ("max_waiting_requests", "max_waiting_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, and must be at least 1")
        if self.aging_seconds <= 0:
            raise ValueError(f"aging_seconds is {self.aging_seconds}, and must be above 0")

    def excess(self, num_requests: int, num_tokens: int) -> str:
        """Returns the limit that these numbers exceed, in words; empty where all of it may wait."""
        if num_requests > self.max_waiting_requests:
            return f"{num_requests} requests, and at most {self.max_waiting_requests} may wait"
        if num_tokens > self.max_waiting_tokens:
            return f"{num_tokens} source tokens, and at most {self.max_waiting_tokens} may wait"
        return ""


class _Ranking(Generic[Item]):
    """Items by keys that may change, the least first.

    Owned by a backlog. Entries of the heap that are out of date are dropped when they come up.
    """

    def __init__(self) -> None:
        self._keys: dict[Item, tuple[float, int]] = {}
        self._heap: list[tuple[tuple[float, int], Item]] = []

    def put(self, item: Item, value: float, place: int) -> None:
        """Give an item a key, which no other one has."""
        key = self._keys[item] = (value, place)
        heapq.heappush(self._heap, (key, item))
        if len(self._heap) > 2 * len(self._keys) + _MAX_STALE:
            self._heap = [(key, item) for item, key in self._keys.items()]
            heapq.heapify(self._heap)

    def discard(self, item: Item) -> None:
        """Forget an item, if it is there."""
        self._keys.pop(item, None)

    def first(self) -> tuple[tuple[float, int], Item] | None:
        """The least key with its item."""
        while self._heap and self._keys.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None


@dataclass(eq=False, slots=True)
class _Caller:
    """A caller with requests that wait or run.

    Attributes:
        served: Work of its admitted requests, on a scale that all callers share.
        num_running: Requests that have slots.
        running: Work of its running requests.
        waiting: Work of its waiting requests.
        lines: Its waiting requests by their priority, none of them empty.
    """

    served: float
    num_running: int = 0
    running: int = 0
    waiting: int = 0
    lines: dict[int, _Line] = field(default_factory=dict)

    @property
    def held(self) -> int:
        """Work of all its requests."""
        return self.waiting + self.running

    def waiting_before(self, priority: int) -> int:
        """Work of the waiting requests that are as urgent as this priority, or more."""
        return sum(line.work for level, line in self.lines.items() if level <= priority)


@dataclass(eq=False, slots=True)
class _Line:
    """The waiting requests of one caller and priority.

    Attributes:
        requests: The requests with their places in the order of arrival, the oldest first.
        work: Work of all of them.
    """

    caller: _Caller
    requests: OrderedDict[Request, int] = field(default_factory=OrderedDict)
    work: int = 0


class Backlog:
    """The requests that wait, with what each caller has and has had.

    Owned by the scheduler; thread-safe, so that requests can be added while a step runs. Invariants: a
    request is in it from its acceptance until it is taken or ends; a caller without any is forgotten.

    Args:
        num_slots: Slots of the engine.
        limits: Bounds of the queue.

    Attributes:
        num_slots_wanted: Slots of all waiting requests together.
    """

    def __init__(self, num_slots: int, limits: QueueLimits) -> None:
        self.num_slots_wanted = 0
        self._num_slots = num_slots
        self._limits = limits
        self._level_seconds = limits.aging_seconds / (LEAST_URGENT - MOST_URGENT)
        self._lock = threading.Lock()
        self._callers: dict[str, _Caller] = {}
        self._waiting: dict[Request, _Line] = {}
        self._running: dict[Request, _Caller] = {}
        # Lines by their priority, ranked by the work that their callers were served, then by their oldest.
        self._levels = {each: _Ranking[_Line]() for each in range(MOST_URGENT, LEAST_URGENT + 1)}
        self._deadlines = _Ranking[Request]()
        self._displaced: list[tuple[Request, Overloaded]] = []
        self._order = itertools.count()
        self._num_tokens = 0
        self._work = 0  # of all that wait
        self._served = 0.0  # by callers on average: where a new one begins
        # Averages over the requests that had slots, however they ended; 0 until one has.
        self._residence_seconds = 0.0
        self._residence_work = 0.0  # of a slot

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether anything waits, or has yet to be reported as displaced."""
        return bool(self._waiting or self._displaced)

    def add(self, requests: Sequence[Request], num_reserved: int, now: float) -> None:
        """Take in the requests of a call, all or none.

        Where the queue is full, others that would be served after them are displaced, if that makes room.

        Args:
            requests: Of one caller, priority and deadline; an empty queue would take them all.
            num_reserved: Slots that are taken.
            now: Monotonic seconds.

        Raises:
            DeadlineExceeded: The deadline has passed.
            Overloaded: The queue is full, or the deadline would pass before there are slots for the last one.
        """
        last = requests[-1]
        assert MOST_URGENT <= last.priority <= LEAST_URGENT
        assert not self._limits.excess(len(requests), _num_tokens(requests)), "more than an empty queue takes"
        if last.deadline is not None and now >= last.deadline:
            raise DeadlineExceeded("the deadline passed before the request came to the engine")
        with self._lock:
            # Most deadlines are met even after all that waits, which is known without asking each caller.
            ahead = self._work + _work(requests[:-1])
            longest_seconds = self._wait_seconds(last, ahead, num_reserved)
            if last.deadline is not None and now + longest_seconds > last.deadline:
                wait_seconds = self._expected_wait(requests, num_reserved)
                if now + wait_seconds > last.deadline:
                    text = f"a slot is expected in {wait_seconds:.1f} seconds, after the deadline"
                    raise _overloaded(text, wait_seconds)
            for displaced in self._make_room(requests, num_reserved, now):
                self._remove(displaced)
                text = "the queue is full, and a request that is more urgent, or of a caller with less, came"
                error = _overloaded(text, self._wait_seconds(displaced, self._work, num_reserved))
                self._displaced.append((displaced, error))
            for request in requests:
                self._insert(request)

    def first(self, now: float) -> Request | None:
        """The request that is next: the most urgent, of these one of the caller that was served least."""
        if not self._waiting:
            return None
        ranked: list[tuple[int, float, int, Request]] = []
        with self._lock:
            for level in self._levels.values():
                if (found := level.first()) is not None:
                    (served, place), line = found
                    request = next(iter(line.requests))
                    ranked.append((self._urgency(request, now), served, place, request))
        return min(ranked)[-1] if ranked else None

    def take(self, request: Request) -> bool:
        """Let a request go on to its slots; false where it does not wait any more."""
        with self._lock:
            line = self._waiting.get(request)
            if line is None:
                return False
            caller = self._running[request] = line.caller
            caller.num_running += 1
            caller.running += request.work
            self._remove(request)
            self._serve(caller, request.work)
        return True

    def release(self, request: Request, held_seconds: float, num_steps: int) -> None:
        """Learn from a request that had slots and has ended, in whatever way; others are ignored.

        Args:
            request: One that has ended.
            held_seconds: Time for which it had its slots.
            num_steps: Steps that ran in that time.
        """
        with self._lock:
            caller = self._running.pop(request, None)
            if caller is None:
                return
            weight = _RESIDENCE_WEIGHT if self._residence_work else 1.0
            self._residence_seconds += weight * (held_seconds - self._residence_seconds)
            self._residence_work += weight * (request.work / request.num_slots - self._residence_work)
            caller.num_running -= 1
            caller.running -= request.work
            self._serve(caller, request.num_slots * (num_steps - request.expected_steps))
            self._forget_idle(request.caller)

    def remove(self, request: Request) -> bool:
        """Take a request out; false where it does not wait."""
        with self._lock:
            return self._remove(request)

    def expire(self, now: float) -> list[Request]:
        """Take out the requests whose deadlines have passed."""
        expired = []
        with self._lock:
            while (found := self._deadlines.first()) is not None and found[0][0] <= now:
                expired.append(found[1])
                self._remove(found[1])
        return expired

    def displaced(self) -> list[tuple[Request, Overloaded]]:
        """Returns the requests that newcomers have displaced since the last call, with their errors."""
        with self._lock:
            displaced, self._displaced = self._displaced, []
        return displaced

    def clear(self) -> list[Request]:
        """Take all out."""
        with self._lock:
            requests = list(self._waiting)
            for request in requests:
                self._remove(request)
        return requests

    def _insert(self, request: Request) -> None:
        caller = self._callers.setdefault(request.caller, _Caller(self._served))
        if not caller.lines:
            caller.served = max(caller.served, self._served)  # nothing is saved up by not asking
        line = self._waiting[request] = caller.lines.setdefault(request.priority, _Line(caller))
        place = line.requests[request] = next(self._order)
        if request.deadline is not None:
            self._deadlines.put(request, request.deadline, place)
        self._count(request, line, 1)
        self._rank(caller)

    def _remove(self, request: Request) -> bool:
        """Take a request out; false where it does not wait."""
        line = self._waiting.pop(request, None)
        if line is None:
            return False
        caller = line.caller
        del line.requests[request]
        self._deadlines.discard(request)
        self._count(request, line, -1)
        if not line.requests:
            del caller.lines[request.priority]
            self._levels[request.priority].discard(line)
        self._rank(caller)
        self._forget_idle(request.caller)
        return True

    def _count(self, request: Request, line: _Line, sign: int) -> None:
        self._num_tokens += sign * request.source_length
        self.num_slots_wanted += sign * request.num_slots
        self._work += sign * request.work
        line.work += sign * request.work
        line.caller.waiting += sign * request.work

    def _serve(self, caller: _Caller, work: int) -> None:
        """Charge work to a caller, or give some back that was charged and not done."""
        caller.served += work
        self._served += work / len(self._callers)
        self._rank(caller)

    def _rank(self, caller: _Caller) -> None:
        """Put a caller's lines where they belong now."""
        for priority, line in caller.lines.items():
            oldest = next(iter(line.requests))
            self._levels[priority].put(line, caller.served, line.requests[oldest])

    def _forget_idle(self, name: str) -> None:
        caller = self._callers[name]
        if not caller.lines and not caller.num_running:
            del self._callers[name]

    def _urgency(self, request: Request, now: float) -> int:
        """The priority as it is by now; waiting makes a request more urgent, up to the most urgent."""
        return max(request.priority - int((now - request.arrival) / self._level_seconds), MOST_URGENT)

    def _make_room(self, newcomers: Sequence[Request], num_reserved: int, now: float) -> list[Request]:
        """Returns the requests that newcomers displace; none while there is room for all of them.

        Raises:
            Overloaded: Those would be served before the newcomers, or are not enough.
        """
        num_requests = len(self._waiting) + len(newcomers)
        num_tokens = self._num_tokens + _num_tokens(newcomers)
        excess = self._limits.excess(num_requests, num_tokens)
        if not excess:
            return []
        displaced: list[Request] = []
        for request in self._behind(newcomers, now):
            displaced.append(request)
            num_requests, num_tokens = num_requests - 1, num_tokens - request.source_length
            if not self._limits.excess(num_requests, num_tokens):
                return displaced
        text = f"the queue is full: with this call it would have {excess}"
        ahead = self._work + _work(newcomers[:-1])
        raise _overloaded(text, self._wait_seconds(newcomers[-1], ahead, num_reserved))

    def _behind(self, newcomers: Sequence[Request], now: float) -> Iterator[Request]:
        """Yields the waiting requests that would be served after newcomers, the last to be served first.

        They are the least urgent, of these those of the caller that holds most, of these the newest; each is
        compared as if those before it had left and all newcomers had come. Beside its own newcomers a caller
        counts as holding nothing, so that they go before its less urgent requests only.
        """
        own = self._callers.get(newcomers[0].caller)
        held = _work(newcomers) + (own.held if own is not None else 0)
        bound = (self._urgency(newcomers[0], now), held)
        left = Counter[_Caller]()  # work of those before
        heap: list[tuple[int, int, int, Request, _Line, Iterator[Request]]] = []

        def rank(request: Request, line: _Line) -> tuple[int, int]:
            caller = line.caller
            return self._urgency(request, now), 0 if caller is own else caller.held - left[caller]

        def push(request: Request | None, line: _Line, older: Iterator[Request]) -> None:
            if request is not None and (its := rank(request, line)) > bound:
                urgency, held = its
                heapq.heappush(heap, (-urgency, -held, -line.requests[request], request, line, older))

        for caller in self._callers.values():
            for priority, line in caller.lines.items():
                if (priority, caller.held) > bound:  # which no request of the line is above
                    older = reversed(line.requests)
                    push(next(older), line, older)
        while heap:
            urgency, held, _, request, line, older = heapq.heappop(heap)
            if (-urgency, -held) != rank(request, line):  # its caller holds less by now
                push(request, line, older)
                continue
            yield request
            left[line.caller] += request.work
            push(next(older, None), line, older)

    def _expected_wait(self, requests: Sequence[Request], num_reserved: int) -> float:
        """Seconds until the last of a caller's requests would get its slots, with callers served in turn.

        The work ahead is the other requests, what the caller itself has waiting, and as much of every other
        caller, in both cases only requests that are as urgent or more.
        """
        *before, request = requests
        caller = self._callers.get(request.caller)
        own = _work(before) + (caller.waiting_before(request.priority) if caller is not None else 0)
        share = own + request.work
        ahead = own + sum(
            min(other.waiting_before(request.priority), share)
            for other in self._callers.values()
            if other is not caller
        )
        return self._wait_seconds(request, ahead, num_reserved)

    def _wait_seconds(self, request: Request, ahead: int, num_reserved: int) -> float:
        """Seconds until a request would get its slots after the work that is ahead.

        By Little's law: slots are given back at the rate of all slots over the time that a request has one.
        """
        num_missing = request.num_slots + num_reserved - self._num_slots
        seconds = num_missing * self._residence_seconds
        if self._residence_work:
            seconds += ahead * self._residence_seconds / self._residence_work
        return max(seconds, 0.0) / self._num_slots


def _num_tokens(requests: Sequence[Request]) -> int:
    return sum(request.source_length for request in requests)


def _work(requests: Sequence[Request]) -> int:
    return sum(request.work for request in requests)


def _overloaded(text: str, wait_seconds: float) -> Overloaded:
    retry_after = min(max(wait_seconds, _LEAST_RETRY_SECONDS), _MOST_RETRY_SECONDS)
    return Overloaded(text, retry_after_seconds=retry_after)
