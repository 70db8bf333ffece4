"""Simulates servers: the server's own engines, over runners that advance a virtual clock by fitted times.

Queueing, admission, scheduling and refusals are those of `server.engine`. Only the graphs, gRPC, the
balancers and the clients are simulated.
"""

from __future__ import annotations

import asyncio
import math
import random
import selectors
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np

from benchmarks.load.inprocess import engine_request
from benchmarks.load.mix import BEAM_SIZE, MIX, Job, Outcome, draw_jobs, poisson_arrivals
from benchmarks.scale.times import EngineTimes
from seq2seq_serve.server.config import QueueLimits
from seq2seq_serve.server.engine.async_engine import AsyncEngine, CoreHandle
from seq2seq_serve.server.engine.core import Admit, Cancel, Core
from seq2seq_serve.server.engine.plan import Candidates, Move, Selected
from seq2seq_serve.server.engine.request import Array, Request
from seq2seq_serve.server.engine.result import Result, Turn
from seq2seq_serve.server.engine.state import Sequence as Row
from seq2seq_serve.server.errors import ServerError, Unavailable
from seq2seq_serve.server.service.write.responses import checked

# What this project's clients do after UNAVAILABLE (`client.wire`).
_MAX_TRIES = 4
_BACKOFF_SECONDS = 0.1
_BACKOFF_FACTOR = 2
_BACKOFF_JITTER = 0.2

_EOS_ID, _TOKEN_ID = 2, 3  # no target ends before its length


class Policy(Enum):
    """How calls are spread: by each client for itself, in turn, or by one proxy that counts open calls."""

    ROUND_ROBIN = "round robin"
    LEAST_REQUESTS = "least requests"


class Change(NamedTuple):
    """Servers that are added at a time, or, by a negative number, lost.

    Each balancer learns of added ones within `learn_seconds`, and of lost ones at once.
    """

    at: float
    num_servers: int
    learn_seconds: float = 0.0


@dataclass(frozen=True)
class Scenario:
    """Servers and their load: a Poisson process with the lengths of the load benchmark.

    Attributes:
        times: Times of an engine.
        slowness: For each server the factor of its times.
        num_slots: Slots of each server.
        policy: How calls are spread.
        rates: Calls per second, each with the time from which on it holds.
        seconds: Time at which the arrivals end.
        num_clients: Clients that balance for themselves.
        queue: Bounds of the queue of each server.
        changes: In the order of their times.
        seed: Of all random choices.
    """

    times: EngineTimes
    slowness: tuple[float, ...]
    num_slots: int
    policy: Policy
    rates: tuple[tuple[float, float], ...]
    seconds: float
    num_clients: int = 8
    queue: QueueLimits = field(default_factory=QueueLimits)
    changes: tuple[Change, ...] = ()
    seed: int = 1

    def arrivals(self) -> Iterator[tuple[float, Job]]:
        """Yields the calls with their times."""
        ends = [begin for begin, _ in self.rates[1:]] + [self.seconds]
        for number, ((begin, rate), end) in enumerate(zip(self.rates, ends, strict=True)):
            expected = (end - begin) * rate
            count = math.ceil(expected + 6 * math.sqrt(expected) + 10)  # more than will come
            jobs = draw_jobs(count, MIX, self.seed + 1000 * number)
            # Another seed than that of the jobs, or the gaps would depend on their modes.
            for job, gap in zip(jobs, poisson_arrivals(rate, jobs[0].seed), strict=False):
                if begin + gap >= end:
                    break
                yield begin + gap, job


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


