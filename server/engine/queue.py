"""The queue of the requests that wait for a slot, fair to every caller.

Among the most urgent requests, the caller that has been served least comes first. This is the virtual token
counter of Sheng et al. 2024 (arXiv:2401.00588); it counts slots times steps here instead of tokens.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from seq2seq_serve.server.config import QueueLimits
from seq2seq_serve.server.engine.records import Request
from seq2seq_serve.server.errors import DeadlineExceeded, Overloaded

MOST_URGENT, LEAST_URGENT = -10, 10

_RESIDENCE_WEIGHT = 0.1  # weight of the latest request in the averages
_LEAST_RETRY_SECONDS, _MOST_RETRY_SECONDS = 0.1, 30.0
_MAX_STALE = 16  # a heap may contain one outdated entry for each valid one, and this number more

Item = TypeVar("Item")


class Ranking(Generic[Item]):
    """Orders items by keys that may change, the least first.

    Outdated entries of the heap are dropped when they reach its top.
    """

    def __init__(self) -> None:
        self._keys: dict[Item, tuple[float, int]] = {}
        self._heap: list[tuple[tuple[float, int], Item]] = []

    def put(self, item: Item, value: float, place: int) -> None:
        """Set the key of an item; no two items may have the same key."""
        key = self._keys[item] = (value, place)
        heapq.heappush(self._heap, (key, item))
        if len(self._heap) > 2 * len(self._keys) + _MAX_STALE:
            self._heap = [(key, item) for item, key in self._keys.items()]
            heapq.heapify(self._heap)

    def discard(self, item: Item) -> None:
        """Remove an item if it is contained."""
        self._keys.pop(item, None)

    def first(self) -> tuple[tuple[float, int], Item] | None:
        """Returns the least key with its item; None if empty."""
        while self._heap and self._keys.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None


@dataclass(eq=False, slots=True)
class _Caller:
    """A caller with waiting or running requests.

    Attributes:
        served: Work of its admitted requests; a new caller starts with the average.
        num_running: Number of its requests that have slots.
        running: Work of its running requests.
        waiting: Work of its waiting requests.
        lines: Its waiting requests by their priority; no line is empty.
    """

    served: float
    num_running: int = 0
    running: int = 0
    waiting: int = 0
    lines: dict[int, _Line] = field(default_factory=dict)

    @property
    def held(self) -> int:
        """The work of all its requests."""
        return self.waiting + self.running

    def waiting_before(self, priority: int) -> int:
        """Returns the work of its waiting requests with at least this urgency."""
        return sum(line.work for level, line in self.lines.items() if level <= priority)


@dataclass(eq=False, slots=True)
class _Line:
    """The waiting requests of one caller and priority.

    Attributes:
        requests: The requests with their places in the order of arrival, the oldest first.
        work: The sum of their work.
    """

    caller: _Caller
    requests: OrderedDict[Request, int] = field(default_factory=OrderedDict)
    work: int = 0


class FairQueue:
    """The requests that wait for slots, and the past and present work of each caller.

    Owned by the scheduler, which calls it under its lock. Invariant: every caller in it has a waiting or a
    running request.

    Args:
        num_slots: Slots of the engine.
        limits: Bounds of the queue.
        feeds_prefix: Whether the engine's steps read prefixes, one token each.

    Attributes:
        num_slots_wanted: The number of slots that all waiting requests need.
    """

    def __init__(self, num_slots: int, limits: QueueLimits, *, feeds_prefix: bool = False) -> None:
        self.num_slots_wanted = 0
        self._num_slots = num_slots
        self._limits = limits
        self._feeds_prefix = feeds_prefix
        self._level_seconds = limits.aging_seconds / (LEAST_URGENT - MOST_URGENT)
        self._callers: dict[str, _Caller] = {}
        self._waiting: dict[Request, _Line] = {}
        self._works: dict[Request, int] = {}  # of the waiting and the running requests
        # Lines by their priority, ranked by their callers' served work, then by their oldest request.
        self._levels: defaultdict[int, Ranking[_Line]] = defaultdict(Ranking)
        self._order = itertools.count()
        self._num_tokens = 0
        self._work = 0  # sum over all waiting requests
        self._served = 0.0  # grows by the mean work per caller
        # Averages over all requests that had slots and have ended; 0 until the first one has.
        self._residence_seconds = 0.0
        self._residence_work = 0.0  # per slot

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._waiting))

    def add(
        self, requests: Sequence[Request], num_reserved: int, now: float
    ) -> list[tuple[Request, Overloaded]]:
        """Add the requests of a call, all or none.

        If the queue is full, they displace requests that would be served after them, if that makes room.

        Args:
            requests: They have one caller, one priority and one deadline, and fit into an empty queue.
            num_reserved: Number of slots in use.
            now: Monotonic seconds.

        Returns:
            The displaced requests, with their errors.

        Raises:
            DeadlineExceeded: The deadline has passed.
            Overloaded: The queue is full, or the deadline would pass before the last one gets its slots.
        """
        last = requests[-1]
        assert MOST_URGENT <= last.priority <= LEAST_URGENT
        assert not self._limits.excess(len(requests), _num_tokens(requests)), "more than an empty queue takes"
        if last.deadline is not None and now >= last.deadline:
            raise DeadlineExceeded("the deadline passed before the request came to the engine")
        # Most deadlines are met even behind all waiting requests. Only otherwise the fair order is computed.
        ahead = self._work + self._work_of(*requests[:-1])
        longest_seconds = self._wait_seconds(last, ahead, num_reserved)
        if last.deadline is not None and now + longest_seconds > last.deadline:
            wait_seconds = self._expected_wait(requests, num_reserved)
            if now + wait_seconds > last.deadline:
                text = f"a slot is expected in {wait_seconds:.1f} seconds, after the deadline"
                raise _overloaded(text, wait_seconds)
        displaced = []
        for request in self._make_room(requests, num_reserved, now):
            self.remove(request)
            text = (
                "the queue is full: a more urgent request, or one of a caller with less work, took its place"
            )
            wait_seconds = self._wait_seconds(request, self._work, num_reserved)
            displaced.append((request, _overloaded(text, wait_seconds)))
        for request in requests:
            self._insert(request)
        return displaced

    def first(self, now: float) -> Request | None:
        """Returns the next request: among the most urgent, one of the caller that was served least."""
        ranked: list[tuple[int, float, int, Request]] = []
        for level in self._levels.values() if self._waiting else ():
            if (found := level.first()) is not None:
                (served, place), line = found
                request = next(iter(line.requests))
                ranked.append((self._urgency(request, now), served, place, request))
        return min(ranked)[-1] if ranked else None

    def take(self, request: Request) -> None:
        """Remove a waiting request that gets its slots, and count it as running."""
        caller = self._waiting[request].caller
        caller.num_running += 1
        work = self._works[request]
        caller.running += work
        self._withdraw(request)
        self._serve(caller, work)

    def release(self, request: Request, held_seconds: float, num_steps: int) -> None:
        """Update the averages and the caller's work by a taken request that has ended for any reason.

        Args:
            request: It has returned its slots.
            held_seconds: Time for which it had its slots.
            num_steps: Number of steps that ran in that time.
        """
        caller = self._callers[request.caller]
        work = self._works.pop(request)
        weight = _RESIDENCE_WEIGHT if self._residence_work else 1.0
        self._residence_seconds += weight * (held_seconds - self._residence_seconds)
        self._residence_work += weight * (work / request.num_slots - self._residence_work)
        caller.num_running -= 1
        caller.running -= work
        num_expected = request.expected_steps(feeds_prefix=self._feeds_prefix)
        self._serve(caller, request.num_slots * (num_steps - num_expected))
        self._forget_idle(request.caller)

    def remove(self, request: Request) -> bool:
        """Remove a request; returns whether it was waiting."""
        if request not in self._waiting:
            return False
        self._withdraw(request)
        del self._works[request]
        return True

    def _withdraw(self, request: Request) -> None:
        line = self._waiting.pop(request)
        caller = line.caller
        del line.requests[request]
        self._count(request, line, -1)
        if not line.requests:
            del caller.lines[request.priority]
            self._levels[request.priority].discard(line)
        self._rank(caller)
        self._forget_idle(request.caller)

    def _insert(self, request: Request) -> None:
        caller = self._callers.setdefault(request.caller, _Caller(self._served))
        if not caller.lines:
            caller.served = max(caller.served, self._served)  # an idle caller does not save up service
        line = self._waiting[request] = caller.lines.setdefault(request.priority, _Line(caller))
        line.requests[request] = next(self._order)
        self._works[request] = request.work(feeds_prefix=self._feeds_prefix)
        self._count(request, line, 1)
        self._rank(caller)

    def _count(self, request: Request, line: _Line, sign: int) -> None:
        work = sign * self._works[request]
        self._num_tokens += sign * request.queue_tokens
        self.num_slots_wanted += sign * request.num_slots
        self._work += work
        line.work += work
        line.caller.waiting += work

    def _work_of(self, *requests: Request) -> int:
        """Returns the expected cost of requests in steps of one slot."""
        return sum(request.work(feeds_prefix=self._feeds_prefix) for request in requests)

    def _serve(self, caller: _Caller, work: int) -> None:
        """Charge work to a caller; negative work refunds work that was charged and not done."""
        caller.served += work
        self._served += work / len(self._callers)
        self._rank(caller)

    def _rank(self, caller: _Caller) -> None:
        """Update the rank of a caller's lines."""
        for priority, line in caller.lines.items():
            oldest = next(iter(line.requests))
            self._levels[priority].put(line, caller.served, line.requests[oldest])

    def _forget_idle(self, name: str) -> None:
        caller = self._callers[name]
        if not caller.lines and not caller.num_running:
            del self._callers[name]

    def _urgency(self, request: Request, now: float) -> int:
        """Returns the priority, lowered by the waiting time down to the most urgent one."""
        return max(request.priority - int((now - request.arrival) / self._level_seconds), MOST_URGENT)

    def _make_room(self, newcomers: Sequence[Request], num_reserved: int, now: float) -> list[Request]:
        """Returns the requests that newcomers displace; none if there is room for the newcomers.

        Raises:
            Overloaded: Displacing all requests that would be served after the newcomers is not enough.
        """
        num_requests = len(self._waiting) + len(newcomers)
        num_tokens = self._num_tokens + _num_tokens(newcomers)
        excess = self._limits.excess(num_requests, num_tokens)
        if not excess:
            return []
        displaced: list[Request] = []
        for request in self._behind(newcomers, now):
            displaced.append(request)
            num_requests, num_tokens = num_requests - 1, num_tokens - request.queue_tokens
            if not self._limits.excess(num_requests, num_tokens):
                return displaced
        text = f"the queue is full: with this call it would have {excess}"
        ahead = self._work + self._work_of(*newcomers[:-1])
        raise _overloaded(text, self._wait_seconds(newcomers[-1], ahead, num_reserved))

    def _behind(self, newcomers: Sequence[Request], now: float) -> Iterator[Request]:
        """Yields the waiting requests that would be served after the newcomers, in reverse order of service.

        The least urgent come first, among them the requests of the caller with the most work, among these the
        newest. Each is compared as if the requests yielded before had left and all newcomers were queued. The
        newcomers' own caller counts as without work, so that they displace only its less urgent requests.
        """
        own = self._callers.get(newcomers[0].caller)
        held = self._work_of(*newcomers) + (own.held if own is not None else 0)
        bound = (self._urgency(newcomers[0], now), held)
        left = Counter[_Caller]()  # by caller, the work of the requests yielded so far
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
                if (priority, caller.held) > bound:  # no request of the line ranks above this
                    older = reversed(line.requests)
                    push(next(older), line, older)
        while heap:
            urgency, held, _, request, line, older = heapq.heappop(heap)
            if (-urgency, -held) != rank(request, line):  # its caller has less work by now
                push(request, line, older)
                continue
            yield request
            left[line.caller] += self._works[request]
            push(next(older, None), line, older)

    def _expected_wait(self, requests: Sequence[Request], num_reserved: int) -> float:
        """Returns the seconds until the last of a caller's requests would get its slots.

        Callers are served in turn, so the work ahead is the call's other requests, the caller's own waiting
        work, and up to the same amount of every other caller; of waiting work, only requests of at least this
        urgency.
        """
        *before, request = requests
        caller = self._callers.get(request.caller)
        own = self._work_of(*before) + (caller.waiting_before(request.priority) if caller is not None else 0)
        share = own + self._work_of(request)
        ahead = own + sum(
            min(other.waiting_before(request.priority), share)
            for other in self._callers.values()
            if other is not caller
        )
        return self._wait_seconds(request, ahead, num_reserved)

    def _wait_seconds(self, request: Request, ahead: int, num_reserved: int) -> float:
        """Returns the seconds until a request would get its slots after the work `ahead`.

        Little's law: the rate of returned slots is the number of slots over the mean time that one is held.
        """
        num_missing = request.num_slots + num_reserved - self._num_slots
        seconds = num_missing * self._residence_seconds
        if self._residence_work:
            seconds += ahead * self._residence_seconds / self._residence_work
        return max(seconds, 0.0) / self._num_slots


def _num_tokens(requests: Sequence[Request]) -> int:
    return sum(request.queue_tokens for request in requests)


def _overloaded(text: str, wait_seconds: float) -> Overloaded:
    retry_after = min(max(wait_seconds, _LEAST_RETRY_SECONDS), _MOST_RETRY_SECONDS)
    return Overloaded(text, retry_after_seconds=retry_after)
