"""Drives a core, or an engine with its cores, turn by turn, on the thread and by the clock of a test."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain

from seq2seq_serve.bundle.adapters import Weights
from seq2seq_serve.server.config import QueueLimits
from seq2seq_serve.server.engine.async_engine import AsyncEngine, CoreHandle, Stream
from seq2seq_serve.server.engine.core import Admit, Cancel, Core, WriteAdapter
from seq2seq_serve.server.engine.request import Request
from seq2seq_serve.server.engine.result import Result, Turn
from seq2seq_serve.server.runner.runner import OnnxRunner
from tests.server.fakes import FakeRunner


class Driver:
    """A core that a test drives turn by turn, with a clock of its own.

    Args:
        runner: The core's runner.
        tick: By how much each look at the clock moves it on.
        options: Arguments of the core.
    """

    def __init__(self, runner: FakeRunner | OnnxRunner, *, tick: float = 0.0, **options) -> None:
        self.runner = runner
        self.now = 0.0
        self._tick = tick
        self.turns: list[Turn] = []
        self.delivered_at: list[float] = []
        self.results: dict[Request, Result] = {}
        self.streamed: dict[Request, dict[int, list[int]]] = {}
        self.core = Core(
            runner,
            model_name="fake",
            deliver=self._deliver,
            clock=self._look,
            **{"held_seconds": 0.0} | options,
        )

    def _look(self) -> float:
        self.now += self._tick
        return self.now

    def _deliver(self, turns: list[Turn]) -> None:
        self.turns += turns
        self.delivered_at.append(self.now)
        for update in chain.from_iterable(turn.updates for turn in turns):
            assert update.request not in self.results, "news of a request that has ended"
            for place, token_ids in update.token_ids.items():
                self.streamed.setdefault(update.request, {}).setdefault(place, []).extend(token_ids)
            if update.result is not None:
                self.results[update.request] = update.result

    @property
    def is_failing(self) -> bool:
        return self.turns[-1].is_failing

    def told(self, request: Request, place: int = 0) -> list[int]:
        """The tokens that were streamed of one of its hypotheses."""
        return self.streamed.get(request, {}).get(place, [])

    def submit(self, *requests: Request) -> None:
        self.core.send(Admit(requests))

    def cancel(self, request: Request, *, is_expired: bool = False) -> None:
        self.core.send(Cancel(request, is_expired))

    def turn(self, count: int = 1, seconds: float = 1.0) -> None:
        for _ in range(count):
            self.now += seconds
            self.core.run_turn()

    def finish(self, seconds: float = 1.0) -> None:
        for _ in range(10_000):
            self.turn(seconds=seconds)
            if not (self.core.scheduler.running or self.core.scheduler.waiting):
                break
        assert_empty(self.core)


def assert_empty(core: Core) -> None:
    """Nothing waits, nothing runs, every slot is back."""
    scheduler = core.scheduler
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler.load() == (0, 0, 0, 0)
    assert scheduler.slots.rows == ()
    assert scheduler.slots.num_free == scheduler.slots.num_slots


class DrivenCore(CoreHandle):
    """A core without a thread: `run_turn` runs one."""

    def __init__(self, runner: FakeRunner | OnnxRunner, clock: Callable[[], float]) -> None:
        super().__init__(runner.num_slots)
        self.core = Core(
            runner,
            model_name="fake",
            deliver=lambda turns: self._turned(turns),
            held_seconds=0.0,
            clock=clock,
        )
        self.age = 0.0  # of its present turn

    async def start(self, turned, ended) -> None:
        self._turned, self.ended = turned, ended

    def admit(self, requests: tuple[Request, ...]) -> None:
        self.core.send(Admit(requests))

    def cancel(self, request: Request, *, is_expired: bool) -> None:
        self.core.send(Cancel(request, is_expired))

    def write_adapter(self, place: int, weights: Weights) -> None:
        self.core.send(WriteAdapter(place, weights))

    def watch(self) -> None:
        self.core.watch()

    def turn_seconds(self) -> float:
        return self.age

    def kill(self) -> None:
        self.ended("it was killed")

    async def stop(self) -> None:
        self.core.run_turn()


class DrivenEngine:
    """An engine over cores that a test drives. Deadlines pass by its clock, when it turns.

    Args:
        record: Is called with each turn; None keeps them in `turns`.
    """

    def __init__(
        self,
        *runners: FakeRunner | OnnxRunner,
        record: Callable[[Turn], object] | None = None,
        **limits,
    ) -> None:
        self.now = 0.0
        self.turns: list[Turn] = []
        self.cores = [DrivenCore(runner, lambda: self.now) for runner in runners]
        self.engine = AsyncEngine(
            "fake",
            self.cores,
            QueueLimits(**limits),
            record or self.turns.append,
            feeds_prefix=not runners[0].has_decode,
            clock=lambda: self.now,
        )
        self._calls = ExitStack()

    @contextmanager
    def started(self) -> Iterator["DrivenEngine"]:
        """Starts the engine on a loop that the test does not run; at the end nothing may be left."""

        async def run() -> None:
            await self.engine.start()

        with asyncio.Runner() as runner:
            runner.run(run())
            asyncio.set_event_loop(runner.get_loop())
            asyncio._set_running_loop(runner.get_loop())
            try:
                yield self
                self.finish()
            finally:
                asyncio._set_running_loop(None)
            runner.run(self.engine.stop())

    def submit(self, *requests: Request) -> list[Stream]:
        """Submits the requests of a call; the end of the test cancels those that run then."""
        return self._calls.enter_context(self.engine.submitted(requests))

    def cancel(self, request: Request) -> None:
        self.engine._cancel(request, is_expired=False)

    def turn(self, count: int = 1, seconds: float = 1.0) -> None:
        for _ in range(count):
            self.now += seconds
            for request in tuple(self.engine._timers):
                if request.deadline is not None and request.deadline <= self.now:
                    self.engine._expire(request)
            for core in self.cores:
                if core.is_ready:
                    core.core.run_turn()

    def finish(self) -> None:
        for _ in range(10_000):
            if not self.engine.num_slots_wanted():
                break
            self.turn()
        self._calls.close()
        self.check_empty()

    def check_empty(self) -> None:
        """Nothing waits, nothing runs, every slot is back, and nothing is remembered."""
        assert not self.engine._streams
        assert not self.engine._timers
        assert self.engine.num_slots_wanted() == 0
        assert self.engine.load() == (0, 0, 0, 0)
        for core in self.cores:
            assert not core.requests
            assert core.num_slots_wanted == 0
            assert_empty(core.core)
