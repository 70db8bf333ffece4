"""Simulates servers: the server's own engines, over runners that advance a virtual clock by fitted times.

Queueing, admission, scheduling and refusals are those of `server.engine`. Only the graphs, gRPC, the
balancers and the clients are simulated.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import selectors
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

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
from seq2seq_serve.server.errors import ServerError
from seq2seq_serve.server.service.write.responses import checked

_EOS_ID, _TOKEN_ID = 2, 3  # no target ends before its length
_DRAWN_JOBS = 1000


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


def draw_calls(rate: float, seconds: float, seed: int = 1) -> Iterator[tuple[float, Job]]:
    """Yields the calls of a Poisson process with the mix of the load benchmark, and their times."""
    # The gaps have a seed of their own, or they would depend on the modes.
    for number, at in enumerate(itertools.takewhile(seconds.__gt__, poisson_arrivals(rate, seed))):
        if number % _DRAWN_JOBS == 0:
            jobs = draw_jobs(_DRAWN_JOBS, MIX, seed=1_000_003 * seed + number)
        yield at, jobs[number % _DRAWN_JOBS]


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

    def __init__(self, group: Group) -> None:
        self._call_seconds = group.times.call_seconds
        self._runner = TimedRunner(group.times, group.num_slots)
        clock = asyncio.get_running_loop().time
        cores = [TimedCore(self._runner)]
        self.engine = AsyncEngine("simulated", cores, group.queue, lambda _: None, clock=clock)

    async def answer(self, request: Request) -> Result:
        """Returns the result of a request.

        Raises:
            ServerError: As the service answers.
        """
        self._runner.owed_seconds += self._call_seconds
        with self.engine.submitted([request]) as (stream,):
            return checked(await stream.wait())


class Balancer:
    """Chooses a server for each call: the next one in turn, or the one with the fewest open calls."""

    def __init__(self, policy: Policy, servers: Sequence[Server], chance: random.Random) -> None:
        self._servers = list(servers)
        self._policy = policy
        self._place = chance.randrange(len(servers))
        self._open: Counter[Server] = Counter()

    async def send(self, request: Request) -> Result:
        """Returns the result of a request by one of the servers."""
        self._place = (self._place + 1) % len(self._servers)
        server = self._servers[self._place]
        if self._policy is Policy.LEAST_REQUESTS:
            # From a place that goes round: otherwise the first servers would get all ties.
            rotated = self._servers[self._place :] + self._servers[: self._place]
            server = min(rotated, key=self._open.__getitem__)
        self._open[server] += 1
        try:
            return await server.answer(request)
        finally:
            self._open[server] -= 1


def simulate(group: Group, calls: Iterable[tuple[float, Job]]) -> list[Outcome]:
    """Serve calls at their times; returns their outcomes in the order of their arrival."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(_served(group, calls))


async def _served(group: Group, calls: Iterable[tuple[float, Job]]) -> list[Outcome]:
    loop, chance = asyncio.get_running_loop(), random.Random(0)
    servers = [Server(group) for _ in range(group.num_servers)]
    for server in servers:
        await server.engine.start()
    num_balancers = group.num_clients if group.policy is Policy.ROUND_ROBIN else 1
    balancers = [Balancer(group.policy, servers, chance) for _ in range(num_balancers)]
    outcomes: list[Outcome] = []

    async def call(outcome: Outcome) -> None:
        try:
            result = await chance.choice(balancers).send(engine_request(outcome.job, outcome.arrival))
        except ServerError as error:
            outcome.code = type(error).__name__
        else:
            outcome.num_tokens = result.num_target_tokens
            outcome.queue_seconds = result.timings.queue_seconds
        outcome.end = loop.time() + group.times.wire_seconds

    async with asyncio.TaskGroup() as tasks:
        for at, job in calls:
            await asyncio.sleep(at - loop.time())
            outcomes.append(Outcome(job, at, sent=at))
            tasks.create_task(call(outcomes[-1]))
    for server in servers:
        assert not server.engine.num_slots_wanted(), "every slot is back"
        await server.engine.stop()
    return outcomes
