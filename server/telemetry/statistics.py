"""Running sums over the requests and steps of a model."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from seq2seq_serve.server.engine.result import Turn


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

    Owned by the model's engine; used on the event loop only.

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
        for _, _, result in turn.updates:
            if result is None:
                continue
            (self.succeeded if result.error is None else self.failed).add(result.timings.total_seconds)
            self.last_request = time.time()
