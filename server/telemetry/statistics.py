"""Running sums over the requests and steps of a model."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from seq2seq_serve.server.engine.result import Turn


@dataclass
class Statistics:
    """Sums over the requests and turns of one model, for the Open Inference Protocol's statistics.

    Owned by the model's engine; used on the event loop only.

    Attributes:
        counts: By the name of the protocol, the number of successful and failed requests, of admitted ones,
            and of the calls of the encoder and the decoder; by a number of rows, the decoder's calls with it.
        seconds: The sums of their durations: of requests from arrival to end, or to admission. Requests that
            the engine refused do not have any.
        last_request: Unix time of the last request's end.
    """

    counts: Counter[str | int] = field(default_factory=Counter)
    seconds: defaultdict[str | int, float] = field(default_factory=lambda: defaultdict(float))
    last_request: float = 0.0

    def record_turn(self, turn: Turn) -> None:
        """Add one turn of an engine."""
        durations: list[tuple[str | int, float]] = [("queue", seconds) for seconds in turn.queue_seconds]
        if turn.num_rows:
            for _ in range(turn.num_steps):
                durations += [("compute_infer", turn.step_seconds), (turn.num_rows, turn.step_seconds)]
        if turn.queue_seconds:
            durations.append(("compute_input", turn.encode_seconds))
        for _, _, result in turn.updates:
            if result is not None:
                end = "success" if result.error is None else "fail"
                durations.append((end, result.timings.total_seconds))
                self.last_request = time.time()
        for name, seconds in durations:
            self.counts[name] += 1
            self.seconds[name] += seconds
