"""What a model has done so far, as running sums: what the metrics tell as distributions."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from server.records import StepStats


@dataclass
class Sum:
    """How many, and their seconds together."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        self.count += 1
        self.seconds += seconds


@dataclass
class Statistics:
    """Sums over the requests and turns of one model.

    Owned by its deliveries; used on the event loop only.

    Attributes:
        succeeded: Requests that ended well, from arrival to end.
        failed: Those that did not; also who was refused by the engine, without seconds.
        queued: Until admission.
        encoded: Calls of the encoder.
        decoded: Steps of the decoder.
        steps_by_rows: The same by the number of rows.
        last_request: Unix time of the last end.
    """

    succeeded: Sum = field(default_factory=Sum)
    failed: Sum = field(default_factory=Sum)
    queued: Sum = field(default_factory=Sum)
    encoded: Sum = field(default_factory=Sum)
    decoded: Sum = field(default_factory=Sum)
    steps_by_rows: dict[int, Sum] = field(default_factory=dict)
    last_request: float = 0.0

    def record_turn(self, stats: StepStats) -> None:
        """One turn of an engine."""
        if stats.num_rows:
            self.decoded.add(stats.step_seconds)
            self.steps_by_rows.setdefault(stats.num_rows, Sum()).add(stats.step_seconds)
        if stats.queue_seconds:
            self.encoded.add(stats.encode_seconds)
        for seconds in stats.queue_seconds:
            self.queued.add(seconds)
        for result in stats.results:
            (self.succeeded if result.error is None else self.failed).add(result.timings.total_seconds)
            self.last_request = time.time()
