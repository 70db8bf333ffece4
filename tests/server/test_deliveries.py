import asyncio
import dataclasses
from typing import Any

import pytest

from seq2seq_serve.server.config import QueueLimits
from seq2seq_serve.server.deliveries import Deliveries, Mailbox
from seq2seq_serve.server.engine.records import (
    FinishReason,
    Request,
    Result,
    Timings,
    Turn,
    Update,
)
from seq2seq_serve.server.errors import Unavailable
from seq2seq_serve.server.models.served import ServedModel

RESULT = Result(FinishReason.EOS, (), 3, 4, Timings(0, 0, 0, 0))


def never() -> bool:
    return False


class _Metrics:
    def __init__(self):
        self.turns = []

    def record_turn(self, name, turn):
        self.turns.append((name, turn))


class _Engine:
    def __init__(self, error=None):
        self.error, self.submitted, self.cancelled = error, [], []

    def submit(self, *requests):
        if self.error is not None:
            raise self.error
        self.submitted += requests

    def cancel(self, request, *, is_expired):
        self.cancelled.append((request, is_expired))

    def may_take(self):
        return True

    def num_slots_wanted(self):
        return 0


def model_of(engines: tuple[Any, ...], deliveries: Deliveries) -> ServedModel:
    """A model that can only submit."""
    fields = dict.fromkeys(field.name for field in dataclasses.fields(ServedModel))
    return ServedModel(
        **{**fields, "engines": engines, "deliveries": deliveries, "queue_limits": QueueLimits()}
    )


def request() -> Request:
    return Request("r1", {}, 3, 5, arrival=0.0)


def test_tokens_that_come_while_the_reader_is_busy_are_taken_together():
    async def run():
        mailbox = Mailbox()
        mailbox.put({0: [1], 1: [7]}, None)
        mailbox.put({0: [2, 3]}, None)
        assert await mailbox.take() == ({0: [1, 2, 3], 1: [7]}, None)
        mailbox.put({0: [4]}, RESULT)
        assert await mailbox.take() == ({0: [4]}, RESULT)

    asyncio.run(run())


def test_a_turn_reaches_the_mailbox_of_its_request_and_the_metrics():
    async def run():
        metrics, engine = _Metrics(), _Engine()
        deliveries = Deliveries("echo", asyncio.get_running_loop(), metrics)
        mine, other = request(), request()
        with model_of((engine,), deliveries).submitted([mine], never) as (mailbox,):
            turn = Turn((Update(other, {0: [9]}, None), Update(mine, {0: [1]}, None)), num_rows=2)
            await asyncio.to_thread(deliveries.deliver, turn)
            assert await mailbox.take() == ({0: [1]}, None)
            last = Turn((Update(mine, {}, RESULT),))
            await asyncio.to_thread(deliveries.deliver, last)
            assert await mailbox.wait_for_result() is RESULT
        assert metrics.turns == [("echo", turn), ("echo", last)]
        assert (engine.submitted, engine.cancelled) == ([mine], [])

    asyncio.run(run())


@pytest.mark.parametrize(("stream", "lengths"), [(False, [9, 5, 3, 3]), (True, [3, 9, 3, 5])])
def test_the_longest_sources_of_a_call_come_first_unless_it_streams(stream, lengths):
    async def run():
        engine = _Engine()
        deliveries = Deliveries("echo", asyncio.get_running_loop(), _Metrics())
        requests = [Request("r1", {}, n, 5, arrival=0.0, stream=stream) for n in (3, 9, 3, 5)]
        with model_of((engine,), deliveries).submitted(requests, never) as mailboxes:
            assert [request.memory_length for request in engine.submitted] == lengths
            assert mailboxes == [deliveries.mailboxes[request] for request in requests]

    asyncio.run(run())


def test_a_request_left_before_its_end_is_cancelled():
    async def run():
        engine = _Engine()
        deliveries = Deliveries("echo", asyncio.get_running_loop(), _Metrics())
        mine = request()
        for is_expired in (never, lambda: True):
            with (
                pytest.raises(RuntimeError, match="the handler gave up"),
                model_of((engine,), deliveries).submitted([mine], is_expired),
            ):
                raise RuntimeError("the handler gave up")
        assert engine.cancelled == [(mine, False), (mine, True)]
        assert not deliveries.mailboxes

    asyncio.run(run())


def test_a_refused_request_leaves_nothing_behind():
    async def run():
        engine = _Engine(error=Unavailable("draining"))
        deliveries = Deliveries("echo", asyncio.get_running_loop(), _Metrics())
        model = model_of((engine,), deliveries)
        with pytest.raises(Unavailable, match="draining"), model.submitted([request()], never):
            pass
        assert not engine.cancelled
        assert not deliveries.mailboxes

    asyncio.run(run())


def test_a_refusal_reaches_the_mailbox_and_is_not_counted_as_an_end():
    async def run():
        metrics = _Metrics()
        deliveries = Deliveries("echo", asyncio.get_running_loop(), metrics)
        mine, left, error = request(), request(), Unavailable("draining")
        with model_of((_Engine(),), deliveries).submitted([mine], never) as (mailbox,):
            await asyncio.to_thread(deliveries.refuse, [mine, left], error)
            assert (await mailbox.wait_for_result()).error is error
        assert not metrics.turns
        assert (deliveries.statistics.failed.count, deliveries.statistics.failed.seconds) == (2, 0.0)

    asyncio.run(run())
