"""Running sums over the requests and steps of a model, and its recent load."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from seq2seq_serve.server.engine.records import Turn

_MEMORY_SECONDS = 2.0  # long enough for some calls of a slow model, short enough for a burst


@dataclass
class Sum:
    """A count and the sum of its durations."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Add one duration."""
        self.count += 1
        self.seconds += seconds


@dataclass
class Statistics:
    """Sums over the requests and turns of one model, for the Open Inference Protocol's statistics.

    Owned by its deliveries; used on the event loop only.

    Attributes:
        succeeded: Successful requests, from arrival to end.
        failed: Failed requests; those that the engine refused count without seconds.
        queued: Requests, from arrival to admission.
        encoded: Calls of the encoder.
        decoded: Steps of the decoder.
        steps_by_rows: Steps of the decoder by their number of rows.
        last_request: Unix time of the last request's end.
    """

    succeeded: Sum = field(default_factory=Sum)
    failed: Sum = field(default_factory=Sum)
    queued: Sum = field(default_factory=Sum)
    encoded: Sum = field(default_factory=Sum)
    decoded: Sum = field(default_factory=Sum)
    steps_by_rows: dict[int, Sum] = field(default_factory=dict)
    last_request: float = 0.0

    def record_turn(self, turn: Turn) -> None:
        """Add one turn of an engine."""
        if turn.num_rows:
            self.decoded.add(turn.step_seconds)
            self.steps_by_rows.setdefault(turn.num_rows, Sum()).add(turn.step_seconds)
        if turn.queue_seconds:
            self.encoded.add(turn.encode_seconds)
        for seconds in turn.queue_seconds:
            self.queued.add(seconds)
        for result in turn.results:
            (self.succeeded if result.error is None else self.failed).add(result.timings.total_seconds)
            self.last_request = time.time()


class RecentLoad:
    """The calls of one model and the slots that they want, both averaged over the last seconds.

    The weight of a moment falls by a factor of e in `_MEMORY_SECONDS`. Both averages have the same weights,
    so the slots divided by the calls a second are the slot-seconds that a call takes.

    Owned by its deliveries; used on the event loop only.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._num_wanted = 0
        self._slots_wanted = 0.0
        self._calls_per_second = 0.0

    def begin(self, num_slots: int) -> None:
        """Record that a call wants slots from now on."""
        self._advance()
        self._num_wanted += num_slots

    def end(self, num_slots: int, *, is_answered: bool) -> None:
        """Record that a call does not want its slots any more; only an answered one counts as a call."""
        self._advance()
        self._num_wanted -= num_slots
        self._calls_per_second += is_answered / _MEMORY_SECONDS

    def averages(self) -> tuple[float, float]:
        """Returns the answered calls a second, and the slots that calls want."""
        self._advance()
        return self._calls_per_second, self._slots_wanted

    def _advance(self) -> None:
        now = self._clock()
        kept = math.exp((self._last - now) / _MEMORY_SECONDS)
        self._calls_per_second *= kept
        self._slots_wanted = kept * self._slots_wanted + (1 - kept) * self._num_wanted
        self._last = now


def correction_at_end(seconds: float) -> float:
    """Returns what to add to the calls a second of `RecentLoad` at the end of a call, before others use it.

    At this moment the average has the whole weight of the call, and that of slots has forgotten a part of its
    time. With the correction, slots per call are right however rare and long calls are.

    Args:
        seconds: How long the call took.
    """
    kept = -math.expm1(-seconds / _MEMORY_SECONDS)
    return kept / seconds - 1 / _MEMORY_SECONDS