class TimedRunner:
    """A runner without graphs: an encode and a step advance its clock.

    Owned by its core.

    Attributes:
        now: The virtual time of the core.
        owed_seconds: Processor time of gRPC since the last step.
    """

    start_ids: tuple[int, ...] = (1,)
    eos_ids: tuple[int, ...] = (_EOS_ID,)
    has_decode = True
    shares_memory = True

    def __init__(self, times: EngineTimes, num_slots: int) -> None:
        self.num_slots = num_slots
        self.now = self.owed_seconds = 0.0
        self._times = times
        self._turn_seconds = [times.turn_seconds(num_rows) for num_rows in range(num_slots + 1)]
        shape = (num_slots, 2 * BEAM_SIZE)  # more candidates than a beam ranks
        self._token_ids = np.full(shape, _TOKEN_ID) + np.arange(shape[1])
        self._log_probabilities = np.full(shape, -1.0)

    def encode(self, first_row: int, requests: list[Request]) -> None:  # noqa: ARG002
        """Take the time of an encode call."""
        num_tokens = sum(request.encode_tokens for request in requests)
        self.now += self._times.encode_seconds + self._times.token_seconds * num_tokens

    def step(self, rows: tuple[Row, ...]) -> Selected:
        """Take the time of a step; a beam goes on with any tokens."""
        times = self._times
        num_positions = sum(row.memory_length + row.cache_length for row in rows)
        self.now += self.owed_seconds + self._turn_seconds[len(rows)] + times.position_seconds * num_positions
        self.owed_seconds = 0.0
        beams = [number for number, row in enumerate(rows) if row.request.beam is not None]
        num_sampling = sum(row.request.sampling is not None for row in rows)
        self.now += len(beams) * times.beam_row_seconds + num_sampling * times.sampling_row_seconds
        token_ids = [_TOKEN_ID] * len(rows)
        if not beams:
            return Selected(token_ids)
        places = {number: place for place, number in enumerate(beams)}
        tables = (table[: len(beams)] for table in (self._token_ids, self._log_probabilities))
        return Selected(token_ids, candidates=(Candidates(places, *tables),))

    def move(self, moves: Iterable[Move]) -> int:  # noqa: ARG002
        """Move nothing: the fitted times of turns contain it."""
        return 0

    def warm_up(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def prefill(self, first_row: int, sequences: tuple[Row, ...]) -> list[list[float]]:
        """Is never called: no request has a prefix."""
        raise NotImplementedError

    def align(self, row: int, first_position: int, target_ids: tuple[int, ...], memory_length: int) -> Array:
        """Is never called: no request wants attention."""
        raise NotImplementedError


class TimedCore(CoreHandle):
    """A core that runs each turn at its begin, and reports the turn at its end.

    Owned by the engine. As on a thread, the next turn begins before the engine handles the last one.
    """

    def __init__(self, runner: TimedRunner) -> None:
        super().__init__(runner.num_slots)
        self._runner = runner
        self._core = Core(runner, model_name="simulated", deliver=self._keep, clock=lambda: runner.now)
        self._turn: Turn | None = None
        self._timer: asyncio.TimerHandle | None = None  # of the end of the turn that runs

    async def start(self, turned: Callable[[Turn], None], ended: Callable[[str], None]) -> None:  # noqa: ARG002
        """As `CoreHandle.start`."""
        self._loop = asyncio.get_running_loop()
        self._turned = turned

    def admit(self, requests: tuple[Request, ...]) -> None:
        """As `CoreHandle.admit`."""
        self._send(Admit(requests))

    def cancel(self, request: Request, *, is_expired: bool) -> None:
        """As `CoreHandle.cancel`."""
        self._send(Cancel(request, is_expired))

    def is_hung(self) -> bool:
        """Never."""
        return False

    def kill(self) -> None:
        """End the turn that runs; nothing is reported."""
        if self._timer is not None:
            self._timer.cancel()

    async def stop(self) -> None:
        """As `kill`; the engine answers the requests."""
        self.kill()

    def _send(self, command: Admit | Cancel) -> None:
        self._core.send(command)
        if self._timer is None:
            self._begin_turn()

    def _begin_turn(self) -> None:
        self._runner.now = self._loop.time()
        self._turn = None
        self._core.run_turn()
        if self._turn is not None:
            self._timer = self._loop.call_at(self._runner.now, self._end_turn, self._turn)

    def _keep(self, turn: Turn) -> None:
        self._turn = turn

    def _end_turn(self, turn: Turn) -> None:
        self._timer = None
        self._begin_turn()
        self._turned(turn)


class Server:
    """A server with the engine of one core."""

    def __init__(self, times: EngineTimes, num_slots: int, queue: QueueLimits) -> None:
        self._call_seconds = times.call_seconds
        self._runner = TimedRunner(times, num_slots)
        clock = asyncio.get_running_loop().time
        cores = [TimedCore(self._runner)]
        self.engine = AsyncEngine("simulated", cores, queue, lambda _: None, clock=clock)

    async def answer(self, request: Request) -> Result:
        """Returns the result of a request.

        Raises:
            ServerError: As the service answers.
        """
        self._runner.owed_seconds += self._call_seconds
        with self.engine.submitted([request]) as (stream,):
            return checked(await stream.wait())


class Balancer:
    """Chooses a server for each call: the next one in turn, or the one with the fewest open calls.

    Attributes:
        servers: Those that it knows.
    """

    def __init__(self, policy: Policy, servers: Sequence[Server], chance: random.Random) -> None:
        self.servers = list(servers)
        self._policy = policy
        self._place = chance.randrange(len(servers))
        self._open: Counter[Server] = Counter()

    async def send(self, request: Request) -> Result:
        """Returns the result of a request by one of the servers."""
        self._place = (self._place + 1) % len(self.servers)
        server = self.servers[self._place]
        if self._policy is Policy.LEAST_REQUESTS:
            # From a place that goes round: otherwise the first servers would get all ties.
            rotated = self.servers[self._place :] + self.servers[: self._place]
            server = min(rotated, key=self._open.__getitem__)
        self._open[server] += 1
        try:
            return await server.answer(request)
        finally:
            self._open[server] -= 1


class Simulation:
    """One run of a scenario; call `run` on a `VirtualLoop`."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._chance = random.Random(f"balancers {scenario.seed}")
        self._loop = asyncio.get_running_loop()
        self._servers: list[Server] = []
        self._outcomes: list[Outcome] = []

    async def run(self) -> list[Outcome]:
        """Serve all calls; returns their outcomes in the order of their arrival."""
        scenario = self._scenario
        self._servers = [await self._started(factor) for factor in scenario.slowness]
        num_balancers = scenario.num_clients if scenario.policy is Policy.ROUND_ROBIN else 1
        self._balancers = [
            Balancer(scenario.policy, self._servers, self._chance) for _ in range(num_balancers)
        ]
        async with asyncio.TaskGroup() as tasks:
            for change in scenario.changes:
                tasks.create_task(self._apply(change))
            for at, job in scenario.arrivals():
                await asyncio.sleep(at - self._loop.time())
                outcome = Outcome(job, at)
                self._outcomes.append(outcome)
                tasks.create_task(self._call(outcome, self._chance.choice(self._balancers)))
        for server in self._servers:
            assert not server.engine.num_slots_wanted(), "every slot is back"
            await server.engine.stop()
        return self._outcomes

    async def _started(self, factor: float = 1.0) -> Server:
        scenario = self._scenario
        server = Server(scenario.times.scaled(factor), scenario.num_slots, scenario.queue)
        await server.engine.start()
        return server

    async def _call(self, outcome: Outcome, balancer: Balancer) -> None:
        for number in range(_MAX_TRIES):
            outcome.sent = self._loop.time()
            try:
                result = await balancer.send(engine_request(outcome.job, outcome.sent))
            except ServerError as error:
                outcome.code = type(error).__name__
                if not isinstance(error, Unavailable):
                    break
                jitter = self._chance.uniform(1 - _BACKOFF_JITTER, 1 + _BACKOFF_JITTER)
                await asyncio.sleep(_BACKOFF_SECONDS * _BACKOFF_FACTOR**number * jitter)
            else:
                outcome.code, outcome.num_tokens = "OK", result.num_target_tokens
                outcome.queue_seconds = outcome.sent - outcome.arrival + result.timings.queue_seconds
                break
        outcome.end = self._loop.time() + self._scenario.times.wire_seconds

    async def _apply(self, change: Change) -> None:
        await asyncio.sleep(change.at)
        for _ in range(-change.num_servers):
            lost = self._servers.pop(0)
            for balancer in self._balancers:
                balancer.servers.remove(lost)
            await lost.engine.stop()
        for _ in range(change.num_servers):
            server = await self._started()
            self._servers.append(server)
            for balancer in self._balancers:
                seconds = self._chance.uniform(0, change.learn_seconds)
                self._loop.call_later(seconds, balancer.servers.append, server)


def simulate(scenario: Scenario) -> list[Outcome]:
    """Returns the outcomes of all calls of a scenario, in the order of their arrival."""

    async def run() -> list[Outcome]:
        return await Simulation(scenario).run()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())
