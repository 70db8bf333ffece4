"""Questions about many servers, answered by simulations."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from benchmarks.load.mix import BEAM_SIZE, MAX_TARGET_LENGTH, Mode, Outcome, quantile
from benchmarks.scale.simulation import Change, Policy, Scenario, simulate
from benchmarks.scale.times import EngineTimes
from seq2seq_serve.server.config import QueueLimits

Figures = dict[str, Any]

_GROUP = 4  # servers, where the question is the number of slots
_SIZES = (1, 2, 8)
_SLOTS = (8, 16, 32, 64, 128)
_WARM_UP_SECONDS, _LEAST_SECONDS = 10.0, 20.0
_NUM_TRIES = 5  # of a bisection, which finds a rate to 3 % of the capacity
_LOST_AT, _REPLACED_AFTER = 20.0, 60.0
_RISES_AT = 20.0
_DELAYS = ((30.0, 1.0), (90.0, 30.0))  # until added servers are ready, and until clients use them
_WINDOW_SECONDS = 5


@functools.cache
def capacity(times: EngineTimes, num_slots: int) -> float:
    """Returns the calls per second of a server that always has waiting calls."""
    count = 40 * num_slots + 1000
    queue = QueueLimits(max_waiting_requests=2 * count, max_waiting_tokens=2 * count * MAX_TARGET_LENGTH)
    rates = ((0.0, 1e6),)
    scenario = Scenario(times, (1.0,), num_slots, Policy.ROUND_ROBIN, rates, seconds=count / 1e6, queue=queue)
    ends = sorted(outcome.end for outcome in simulate(scenario))
    counted = ends[len(ends) // 5 : -len(ends) // 5]
    seconds = (counted[-1] - counted[0]) / (len(counted) - 1)
    return 1 / (seconds + times.call_seconds)  # gRPC took its time before the first turn


@dataclass(frozen=True)
class Question:
    """The servers that are asked about, and the objective.

    Attributes:
        times: Times of an engine.
        rate: Calls per second that have to be served.
        num_slots: Slots of a server, where the question is not their number.
        num_clients: Number of clients, each of which balances by itself in turn.
        latency_seconds: The objective: p99 of the whole answer.
        wait_seconds: The objective: p99 of the wait for a slot.
        num_calls: Number of calls whose figures count, at least.
    """

    times: EngineTimes
    rate: int = 300
    num_slots: int = 32
    num_clients: int = 8
    latency_seconds: float = 1.0
    wait_seconds: float = 0.1
    num_calls: int = 3000

    def best_rate(self, size: int, num_slots: int, policy: Policy) -> Figures:
        """Returns the highest rate of a server within the objective, by bisection; 0 if there is none."""
        low, high = 0.0, capacity(self.times, num_slots)
        found: Figures = {"size": size, "slots": num_slots, "policy": policy.value, "capacity": high}
        for _ in range(_NUM_TRIES):
            rate = (low + high) / 2
            figures = self._steady(size, rate * size, policy, num_slots)
            low, high = (rate, high) if self._is_met(figures) else (low, rate)
            if low == rate:
                found |= figures
        servers = math.ceil(self.rate / low) if low else None
        return found | {"rate": low, "servers": servers}

    def with_slow(self, num_slow: int, policy: Policy) -> Figures:
        """Returns the figures of 8 servers at 80 % of their capacity, some of them half as fast."""
        slowness = (2.0,) * num_slow + (1.0,) * (8 - num_slow)
        rate = 0.8 * capacity(self.times, self.num_slots) * sum(1 / factor for factor in slowness)
        figures = self._steady(8, rate, policy, self.num_slots, slowness)
        return {"slow": num_slow, "policy": policy.value} | figures

    def one_lost(self, size: int, load: float) -> Figures:
        """Returns the figures before and while one of several servers is missing."""
        rate = load * capacity(self.times, self.num_slots) * size
        scenario = dataclasses.replace(
            self._scenario(size, rate, Policy.ROUND_ROBIN, self.num_slots),
            seconds=_LOST_AT + _REPLACED_AFTER,
            changes=(Change(_LOST_AT, -1),),
        )
        # Small groups are simulated more often, as they have fewer calls.
        runs = [simulate(dataclasses.replace(scenario, seed=seed)) for seed in range(max(6 // size, 1))]
        outcomes = list(itertools.chain.from_iterable(runs))
        before = summarize(outcomes, _WARM_UP_SECONDS, _LOST_AT - 2)
        during = summarize(outcomes, _LOST_AT - 1)
        return {
            "size": size,
            "load": load,
            "latency_p99_before": before["latency_p99"],
            "latency_p99_during": during["latency_p99"],
            "refused": during["refused"],
            "retried": sum(outcome.sent > outcome.arrival for outcome in outcomes) / len(runs),
        }

    def rise(self, ready_seconds: float, learn_seconds: float, max_waiting: int) -> Figures:
        """Returns the figures while the rate jumps from half of the capacity of two servers to its triple.

        Four more servers are ready after a time, and each client uses them within another.
        """
        rate = 2 * capacity(self.times, self.num_slots)
        seconds = _RISES_AT + ready_seconds + learn_seconds + 90.0
        scenario = dataclasses.replace(
            self._scenario(2, rate, Policy.ROUND_ROBIN, self.num_slots),
            rates=((0.0, 0.5 * rate), (_RISES_AT, 1.5 * rate)),
            seconds=seconds,
            queue=QueueLimits(max_waiting_requests=max_waiting),
            changes=(Change(_RISES_AT + ready_seconds, 4, learn_seconds),),
        )
        outcomes = simulate(scenario)
        windows = [
            (begin, summarize(outcomes, begin, begin + _WINDOW_SECONDS))
            for begin in range(int(_WARM_UP_SECONDS), int(seconds), _WINDOW_SECONDS)
        ]
        missed = [begin for begin, each in windows if not self._is_met(each, math.inf)]
        return {
            "ready_seconds": ready_seconds,
            "learn_seconds": learn_seconds,
            "max_waiting": max_waiting,
            "missed_seconds": _WINDOW_SECONDS * len(missed),
            "refused": summarize(outcomes, _RISES_AT)["refused"],
            "worst_p99": max(each["latency_p99"] for _, each in windows if each["latency_p99"]),
            "latency_p99_by_time": [(begin - _RISES_AT, each["latency_p99"]) for begin, each in windows],
        }

    def _steady(
        self, size: int, rate: float, policy: Policy, num_slots: int, slowness: tuple[float, ...] = ()
    ) -> Figures:
        scenario = self._scenario(size, rate, policy, num_slots)
        if slowness:
            scenario = dataclasses.replace(scenario, slowness=slowness)
        figures = summarize(simulate(scenario), _WARM_UP_SECONDS)
        # Little's law: the rate of arrivals times the time for which each call holds its slots.
        return figures | {"slots_in_use": rate * figures.pop("held_seconds") / (size * num_slots)}

    def _scenario(self, size: int, rate: float, policy: Policy, num_slots: int) -> Scenario:
        seconds = _WARM_UP_SECONDS + max(self.num_calls / rate, _LEAST_SECONDS)
        return Scenario(
            self.times,
            (1.0,) * size,
            num_slots,
            policy,
            ((0.0, rate),),
            seconds,
            num_clients=self.num_clients,
        )

    def _is_met(self, figures: Figures, wait_seconds: float | None = None) -> bool:
        return bool(
            figures["refused"] == 0
            and figures["latency_p99"] <= self.latency_seconds
            and figures["wait_p99"] <= (wait_seconds or self.wait_seconds)
        )


def summarize(outcomes: Iterable[Outcome], after: float = 0.0, before: float = math.inf) -> Figures:
    """Returns the figures of the calls that arrived in a window; times are those of calls with an answer."""
    counted = [outcome for outcome in outcomes if after <= outcome.arrival < before]
    done = [outcome for outcome in counted if outcome.code == "OK"]
    held = [
        (outcome.end - outcome.arrival - outcome.queue_seconds)
        * (BEAM_SIZE if outcome.job.mode is Mode.BEAM else 1)
        for outcome in done
    ]
    return {
        "count": len(counted),
        "refused": 1 - len(done) / len(counted) if counted else 0.0,
        "wait_p99": quantile([outcome.queue_seconds for outcome in done], 0.99) if done else 0.0,
        "latency_p99": quantile([outcome.end - outcome.arrival for outcome in done], 0.99) if done else 0.0,
        "held_seconds": statistics.fmean(held) if held else 0.0,
    }


def answer_all(question: Question, *, is_quick: bool) -> Iterator[tuple[str, Figures]]:
    """Yields the answers with the names of their tables, in order; all cores simulate side by side."""
    slots = _SLOTS[1:3] if is_quick else _SLOTS
    loads = (0.5, 0.7) if is_quick else (0.5, 0.6, 0.7, 0.8)
    sizes = _SIZES[:1] if is_quick else _SIZES
    queues = (QueueLimits().max_waiting_requests, 2 * question.num_slots)
    asked: list[tuple[str, Callable[..., Figures], Sequence[tuple[Any, ...]]]] = [
        ("by_slots", question.best_rate, [(_GROUP, each, policy) for each in slots for policy in Policy]),
        (
            "by_size",
            question.best_rate,
            [(size, question.num_slots, policy) for size in sizes for policy in Policy],
        ),
        ("slow", question.with_slow, [(number, policy) for number in (0, 1) for policy in Policy]),
        ("one_lost", question.one_lost, list(itertools.product((3,) if is_quick else (3, 5, 10), loads))),
        (
            "rise",
            question.rise,
            [(*delays, queue) for delays in _DELAYS[: 1 if is_quick else 2] for queue in queues],
        ),
    ]
    # Not forked, as other threads run here.
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        futures = [(name, pool.submit(ask, *each)) for name, ask, cells in asked for each in cells]
        for name, future in futures:
            yield name, future.result()
