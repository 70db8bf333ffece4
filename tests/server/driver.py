"""Drives an engine turn by turn, on the thread and by the clock of a test."""

from seq2seq_serve.server.engine.engine import Engine
from seq2seq_serve.server.engine.records import Request, Result, Turn
from seq2seq_serve.server.runner.runner import OnnxRunner
from tests.server.fakes import FakeRunner


class Driver:
    """An engine that a test drives turn by turn, with a clock of its own."""

    def __init__(self, runner: FakeRunner | OnnxRunner, **options) -> None:
        self.runner = runner
        self.now = 0.0
        self.turns: list[Turn] = []
        self.results: dict[Request, Result] = {}
        self.streamed: dict[Request, dict[int, list[int]]] = {}
        self.engine = Engine(
            runner, model_name="fake", deliver=self._deliver, clock=lambda: self.now, **options
        )

    def _deliver(self, turn: Turn) -> None:
        self.turns.append(turn)
        for update in turn.updates:
            assert update.request not in self.results, "news of a request that has ended"
            for place, token_ids in update.token_ids.items():
                self.streamed.setdefault(update.request, {}).setdefault(place, []).extend(token_ids)
            if update.result is not None:
                self.results[update.request] = update.result

    def told(self, request: Request, place: int = 0) -> list[int]:
        """The tokens that were streamed of one of its hypotheses."""
        return self.streamed.get(request, {}).get(place, [])

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.engine.submit(request)

    def turn(self, count: int = 1, seconds: float = 1.0) -> None:
        for _ in range(count):
            self.now += seconds
            self.engine.run_turn()

    def finish(self) -> None:
        for _ in range(10_000):
            self.turn()
            if not self.engine._scheduler.has_work:
                break
        assert_empty(self.engine)


def assert_empty(engine: Engine) -> None:
    """Nothing waits, nothing runs, every slot is back."""
    scheduler = engine._scheduler
    assert not scheduler.has_work
    assert engine.load() == (0, 0, 0, 0)
    queue = scheduler._queue
    assert queue._num_tokens == queue.num_slots_wanted == 0
    assert not queue._works
    assert not queue._callers, "a caller is remembered of whom nothing waits or runs"
    assert not scheduler._deadlines._keys
    assert not scheduler.running
    assert scheduler.slots.num_reserved == 0
    assert scheduler.slots.rows == ()
    assert scheduler.slots.num_free == engine.num_slots
