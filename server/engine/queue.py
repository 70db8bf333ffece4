"""The queue of a model's requests, in front of its cores, fair to every caller.

Within a priority, each caller has a counter of the work that it was served, in steps of one slot, and the
caller whose counter is the lowest after its next request goes first. The counter of a caller that comes is
lifted to the present level, so that it has neither a credit nor a debt (self-clocked fair queueing, Golestani
1994, doi:10.1109/INFCOM.1994.337677; for language models Sheng et al. 2024, arXiv:2401.00588). Nobody knows
how long a target becomes, so the expected work of a request follows the requests that have ended. The length
of a caller's line is bounded by the room that is left, so that no caller can keep the others out (dynamic
thresholds, Choudhury and Hahne 1998, doi:10.1109/90.664262).
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from seq2seq_serve.server.config import QueueLimits
from seq2seq_serve.server.engine.request import Request
from seq2seq_serve.server.errors import DeadlineExceeded, Overloaded

_MOST_OF_ROOM = 8  # how many times the room that is left a caller may have waiting
_RESIDENCE_WEIGHT = 0.1  # weight of the latest request in the averages
_LEAST_RETRY_SECONDS, _MOST_RETRY_SECONDS = 0.1, 30.0
_FEW_PLACES = 64  # of no longer valid ones, which are kept until they are first


# The counter after the next request of a line, a number that no other place has, and the caller.
_Place = tuple[int, int, str]


@dataclass(eq=False, slots=True)
class _Line:
    """The waiting requests of one caller with one priority, the oldest first, with the work of each.

    Attributes:
        num_tokens: Their size.
        work: Their expected cost.
        served_work: The counter of the work that the caller was served.
        place: The only valid entry of this line in the heap of its level.
    """

    requests: OrderedDict[Request, int] = field(default_factory=OrderedDict)
    num_tokens: int = 0
    work: int = 0
    served_work: int = 0
    place: _Place | None = None


@dataclass(eq=False, slots=True)
class _Level:
    """The lines of the callers with requests of one priority. A line in it is never empty.

    Attributes:
        served_work: The greatest counter with which a request was taken; callers that come begin there.
        places: A heap of the places of the lines, and of places that are no longer valid.
        numbers: Of places, in the order of their creation.
    """

    lines: dict[str, _Line] = field(default_factory=dict)
    served_work: int = 0
    places: list[_Place] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def place(self, caller: str) -> None:
        """Order a line anew, after its first request or its counter has changed; remove an empty one."""
        line = self.lines[caller]
        if not line.requests:
            del self.lines[caller]
            return
        line.place = line.served_work + next(iter(line.requests.values())), next(self.numbers), caller
        heapq.heappush(self.places, line.place)
        if len(self.places) > 2 * len(self.lines) + _FEW_PLACES:
            self.places = [each.place for each in self.lines.values() if each.place is not None]
            heapq.heapify(self.places)


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
        self.num_requests = 0
        self.num_slots_wanted = 0
        self._num_slots = num_slots
        self._limits = limits
        self._feeds_prefix = feeds_prefix
        self._levels: dict[float, _Level] = {}  # by priority; none is empty
        self._num_tokens = 0
        self._taken: dict[Request, tuple[_Level, int]] = {}  # with the work that was charged
        # Averages over all requests that had slots and have ended; 0 until the first one has.
        self._residence_seconds = 0.0
        self._residence_work = 0.0  # expected, per slot
        self._num_steps = self._num_expected_steps = 0.0
        self._steps_share = 1.0

    def add(self, requests: Sequence[Request], num_held: int, now: float) -> None:
        """Add the requests of a call, all or none.

        Args:
            requests: They have one caller, one priority and one deadline, and fit into an empty queue.
            num_held: Number of slots that the requests at the cores need.
            now: Monotonic seconds.

        Raises:
            DeadlineExceeded: The deadline has passed.
            Overloaded: The queue is full, or what is left of it is for other callers, or the deadline would
                pass before the last one gets its slots.
        """
        last = requests[-1]
        if last.deadline is not None:
            if now >= last.deadline:
                raise DeadlineExceeded("the deadline passed before the request reached the engine")
            wait_seconds = self._expected_wait(requests, num_held)
            if now + wait_seconds > last.deadline:
                text = f"a slot is expected in {wait_seconds:.1f} seconds, after the deadline"
                raise _overloaded(text, wait_seconds)
        if problem := self._lack_of_room(requests, num_held):
            raise _overloaded(problem, self._expected_wait(requests, num_held))
        if last.priority not in self._levels:
            self._levels[last.priority] = _Level()
        level = self._levels[last.priority]
        line = level.lines.setdefault(last.caller, _Line(served_work=level.served_work))
        prefix, share = self._feeds_prefix, self._steps_share
        works = {request: request.cost(feeds_prefix=prefix, share=share).work for request in requests}
        num_tokens = sum(request.queue_tokens for request in requests)
        line.requests |= works
        line.work += sum(works.values())
        line.num_tokens += num_tokens
        self._num_tokens += num_tokens
        self.num_requests += len(requests)
        self.num_slots_wanted += sum(request.num_slots for request in requests)
        if line.place is None:
            level.place(last.caller)

    def pop(self) -> Request:
        """Remove the next request, and charge its caller; there must be one.

        It is the oldest of the caller whose turn it is, in the most urgent priority.
        """
        level = self._levels[min(self._levels)]
        while (line := level.lines.get(level.places[0][-1])) is None or line.place is not level.places[0]:
            heapq.heappop(level.places)
        request, work = next(iter(line.requests.items()))
        line.served_work += work
        self._taken[request] = level, work
        level.served_work = max(level.served_work, line.served_work)
        self.remove(request)
        return request

    def release(self, request: Request, held_seconds: float, num_steps: int) -> None:
        """Update the averages and the caller's counter by a taken request that has ended for any reason.

        Args:
            request: It has returned its slots.
            held_seconds: Time for which it had its slots.
            num_steps: Steps that ran in that time; one that selected drafted tokens counts for each.
        """
        cost = request.cost(feeds_prefix=self._feeds_prefix)
        charged_level, charged_work = self._taken.pop(request)
        weight = _RESIDENCE_WEIGHT if self._residence_work else 1.0
        self._residence_seconds += weight * (held_seconds - self._residence_seconds)
        self._residence_work += weight * (charged_work / request.num_slots - self._residence_work)
        self._num_steps += weight * (num_steps - self._num_steps)
        self._num_expected_steps += weight * (cost.num_steps - self._num_expected_steps)
        self._steps_share = self._num_steps / self._num_expected_steps
        difference = cost.work + request.num_slots * (num_steps - cost.num_steps) - charged_work
        level = self._levels.get(request.priority)
        if level is None or request.caller not in level.lines:
            return
        if level is charged_level or difference > 0:  # counters of a later level begin anew
            level.lines[request.caller].served_work += difference
            level.place(request.caller)

    def remove(self, request: Request) -> None:
        """Remove a waiting request."""
        level = self._levels[request.priority]
        line = level.lines[request.caller]
        is_first = next(iter(line.requests)) is request
        line.work -= line.requests.pop(request)
        line.num_tokens -= request.queue_tokens
        self._num_tokens -= request.queue_tokens
        self.num_requests -= 1
        self.num_slots_wanted -= request.num_slots
        if is_first:
            level.place(request.caller)
        if not level.lines:
            del self._levels[request.priority]

    def excess(self, num_requests: int, num_tokens: int, unit: str = "requests") -> str:
        """Returns the exceeded limit as a phrase of an error message; empty if none is exceeded.

        Args:
            num_requests: The number of requests that would wait.
            num_tokens: The number of their source tokens.
            unit: What the caller sees as a request.
        """
        limits = self._limits
        if num_requests > limits.max_waiting_requests:
            return f"{num_requests} {unit}, and at most {limits.max_waiting_requests} may wait"
        if num_tokens > limits.max_waiting_tokens:
            return f"{num_tokens} source tokens, and at most {limits.max_waiting_tokens} may wait"
        return ""

    def _lack_of_room(self, newcomers: Sequence[Request], num_held: int) -> str:
        """Returns why newcomers may not wait; empty if they may.

        Requests that were sent to a core ahead of a free slot count as waiting. The requests of a call may
        wait if they might come one by one, or if no others wait. A caller's own requests of a lower priority
        do not count against it, so that bulk work leaves room for what is urgent.
        """
        priority, caller = newcomers[0].priority, newcomers[0].caller
        num_requests = self.num_requests + max(num_held - self._num_slots, 0)
        num_new_tokens = sum(request.queue_tokens for request in newcomers)
        if excess := self.excess(num_requests + len(newcomers), self._num_tokens + num_new_tokens):
            return f"the queue is full: with this call it would have {excess}"
        if not self.num_requests:
            return ""
        levels = [level.lines for key, level in self._levels.items() if key <= priority]
        own = [lines[caller] for lines in levels if caller in lines]
        num_own = sum(len(line.requests) for line in own)
        num_own_tokens = sum(line.num_tokens for line in own)
        room = self._limits.max_waiting_requests - num_requests
        token_room = self._limits.max_waiting_tokens - self._num_tokens
        num_before, num_tokens_before = len(newcomers) - 1, num_new_tokens - newcomers[-1].queue_tokens
        if num_own + num_before <= _MOST_OF_ROOM * (room - num_before) and (
            num_own_tokens + num_tokens_before <= _MOST_OF_ROOM * (token_room - num_tokens_before)
        ):
            return ""
        return (
            f"the queue is full for this caller: {num_own} of its requests wait, of {num_own_tokens} source "
            f"tokens, and the room for {room} more, of {token_room} tokens, is for others"
        )

    def _expected_wait(self, requests: Sequence[Request], num_held: int) -> float:
        """Returns the seconds until the last of a caller's requests would get its slots.

        Callers take turns, so the work ahead is the call's other requests, the caller's own waiting work, and
        up to the same amount of every other caller; of waiting work, only requests of at least this urgency.
        By Little's law, the rate of returned slots is their number over the mean time that one is held.
        """
        *before, request = requests
        num_missing = request.num_slots + num_held - self._num_slots
        if num_missing <= 0 and not (before or self.num_requests):
            return 0.0
        waiting = Counter[str]()
        for priority, level in self._levels.items():
            if priority <= request.priority:
                waiting.update({name: line.work for name, line in level.lines.items()})
        own = self._work_of(before) + waiting.pop(request.caller, 0)
        share = own + self._work_of([request])
        ahead = own + sum(min(work, share) for work in waiting.values())
        seconds = num_missing * self._residence_seconds
        if self._residence_work:
            seconds += ahead * self._residence_seconds / self._residence_work
        return max(seconds, 0.0) / self._num_slots

    def _work_of(self, requests: Sequence[Request]) -> int:
        """Returns the expected cost of requests in steps of one slot."""
        prefix, share = self._feeds_prefix, self._steps_share
        return sum(request.cost(feeds_prefix=prefix, share=share).work for request in requests)


def _overloaded(text: str, wait_seconds: float) -> Overloaded:
    retry_after = min(max(wait_seconds, _LEAST_RETRY_SECONDS), _MOST_RETRY_SECONDS)
    return Overloaded(text, retry_after_seconds=retry_after)
