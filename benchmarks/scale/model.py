"""Simulates servers: the server's own engines, over runners that advance a virtual clock by fitted times.

Queueing, admission, scheduling and refusals are those of `server.engine`. Only the graphs, gRPC, the
balancers and the clients are simulated.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import selectors
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from benchmarks.load.drive import Clock, open_loop
from benchmarks.load.engine import answer
from benchmarks.load.mix import (
    BEAM_SIZE,
    MAX_TARGET_LENGTH,
    MIX,
    Job,
    Mode,
    Outcome,
    draw_jobs,
    poisson_arrivals,
    quantile,
)
from seq2seq_serve.bundle.adapters import Weights
from seq2seq_serve.server.config import QueueLimits
from seq2seq_serve.server.engine.async_engine import AsyncEngine, CoreHandle
from seq2seq_serve.server.engine.core import Admit, Cancel, Core
from seq2seq_serve.server.engine.plan import NOTHING_WANTED, Candidates, Move, Selected
from seq2seq_serve.server.engine.request import NO_ADAPTER, Array, Request
from seq2seq_serve.server.engine.result import Turn
from seq2seq_serve.server.engine.state import Sequence as Row

_EOS_ID, _TOKEN_ID = 2, 3  # no target ends before its length
_WARM_UP_SECONDS, _LEAST_SECONDS = 10.0, 20.0
_NUM_TRIES = 5  # of a bisection, which finds a rate to 3 % of the capacity


Curve = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class EngineTimes:
    """Seconds that the parts of an engine's turn take; their sum is the time of the turn.

    Attributes:
        rows_seconds: A turn by its number of rows: pairs of rows and seconds, rising, with straight lines
            between and beyond them. A curve, because kernels work on blocks of rows: a row more may be free,
            or cost a block.
        sampling_row_seconds: What a row of sampling takes more than one of greedy search.
        beam_row_seconds: What a row of beam search takes more than one of greedy search.
        position_seconds: One position of memory or cache that a row of a step reads.
        encode_seconds: An encode call, whatever its sources.
        token_seconds: One source token in an encode call.
        call_seconds: Processor time that gRPC takes for a call, on the engine's core.
        wire_seconds: Time of a call outside of the engine: client, gRPC, and the ways between threads.
    """

    rows_seconds: Curve
    sampling_row_seconds: float = 0.0
    beam_row_seconds: float = 0.0
    position_seconds: float = 0.0
    encode_seconds: float = 0.0
    token_seconds: float = 0.0
    call_seconds: float = 0.0
    wire_seconds: float = 0.0

    def turn_seconds(self, num_rows: int) -> float:
        """Returns the time of a turn of some rows, without their positions and modes."""
        places = blend(num_rows, [rows for rows, _ in self.rows_seconds])
        return sum(share * self.rows_seconds[place][1] for place, share in places.items())

    def step_seconds(self, num_rows: int, num_sampling: int, num_beam: int, num_positions: int) -> float:
        """Returns the time of a turn without its encode call.

        Args:
            num_rows: All rows.
            num_sampling: Those of sampling.
            num_beam: Those of beam search.
            num_positions: The positions of memory and cache that all rows read.
        """
        return (
            self.turn_seconds(num_rows)
            + num_sampling * self.sampling_row_seconds
            + num_beam * self.beam_row_seconds
            + num_positions * self.position_seconds
        )

    @classmethod
    def of(cls, figures: Mapping[str, Any]) -> EngineTimes:
        """Returns the times of a result file.

        Raises:
            ValueError: They are not those of this version.
        """
        if set(figures) != {field.name for field in dataclasses.fields(cls)}:
            raise ValueError("the times are not those of this version: measure them with `fit` again")
        curve = tuple((int(rows), float(seconds)) for rows, seconds in figures["rows_seconds"])
        return cls(**{**figures, "rows_seconds": curve})


def blend(num_rows: int, knots: Sequence[int]) -> dict[int, float]:
    """Returns the places of the two knots beside a number of rows, with their shares; a lone knot has 1.

    Beyond the ends one share is negative, which continues the straight line.
    """
    if len(knots) == 1:
        return {0: 1.0}
    place = min(max(bisect_right(knots, num_rows), 1), len(knots) - 1)
    share = (num_rows - knots[place - 1]) / (knots[place] - knots[place - 1])
    return {place - 1: 1 - share, place: share}


class Policy(Enum):
    """How calls are spread: by each client for itself, in turn, or by one proxy that counts open calls."""

    ROUND_ROBIN = "round robin"
    LEAST_REQUESTS = "least requests"


@dataclass(frozen=True)
class Group:
    """Servers that are all alike, and how their clients use them.

    Attributes:
        times: Times of an engine.
        num_slots: Slots of each server.
        policy: How calls are spread.
        num_clients: Clients that balance for themselves.
        queue: Bounds of the queue of each server.
    """

    times: EngineTimes
    num_slots: int
    num_servers: int = 1
    policy: Policy = Policy.ROUND_ROBIN
    num_clients: int = 8
    queue: QueueLimits = field(default_factory=QueueLimits)


def draw_calls(rate: float, seconds: float) -> Iterator[tuple[float, Job]]:
    """Returns the calls of a Poisson process with the mix of the load benchmark, and their times."""
    arrivals = list(itertools.takewhile(seconds.__gt__, poisson_arrivals(rate, seed=1)))
    # The gaps have a seed of their own, or they would depend on the modes.
    return zip(arrivals, draw_jobs(len(arrivals), MIX, seed=1_000_003), strict=True)


class _Clock(selectors.SelectSelector):
    """Lets the time that a loop would wait pass at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("the simulation waits for something that never comes")
        self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop without input and output whose time jumps to the next timer."""

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        """Returns the virtual time."""
        return self._clock.now


class _TimedRunner:
    """A runner without graphs: an encode and a step advance its clock.

    Owned by its core.

    Attributes:
        now: The virtual time of the core.
        owed_seconds: Processor time of gRPC since the last step.
    """

    vocab_size = 2**31
    start_ids: tuple[int, ...] = (1,)
    eos_ids: tuple[int, ...] = (_EOS_ID,)
    has_decode = True
    shares_memory = True
    repeats_steps = False

    def __init__(self, times: EngineTimes, num_slots: int) -> None:
        self.num_slots = num_slots
        self.now = self.owed_seconds = 0.0
        self._times = times
        shape = (num_slots, 2 * BEAM_SIZE)  # more candidates than a beam ranks
        self._token_ids = np.full(shape, _TOKEN_ID) + np.arange(shape[1])
        self._log_probabilities = np.full(shape, -1.0)

    def encode(self, first_row: int, requests: list[Request]) -> None:  # noqa: ARG002
        num_tokens = sum(request.encode_tokens for request in requests)
        self.now += self._times.encode_seconds + self._times.token_seconds * num_tokens

    def step(self, rows: tuple[Row, ...], num_steps: int = 1) -> Selected:  # noqa: ARG002
        num_positions = sum(row.memory_length + row.cache_length for row in rows)
        beams = [number for number, row in enumerate(rows) if row.request.beam is not None]
        num_sampling = sum(row.request.sampling is not None for row in rows)
        step_seconds = self._times.step_seconds(len(rows), num_sampling, len(beams), num_positions)
        self.now += self.owed_seconds + step_seconds
        self.owed_seconds = 0.0
        token_ids = [_TOKEN_ID] * len(rows)
        if not beams:
            return Selected(token_ids)
        places = {number: place for place, number in enumerate(beams)}
        number = len(beams)
        token_table, log_probabilities = self._token_ids[:number], self._log_probabilities[:number]
        table = Candidates(places, token_table, log_probabilities, NOTHING_WANTED, np.zeros(0))
        return Selected(token_ids, candidates=(table,))

    def move(self, moves: Iterable[Move]) -> int:  # noqa: ARG002
        return 0  # the fitted times of turns contain it

    def warm_up(self) -> None:
        pass

    def close(self) -> None:
        pass

    def prefill(self, first_row: int, sequences: tuple[Row, ...]) -> list[list[float]]:
        raise NotImplementedError  # no request has a prefix

    def align(
        self,
        row: int,
        first_position: int,
        target_ids: tuple[int, ...],
        memory_length: int,
        adapter: int = NO_ADAPTER,
    ) -> Array:
        raise NotImplementedError  # no request wants attention

    def write_adapter(self, place: int, weights: Weights) -> None:
        raise NotImplementedError  # there are none


class _TimedCore(CoreHandle):
    """A core that runs each turn at its begin, and reports the turn at its end.

    Owned by the engine. As on a thread, the next turn begins before the engine handles the last one.
    """

    def __init__(self, runner: _TimedRunner) -> None:
        super().__init__(runner.num_slots)
        self._runner = runner
        self._core = Core(
            runner, model_name="simulated", deliver=self._keep, held_seconds=0.0, clock=lambda: runner.now
        )
        self._turns: list[Turn] = []
        self._timer: asyncio.TimerHandle | None = None  # of the end of the turn that runs

    async def start(self, turned: Callable[[Sequence[Turn]], None], ended: Callable[[str], None]) -> None:  # noqa: ARG002
        self._loop = asyncio.get_running_loop()
        self._turned = turned

    def admit(self, requests: tuple[Request, ...]) -> None:
        self._send(Admit(requests))

    def cancel(self, request: Request, *, is_expired: bool) -> None:
        self._send(Cancel(request, is_expired))

    def write_adapter(self, place: int, weights: Weights) -> None:
        raise NotImplementedError

    def watch(self) -> None:
        pass

    def turn_seconds(self) -> float:
        return 0.0

    def kill(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def stop(self) -> None:
        self.kill()

    def _send(self, command: Admit | Cancel) -> None:
        self._core.send(command)
        if self._timer is None:
            self._begin_turn()

    def _begin_turn(self) -> None:
        self._runner.now = self._loop.time()
        self._turns = []
        self._core.run_turn()
        if self._turns:
            self._timer = self._loop.call_at(self._runner.now, self._end_turn, self._turns)

    def _keep(self, turns: list[Turn]) -> None:
        self._turns = turns

    def _end_turn(self, turns: list[Turn]) -> None:
        self._timer = None
        self._begin_turn()
        self._turned(turns)


class _Balancer:
    """Chooses an engine for each call: the next one in turn, or the one with the fewest open calls."""

    def __init__(
        self, group: Group, engines: Mapping[_TimedRunner, AsyncEngine], chance: random.Random
    ) -> None:
        self._group = group
        self._engines = engines
        self._runners = list(engines)
        self._place = chance.randrange(len(engines))
        self._open: Counter[_TimedRunner] = Counter()

    async def answer(self, outcome: Outcome, now: Clock) -> None:
        self._place = (self._place + 1) % len(self._runners)
        runner = self._runners[self._place]
        if self._group.policy is Policy.LEAST_REQUESTS:
            # From a place that goes round: otherwise the first servers would get all ties.
            rotated = self._runners[self._place :] + self._runners[: self._place]
            runner = min(rotated, key=self._open.__getitem__)
        self._open[runner] += 1
        runner.owed_seconds += self._group.times.call_seconds
        await answer(self._engines[runner], outcome, now)
        self._open[runner] -= 1
        await asyncio.sleep(self._group.times.wire_seconds)


def simulate(group: Group, calls: Iterable[tuple[float, Job]]) -> list[Outcome]:
    """Serve calls at their times; returns their outcomes in the order of their arrival."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(_served(group, calls))


