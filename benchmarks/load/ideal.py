"""The latencies that a machine allows: the requests of an open loop, served by an ideal scheduler.

It batches continuously on a machine that only encodes and steps, in the times that were measured in the same
run: Python, gRPC, queues and threads cost nothing. Requests join at the end of a turn, the oldest first. It
has slots for all of them, and knows the best bound of the source tokens that a turn encodes.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from benchmarks.load.mix import BEAM_SIZE, Job, Mode, Outcome
from benchmarks.scale.model import EngineTimes

MOST_ENCODED = (1, 32, 64, 128, 256, 1024)  # bounds that the scheduler may have


@dataclass(slots=True)
class _Target:
    """A request that runs, and when it got its tokens."""

    outcome: Outcome
    times: list[float] = field(default_factory=list)

    def num_rows(self) -> int:
        """The rows of its next step: a beam begins with one."""
        return BEAM_SIZE if self.outcome.job.mode is Mode.BEAM and self.times else 1


def replay(
    times: EngineTimes,
    spread: Sequence[float],
    calls: Sequence[tuple[float, Job]],
    most_encoded: int,
) -> tuple[list[Outcome], float]:
    """Serve calls in the order of their times.

    Args:
        times: The mean times of encode calls and steps.
        spread: Measured times of turns, divided by their means. Each turn draws one.
        calls: The requests and the times of their arrival, in order.
        most_encoded: The most source tokens that a turn encodes; one request may have more.

    Returns:
        The outcomes of the calls, and the seconds for which the machine worked.
    """
    chance, now, busy_seconds = random.Random(0), 0.0, 0.0
    outcomes = [Outcome(job, arrival, sent=arrival) for arrival, job in calls]
    waiting, running = deque(outcomes), list[_Target]()
    while waiting or running:
        if not running:
            now = max(now, waiting[0].arrival)
        encoded = 0
        while waiting and waiting[0].arrival <= now:
            num_tokens = len(waiting[0].job.source_ids)
            if encoded and encoded + num_tokens > most_encoded:
                break
            encoded += num_tokens
            running.append(_Target(waiting.popleft()))
        seconds = _step_seconds(times, running)
        if encoded:
            seconds += times.encode_seconds + times.token_seconds * encoded
        seconds *= chance.choice(spread)
        now, busy_seconds = now + seconds, busy_seconds + seconds
        for target in running:
            target.times.append(now)
            if len(target.times) == target.outcome.job.num_tokens:
                _end(target)
        running = [target for target in running if math.isnan(target.outcome.end)]
    return outcomes, busy_seconds


def _step_seconds(times: EngineTimes, running: Sequence[_Target]) -> float:
    rows = dict.fromkeys(Mode, 0)
    num_positions = 0
    for target in running:
        job, num_rows = target.outcome.job, target.num_rows()
        rows[job.mode] += num_rows
        num_positions += num_rows * (len(job.source_ids) + len(target.times))
    return times.step_seconds(sum(rows.values()), rows[Mode.SAMPLING], rows[Mode.BEAM], num_positions)


def _end(target: _Target) -> None:
    outcome, times = target.outcome, target.times
    outcome.first, outcome.end, outcome.num_tokens = times[0], times[-1], len(times)
    outcome.gaps = tuple(after - before for before, after in pairwise(times))
