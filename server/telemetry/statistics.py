"""The sums over the requests and turns of a model, which `/metrics` and the Open Inference Protocol show."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection
from operator import sub
from typing import NamedTuple

from seq2seq_serve.server.engine.result import FinishReason, Turn

# Seconds of a whole request: up to the two minutes that a patient caller waits.
LATENCY_BOUNDS = (
    *(0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075),
    *(0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075, 0.08),
    *(0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 0.8),
    *(1.0, 1.5, 2.0, 2.5, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 80.0, 120.0),
)
# Seconds of one step, and between two tokens of a sequence.
STEP_BOUNDS = (
    *(0.0002, 0.0003, 0.0004, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008),
    *(0.01, 0.015, 0.02, 0.025, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5),
)
# Seconds from the end of a word until its text is stable.
LAG_BOUNDS = (0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0)
# Rows of a step.
BATCH_BOUNDS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512, 1024)

# Tokens of a source or a target.
LENGTH_BOUNDS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)

MODES = ("greedy", "beam", "sampling", "score")
_ABORTED = "abort"
_FINISHED = {FinishReason.EOS: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
_WASTED = {FinishReason.CANCELLED: "cancelled", FinishReason.DEADLINE: "deadline"}


class Distribution:
    """The numbers of values between bounds, and the sum of the values.

    Attributes:
        bounds: Ascending; a value that equals one is counted below it.
        counts: The numbers of values up to each bound, and beyond the last one.
        total: The sum of all values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Count a value, which may have occurred several times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count


class Durations(NamedTuple):
    """The number of durations, and their sum in seconds."""

    number: int
    seconds: float


class Statistics:
    """Sums over the requests and turns of a model, of all its versions.

    Owned by the metrics. The event loop writes; scrapes read on another thread, and may miss the last turn.
    What is labelled is by the values of its labels.

    Attributes:
        step: The seconds of the decoder's calls.
        num_steps: The number of these, by their number of rows.
        step_seconds: The sums of their seconds, by their number of rows.
        encode: The seconds of the encoder's calls.
        queue: The seconds of requests from arrival to admission.
        first_token: The seconds of requests from arrival to the first token.
        inter_token: The seconds between two tokens of a request.
        total: The seconds of requests from arrival to the end, by their mode.
        failed_seconds: The part of them of requests that failed.
        ends: The number of requests that have ended, by how, and by their mode.
        source_length: Their source tokens.
        target_length: Their target tokens, by their mode.
        wasted: Target tokens of requests without an answer, by the reason.
        lag: The seconds from the ends of words of live streams until their texts are stable.
        live_sound_seconds: The sound of these streams that was heard.
        live_decode_seconds: The time of the decodings of their open segments.
        num_live_decodings: The number of these.
        num_adapter_loads: Adapters that were loaded.
        num_adapter_evictions: Adapters that left their places for others.
        last_request: Unix time of the last request's end; 0 before the version's first one.
    """

    def __init__(self) -> None:
        self.step = Distribution(STEP_BOUNDS)
        self.num_steps: Counter[int] = Counter()
        self.step_seconds: defaultdict[int, float] = defaultdict(float)
        self.encode, self.queue = Distribution(LATENCY_BOUNDS), Distribution(LATENCY_BOUNDS)
        self.first_token, self.inter_token = Distribution(LATENCY_BOUNDS), Distribution(STEP_BOUNDS)
        self.total = {(mode,): Distribution(LATENCY_BOUNDS) for mode in MODES}
        self.failed_seconds = self.last_request = 0.0
        self.ends = {(end, mode): 0 for end in ("stop", "length", _ABORTED) for mode in MODES}
        self.source_length = Distribution(LENGTH_BOUNDS)
        self.target_length = {(mode,): Distribution(LENGTH_BOUNDS) for mode in MODES}
        self.wasted = {(reason,): 0 for reason in _WASTED.values()}
        self.draft_tokens = self.accepted_tokens = self.num_bounded = 0
        self.num_core_restarts = self.num_refused = self.moved_bytes = 0
        self.lag = Distribution(LAG_BOUNDS)
        self.live_sound_seconds = self.live_decode_seconds = 0.0
        self.num_live_decodings = 0
        self.num_adapter_loads = self.num_adapter_evictions = 0
        self._earlier: dict[str | int, Durations] = {}

    def record_turn(self, turn: Turn) -> None:
        """Add one turn of an engine."""
        if turn.num_rows:
            self.step.add(turn.step_seconds, turn.num_steps)
            self.num_steps[turn.num_rows] += turn.num_steps
            self.step_seconds[turn.num_rows] += turn.num_steps * turn.step_seconds
        if turn.queue_seconds:
            self.encode.add(turn.encode_seconds)
        for seconds in turn.queue_seconds:
            self.queue.add(seconds)
        for seconds in turn.first_token_seconds:
            self.first_token.add(seconds)
        for seconds, count in turn.inter_token_seconds.items():
            self.inter_token.add(seconds, count)
        self.moved_bytes += turn.moved_bytes
        self.num_core_restarts += turn.num_core_restarts
        self.num_refused += turn.num_refused
        for request, _, result in turn.updates:
            if result is None:
                continue
            timings, mode = result.timings, request.mode
            end = _FINISHED.get(result.finish_reason, _ABORTED)
            self.ends[end, mode] += 1
            self.total[mode,].add(timings.total_seconds)
            self.failed_seconds += timings.total_seconds if end == _ABORTED else 0.0
            self.source_length.add(result.num_source_tokens)
            self.target_length[mode,].add(result.num_target_tokens)
            self.draft_tokens += timings.draft_tokens
            self.accepted_tokens += timings.accepted_tokens
            self.num_bounded += result.num_bounded
            if result.finish_reason in _WASTED:
                self.wasted[_WASTED[result.finish_reason],] += result.num_target_tokens
            self.last_request = time.time()

    @property
    def step_rows(self) -> Distribution:
        """The rows of the decoder's calls."""
        rows = Distribution(BATCH_BOUNDS)
        for num_rows, number in list(self.num_steps.items()):
            rows.add(num_rows, number)
        return rows

    @property
    def source_tokens(self) -> float:
        """The source tokens of all requests that have ended."""
        return self.source_length.total

    @property
    def target_tokens(self) -> float:
        """Their target tokens."""
        return sum(one.total for one in self.target_length.values())

    def begin_version(self) -> None:
        """Leave out what was recorded so far from the durations of the model's next version."""
        self._earlier, self.last_request = self._durations(), 0.0

    def of_version(self) -> dict[str | int, Durations]:
        """Returns the durations since a version began, by their names in the Open Inference Protocol.

        Those of the decoder's calls are also there by their number of rows. Requests that an engine refused
        failed without a duration.
        """
        none = Durations(0, 0.0)
        return {
            name: Durations(*map(sub, one, self._earlier.get(name, none)))
            for name, one in self._durations().items()
        }

    def _durations(self) -> dict[str | int, Durations]:
        num_aborted = sum(count for (end, _), count in self.ends.items() if end == _ABORTED)
        num_ended, seconds = _sum(self.total.values())
        return {
            "success": Durations(num_ended - num_aborted, seconds - self.failed_seconds),
            "fail": Durations(num_aborted + self.num_refused, self.failed_seconds),
            "queue": _sum([self.queue]),
            "compute_input": _sum([self.encode]),
            "compute_infer": _sum([self.step]),
            **{rows: Durations(number, self.step_seconds[rows]) for rows, number in self.num_steps.items()},
        }


def _sum(parts: Collection[Distribution]) -> Durations:
    return Durations(sum(sum(one.counts) for one in parts), sum(one.total for one in parts))