async def _served(group: Group, calls: Iterable[tuple[float, Job]]) -> list[Outcome]:
    chance, clock = random.Random(0), asyncio.get_running_loop().time
    engines = {}
    for _ in range(group.num_servers):
        runner = _TimedRunner(group.times, group.num_slots)
        cores = [_TimedCore(runner)]
        engines[runner] = AsyncEngine("simulated", cores, group.queue, lambda _: None, clock=clock)
        await engines[runner].start()
    num_balancers = group.num_clients if group.policy is Policy.ROUND_ROBIN else 1
    balancers = [_Balancer(group, engines, chance) for _ in range(num_balancers)]
    outcomes = await open_loop(lambda *call: chance.choice(balancers).answer(*call), calls)
    for engine in engines.values():
        assert not engine.num_slots_wanted(), "every slot is back"
        await engine.stop()
    return outcomes


def capacity(times: EngineTimes, num_slots: int) -> float:
    """Returns the calls per second of a server that always has waiting calls."""
    count = 40 * num_slots + 1000
    queue = QueueLimits(max_waiting_requests=2 * count, max_waiting_tokens=2 * count * MAX_TARGET_LENGTH)
    group = Group(times, num_slots, queue=queue)
    ends = sorted(outcome.end for outcome in simulate(group, draw_calls(1e6, count / 1e6)))
    counted = ends[len(ends) // 5 : -len(ends) // 5]
    seconds = (counted[-1] - counted[0]) / (len(counted) - 1)
    return 1 / (seconds + times.call_seconds)  # gRPC took its time before the first turn


def best_rate(group: Group, num_calls: int, latency_seconds: float, wait_seconds: float) -> dict[str, Any]:
    """Finds the highest rate of a server in a group within an objective, by bisection.

    Args:
        group: The servers.
        num_calls: Number of calls whose figures count, at least.
        latency_seconds: Objective: most p99 of the whole answer. No call may be refused.
        wait_seconds: Objective: most p99 of the wait for a slot.

    Returns:
        A row of the table. Without a rate within the objective, the rate is 0.
    """
    low, high = 0.0, capacity(group.times, group.num_slots)
    row = {"slots": group.num_slots, "policy": group.policy.value, "capacity": high, "rate": 0.0}
    for _ in range(_NUM_TRIES):
        rate = (low + high) / 2
        total = rate * group.num_servers
        seconds = _WARM_UP_SECONDS + max(num_calls / total, _LEAST_SECONDS)
        figures = summarize(simulate(group, draw_calls(total, seconds)), after=_WARM_UP_SECONDS)
        is_kept = figures["latency_p99"] <= latency_seconds and figures["wait_p99"] <= wait_seconds
        if is_kept and not figures["refused"]:
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
