"""The queue of a model's requests, in front of its cores, fair to every caller.

Within a priority, callers take turns by deficit round robin (Shreedhar and Varghese 1996,
doi:10.1109/90.502236). Its unit here is a step of one slot.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from seq2seq_serve.server.config import QueueLimits
from seq2seq_serve.server.engine.request import Request
from seq2seq_serve.server.errors import DeadlineExceeded, Overloaded

MOST_URGENT, LEAST_URGENT = -10, 10

_RESIDENCE_WEIGHT = 0.1  # weight of the latest request in the averages
_LEAST_RETRY_SECONDS, _MOST_RETRY_SECONDS = 0.1, 30.0


@dataclass(eq=False, slots=True)
class _Line:
    """The waiting requests of one caller in one level, the oldest first, with the work of each.

    Attributes:
        balance: The work that the caller may still take in its turn; its turn ends when it is negative.
    """

    requests: dict[Request, int] = field(default_factory=dict)
    work: int = 0
    balance: int = 0


@dataclass(eq=False, slots=True)
class _Level:
    """The waiting requests of one priority.

    Attributes:
        ages: All of them, the oldest first.
        lines: By caller; the first one's turn it is. No line is empty.
    """

    ages: dict[Request, None] = field(default_factory=dict)
    lines: OrderedDict[str, _Line] = field(default_factory=OrderedDict)


class FairQueue:
    """The requests of a model that wait for a core.

    Owned by the engine; used on the event loop only.

    Args:
        num_slots: Slots of all cores.
        limits: Bounds of the queue.
        feeds_prefix: Whether steps read prefixes, one token each.

    Attributes:
        num_requests: The number of waiting requests.
        num_slots_wanted: The number of slots that they need.
    """

    def __init__(self, num_slots: int, limits: QueueLimits, *, feeds_prefix: bool = False) -> None:
        self.num_slots_wanted = 0
        self._num_slots = num_slots
        self._limits = limits
        self._feeds_prefix = feeds_prefix
        self._level_seconds = limits.aging_seconds / (LEAST_URGENT - MOST_URGENT)
        self._levels: dict[int, _Level] = {}  # by priority; none is empty
        self.num_requests = 0
        self._num_tokens = 0
        self._work = 0  # of all waiting requests
        self._turn_work = 1  # what a caller gets in each turn: the work of the largest request so far
        # Averages over all requests that had slots and have ended; 0 until the first one has.
        self._residence_seconds = 0.0
        self._residence_work = 0.0  # per slot

    def __iter__(self) -> Iterator[Request]:
        return itertools.chain.from_iterable([tuple(level.ages) for level in self._levels.values()])

    def add(self, requests: Sequence[Request], num_held: int, now: float) -> list[tuple[Request, Overloaded]]:
        """Add the requests of a call, all or none.

        If the queue is full, they displace requests that are less urgent, or of callers with more waiting
        work. Otherwise one caller could keep all others out.

        Args:
            requests: They have one caller, one priority and one deadline, and fit into an empty queue.
            num_held: Number of slots that the requests at the cores need.
            now: Monotonic seconds.

        Returns:
            The displaced requests, with their errors.

        Raises:
            DeadlineExceeded: The deadline has passed.
            Overloaded: The queue is full, or the deadline would pass before the last one gets its slots.
        """
        last = requests[-1]
        assert MOST_URGENT <= last.priority <= LEAST_URGENT
        if last.deadline is not None and now >= last.deadline:
            raise DeadlineExceeded("the deadline passed before the request came to the engine")
        if last.deadline is not None and now + self._longest_wait(requests, num_held) > last.deadline:
            wait_seconds = self._expected_wait(requests, num_held)
            if now + wait_seconds > last.deadline:
                text = f"a slot is expected in {wait_seconds:.1f} seconds, after the deadline"
                raise _overloaded(text, wait_seconds)
        displaced = []
        for request in self._make_room(requests, num_held):
            self.remove(request)
            text = (
                "the queue is full: a more urgent request, or one of a caller with less work, took its place"
            )
            wait_seconds = self._wait_seconds(request, self._work, num_held)
            displaced.append((request, _overloaded(text, wait_seconds)))
        for request in requests:
            level = self._levels.setdefault(request.priority, _Level())
            line = level.lines.setdefault(request.caller, _Line())
            work = request.cost(feeds_prefix=self._feeds_prefix).work
            level.ages[request] = None
            line.requests[request] = work
            self._count(request, line, work, 1)
        return displaced

    def pop(self, now: float) -> Request:
        """Remove the next request, and charge its caller; there must be one.

        It is the oldest of the caller whose turn it is, in the most urgent level. The level of a priority
        becomes more urgent while its oldest request waits.
        """

        def urgency(priority: int) -> tuple[int, float]:
            arrival = next(iter(self._levels[priority].ages)).arrival
            return max(priority - int((now - arrival) / self._level_seconds), MOST_URGENT), arrival

        levels = self._levels
        level = levels[min(levels, key=urgency)] if len(levels) > 1 else next(iter(levels.values()))
        line = next(iter(level.lines.values()))
        request, work = next(iter(line.requests.items()))
        self._turn_work = max(self._turn_work, work)
        line.balance -= work
        self.remove(request)
        while level.lines and (line := next(iter(level.lines.values()))).balance < 0:
            line.balance += self._turn_work
            level.lines.move_to_end(next(iter(level.lines)))
        return request

    def release(self, request: Request, held_seconds: float, num_steps: int) -> None:
        """Update the averages and the caller's balance by a taken request that has ended for any reason.

        Args:
            request: It has returned its slots.
            held_seconds: Time for which it had its slots.
            num_steps: Number of steps that ran in that time.
        """
        cost = request.cost(feeds_prefix=self._feeds_prefix)
        weight = _RESIDENCE_WEIGHT if self._residence_work else 1.0
        self._residence_seconds += weight * (held_seconds - self._residence_seconds)
        self._residence_work += weight * (cost.work / request.num_slots - self._residence_work)
        level = self._levels.get(request.priority)
        if level is not None and request.caller in level.lines:
            level.lines[request.caller].balance += request.num_slots * (cost.num_steps - num_steps)

    def remove(self, request: Request) -> bool:
        """Remove a request; returns whether it was waiting."""
        level = self._levels.get(request.priority)
        if level is None or request not in level.ages:
            return False
        line = level.lines[request.caller]
        del level.ages[request]
        self._count(request, line, line.requests.pop(request), -1)
        if not line.requests:
            del level.lines[request.caller]
        if not level.lines:
            del self._levels[request.priority]
        return True

    def _count(self, request: Request, line: _Line, work: int, sign: int) -> None:
        self.num_requests += sign
        self._num_tokens += sign * request.queue_tokens
        self.num_slots_wanted += sign * request.num_slots
        self._work += sign * work
        line.work += sign * work

    def _make_room(self, newcomers: Sequence[Request], num_held: int) -> list[Request]:
        """Returns the requests that newcomers displace; none if there is room for the newcomers.

        Requests that were sent to a core ahead of a free slot count as waiting. The least urgent ones leave
        first, among them the newest of the caller with the most waiting work. A caller never displaces
        requests of its own priority whose caller would have less work.

        Raises:
            Overloaded: Displacing all of these is not enough.
        """
        num_ahead = max(num_held - self._num_slots, 0)
        num_requests = self.num_requests + num_ahead + len(newcomers)
        num_tokens = self._num_tokens + sum(request.queue_tokens for request in newcomers)
        excess = self._limits.excess(num_requests, num_tokens)
        if not excess:
            return []
        displaced: list[Request] = []
        for request in self._displaceable(newcomers):
            displaced.append(request)
            num_requests, num_tokens = num_requests - 1, num_tokens - request.queue_tokens
            if not self._limits.excess(num_requests, num_tokens):
                return displaced
        text = f"the queue is full: with this call it would have {excess}"
        raise _overloaded(text, self._longest_wait(newcomers, num_held))

    def _displaceable(self, newcomers: Sequence[Request]) -> Iterator[Request]:
        """Yields the waiting requests that newcomers may displace, the first to leave first."""
        priority, caller = newcomers[0].priority, newcomers[0].caller
        for level in sorted((level for level in self._levels if level >= priority), reverse=True):
            lines = self._levels[level].lines
            left = {name: line.work for name, line in lines.items()}
            newest = {name: reversed(line.requests.items()) for name, line in lines.items()}
            own = left.pop(caller, 0) + self._work_of(newcomers) if level == priority else 0
            while left and left[name := max(left, key=left.__getitem__)] > own:
                request, work = next(newest[name])
                yield request
                left[name] -= work

    def _expected_wait(self, requests: Sequence[Request], num_held: int) -> float:
        """Returns the seconds until the last of a caller's requests would get its slots.

        Callers take turns, so the work ahead is the call's other requests, the caller's own waiting work, and
        up to the same amount of every other caller; of waiting work, only requests of at least this urgency.
        """
        *before, request = requests
        waiting = Counter[str]()
        for priority, level in self._levels.items():
            if priority <= request.priority:
                waiting.update({name: line.work for name, line in level.lines.items()})
        own = self._work_of(before) + waiting.pop(request.caller, 0)
        share = own + self._work_of([request])
        ahead = own + sum(min(work, share) for work in waiting.values())
        return self._wait_seconds(request, ahead, num_held)

    def _longest_wait(self, requests: Sequence[Request], num_held: int) -> float:
        """Returns the same as if all waiting requests came first, which takes no look at each caller."""
        return self._wait_seconds(requests[-1], self._work + self._work_of(requests[:-1]), num_held)

    def _wait_seconds(self, request: Request, ahead: int, num_held: int) -> float:
        """Returns the seconds until a request would get its slots after the work `ahead`.

        Little's law: the rate of returned slots is the number of slots over the mean time that one is held.
        """
        num_missing = request.num_slots + num_held - self._num_slots
        seconds = num_missing * self._residence_seconds
        if self._residence_work:
            seconds += ahead * self._residence_seconds / self._residence_work
        return max(seconds, 0.0) / self._num_slots

    def _work_of(self, requests: Sequence[Request]) -> int:
        """Returns the expected cost of requests in steps of one slot."""
        return sum(request.cost(feeds_prefix=self._feeds_prefix).work for request in requests)


def _overloaded(text: str, wait_seconds: float) -> Overloaded:
    retry_after = min(max(wait_seconds, _LEAST_RETRY_SECONDS), _MOST_RETRY_SECONDS)
    return Overloaded(text, retry_after_seconds=retry_after)
