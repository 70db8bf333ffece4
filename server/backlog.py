"""Who was accepted and has no slot yet, and whether one more may wait."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from server.errors import DeadlineExceeded, Overloaded
from server.records import Request

_RESIDENCE_WEIGHT = 0.1  # of the latest request in the average
_LEAST_RETRY_SECONDS, _MOST_RETRY_SECONDS = 0.1, 30.0


@dataclass(frozen=True)
class QueueLimits:
    """How much may wait for a slot before newcomers are refused."""

    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 262_144

    def __post_init__(self) -> None:
        for name in ("max_waiting_requests", "max_waiting_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, and must be at least 1")

    def shared(self, count: int) -> QueueLimits:
        """Of each of `count` queues that get equal parts, and at least one request and token."""
        return QueueLimits(-(-self.max_waiting_requests // count), -(-self.max_waiting_tokens // count))


class Backlog:
    """The requests that wait, and how long one is expected to.

    Owned by the engine; thread-safe. Invariant: a request is in it from its acceptance until it is admitted
    or ends.

    Args:
        num_slots: Of the engine.
        limits: What may wait.

    Attributes:
        num_slots_wanted: By all of them.
    """

    def __init__(self, num_slots: int, limits: QueueLimits) -> None:
        self._num_slots = num_slots
        self._limits = limits
        self._lock = threading.Lock()
        self._requests: set[Request] = set()
        self._num_tokens = 0
        self.num_slots_wanted = 0
        self._residence_seconds = 0.0  # that a request has its slots, averaged; 0 until one has ended

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request, num_reserved: int, now: float) -> None:
        """Take a request in.

        Args:
            request: To wait.
            num_reserved: Slots that are taken.
            now: Monotonic seconds.

        Raises:
            DeadlineExceeded: The deadline has passed.
            Overloaded: It is full, or the deadline would pass before there are slots.
        """
        limits = self._limits
        if request.deadline is not None and now >= request.deadline:
            raise DeadlineExceeded("the deadline passed before the request came to the engine")
        with self._lock:
            wait_seconds = self._expected_wait(request.num_slots + num_reserved)
            refusal = ""
            if len(self._requests) >= limits.max_waiting_requests:
                refusal = (
                    f"{len(self._requests)} requests are waiting, and the limit is "
                    f"{limits.max_waiting_requests}"
                )
            elif self._num_tokens + request.source_length > limits.max_waiting_tokens:
                refusal = (
                    f"{self._num_tokens} source tokens are waiting, and the limit is "
                    f"{limits.max_waiting_tokens}"
                )
            elif request.deadline is not None and now + wait_seconds > request.deadline:
                refusal = f"a slot is expected in {wait_seconds:.1f} seconds, after the deadline"
            if refusal:
                retry_after = min(max(wait_seconds, _LEAST_RETRY_SECONDS), _MOST_RETRY_SECONDS)
                raise Overloaded(refusal, retry_after_seconds=retry_after)
            self._count(request, 1)
            self._requests.add(request)

    def remove(self, requests: Iterable[Request]) -> None:
        """Forget those that were admitted or ended; who is not in it is ignored."""
        for request in requests:
            with self._lock:
                if request in self._requests:
                    self._requests.remove(request)
                    self._count(request, -1)

    def measure_residence(self, seconds: float) -> None:
        """Learn from a request that ended how long one has its slots."""
        before = self._residence_seconds or seconds
        self._residence_seconds = before + _RESIDENCE_WEIGHT * (seconds - before)

    def _count(self, request: Request, sign: int) -> None:
        self._num_tokens += sign * request.source_length
        self.num_slots_wanted += sign * request.num_slots

    def _expected_wait(self, num_more: int) -> float:
        """Seconds until a request would get its slots.

        By Little's law: slots are given back at the rate of all slots over the time that a request has one.
        """
        num_ahead = self.num_slots_wanted + num_more - self._num_slots
        return max(num_ahead, 0) * self._residence_seconds / self._num_slots
