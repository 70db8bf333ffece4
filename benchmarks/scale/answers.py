"""How much load servers take within an objective, found by simulations."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.load.mix import BEAM_SIZE, MAX_TARGET_LENGTH, Mode, Outcome, quantile
from benchmarks.scale.simulation import Group, Policy, draw_calls, simulate
from benchmarks.scale.times import EngineTimes
from seq2seq_serve.server.config import QueueLimits

_WARM_UP_SECONDS, _LEAST_SECONDS = 10.0, 20.0
_NUM_TRIES = 5  # of a bisection, which finds a rate to 3 % of the capacity


@dataclass(frozen=True)
class Objective:
    """What servers must keep without a refusal.

    Attributes:
        latency_seconds: p99 of the whole answer.
        wait_seconds: p99 of the wait for a slot.
    """

    latency_seconds: float = 1.0
    wait_seconds: float = 0.1


@functools.cache
def capacity(times: EngineTimes, num_slots: int) -> float:
    """Returns the calls per second of a server that always has waiting calls."""
    count = 40 * num_slots + 1000
    queue = QueueLimits(max_waiting_requests=2 * count, max_waiting_tokens=2 * count * MAX_TARGET_LENGTH)
    group = Group(times, num_slots, queue=queue)
    ends = sorted(outcome.end for outcome in simulate(group, draw_calls(1e6, count / 1e6)))
    counted = ends[len(ends) // 5 : -len(ends) // 5]
    seconds = (counted[-1] - counted[0]) / (len(counted) - 1)
    return 1 / (seconds + times.call_seconds)  # gRPC took its time before the first turn


def best_rate(group: Group, objective: Objective, num_calls: int) -> dict[str, Any]:
    """Finds the highest rate of a server in a group within the objective, by bisection.

    Args:
        group: The servers.
        objective: What they must keep.
        num_calls: Number of calls whose figures count, at least.

    Returns:
        A row of the table. Without a rate within the objective, the rate is 0.
    """
    low, high = 0.0, capacity(group.times, group.num_slots)
    row: dict[str, Any] = {
        "slots": group.num_slots,
        "policy": group.policy.value,
        "capacity": high,
        "rate": 0.0,
    }
    for _ in range(_NUM_TRIES):
        rate = (low + high) / 2
        total = rate * group.num_servers
        seconds = _WARM_UP_SECONDS + max(num_calls / total, _LEAST_SECONDS)
        figures = summarize(simulate(group, draw_calls(total, seconds)), after=_WARM_UP_SECONDS)
        if (
            figures["refused"] == 0
            and figures["latency_p99"] <= objective.latency_seconds
            and figures["wait_p99"] <= objective.wait_seconds
        ):
            low = rate
            # Little's law: the rate of arrivals times the time for which each call holds its slots.
            slots_in_use = rate * figures["held_seconds"] / group.num_slots
            row |= {"rate": rate, "slots_in_use": slots_in_use} | figures
        else:
            high = rate
    return row


def summarize(outcomes: Sequence[Outcome], after: float = 0.0) -> dict[str, float]:
    """Returns the figures of the calls that arrived after a time; times are those of calls with an answer."""
    counted = [outcome for outcome in outcomes if outcome.arrival >= after]
    done = [outcome for outcome in counted if outcome.code == "OK"]
    held = [
        (outcome.end - outcome.arrival - outcome.queue_seconds)
        * (BEAM_SIZE if outcome.job.mode is Mode.BEAM else 1)
        for outcome in done
    ]
    return {
        "refused": 1 - len(done) / len(counted) if counted else 0.0,
        "wait_p99": quantile([outcome.queue_seconds for outcome in done], 0.99),
        "latency_p99": quantile([outcome.end - outcome.arrival for outcome in done], 0.99),
        "held_seconds": statistics.fmean(held) if held else 0.0,
    }


def answer(
    group: Group, objective: Objective, policy: Policy, num_slots: int, rate: float, num_calls: int
) -> dict[str, Any]:
    """Returns a row of the table, with the number of servers that a rate needs; None if none would do."""
    row = best_rate(replace(group, policy=policy, num_slots=num_slots), objective, num_calls)
    return row | {"servers": math.ceil(rate / row["rate"]) if row["rate"] else None}
