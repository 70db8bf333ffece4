import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from grpc import aio

from seq2seq_serve.server.errors import InvalidRequest, Overloaded, TooLarge, Unavailable
from seq2seq_serve.server.service import arrivals as module
from seq2seq_serve.server.service.arrivals import Arrivals


def given(*messages: bytes) -> Callable[[], Awaitable[Any]]:
    """Receives the messages of a call that sent them at once."""
    left = iter(messages)

    async def receive() -> Any:
        return next(left, aio.EOF)

    return receive


def sent(sending: asyncio.Event) -> Callable[[], Awaitable[Any]]:
    """Receives the message of a call, once it is sent."""

    async def receive() -> bytes:
        await sending.wait()
        return b"late"

    return receive


def waiting(
    arrivals: Arrivals, caller: str = "a", sending: asyncio.Event | None = None
) -> asyncio.Task[bytes]:
    """A call whose message does not come before it is sent."""
    return asyncio.create_task(arrivals.only_message(sent(sending or asyncio.Event()), caller))


async def ended(*tasks: asyncio.Task[bytes]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def check_that_everything_is_back(arrivals: Arrivals) -> None:
    assert not arrivals._late.held
    assert not arrivals._limits
    for places in arrivals._places.values():
        assert not places.waiting
        assert places.num_free == arrivals._most_prompt


async def test_calls_that_send_nothing_keep_no_other_waiting():
    """24 calls without a message made every call of the same caller wait until their time was over."""
    arrivals = Arrivals(10, 2, 100)
    silent = [waiting(arrivals) for _ in range(20)]
    await asyncio.sleep(0)
    assert await arrivals.only_message(given(b"ours"), "a") == b"ours"
    assert not any(task.done() for task in silent)
    await ended(*silent)
    check_that_everything_is_back(arrivals)


async def test_of_the_calls_that_wait_the_newest_has_the_next_place(monkeypatch):
    monkeypatch.setattr(module, "_PROMPT_SECONDS", 1000)
    arrivals, order, sending = Arrivals(10, 1, 1), [], asyncio.Event()

    async def call(name: str) -> None:
        await arrivals.only_message(given(name.encode()), "a")
        order.append(name)

    first = waiting(arrivals, sending=sending)
    await asyncio.sleep(0)
    others = []
    for name in ("old", "left", "new"):
        others.append(asyncio.create_task(call(name)))
        await asyncio.sleep(0)
    others[1].cancel()
    sending.set()
    assert await first == b"late"
    await asyncio.wait(others)
    assert order == ["new", "old"]
    check_that_everything_is_back(arrivals)


async def test_a_place_is_passed_on_by_a_call_that_leaves_as_it_gets_it(monkeypatch):
    monkeypatch.setattr(module, "_PROMPT_SECONDS", 1000)
    arrivals, sending = Arrivals(10, 1, 1), asyncio.Event()
    first = waiting(arrivals, sending=sending)
    await asyncio.sleep(0)
    second = waiting(arrivals)
    await asyncio.sleep(0)
    sending.set()
    await first  # now the second call has the place, and has not run yet
    second.cancel()
    assert await arrivals.only_message(given(b"ours"), "a") == b"ours"
    await ended(second)
    check_that_everything_is_back(arrivals)


async def test_the_time_for_a_message_begins_when_it_is_asked_for(monkeypatch):
    """It ran while a call waited for the messages of others."""
    monkeypatch.setattr(module, "_PROMPT_SECONDS", 1000)
    arrivals = Arrivals(10, 1, 1)
    tasks = [waiting(arrivals) for _ in range(3)]
    await asyncio.sleep(0)
    assert [limit.when() for limit in arrivals._limits] == [None] * 3
    await ended(*tasks)
    check_that_everything_is_back(arrivals)


async def test_a_message_that_does_not_come_in_time_is_refused(monkeypatch):
    monkeypatch.setattr(module, "_MESSAGE_SECONDS", 0.1)
    arrivals = Arrivals(10, 1, 1)
    with pytest.raises(InvalidRequest, match=r"did not arrive within 0\.1 seconds"):
        await waiting(arrivals)
    check_that_everything_is_back(arrivals)


async def late(arrivals: Arrivals, number: int) -> None:
    async with asyncio.timeout(20):
        while arrivals._late.held.total() < number:
            await asyncio.sleep(0.01)


async def test_late_messages_are_received_although_more_come_and_other_callers_have_their_part():
    """The oldest was refused: of a hundred callers with slow connections, none ever sent a whole message."""
    arrivals, sending = Arrivals(10, 8, 4), asyncio.Event()
    tasks = [waiting(arrivals, sending=sending) for _ in range(4)]
    await late(arrivals, 4)
    with pytest.raises(Overloaded, match="4 messages have not come in time, 4 of them this caller's"):
        await waiting(arrivals)
    tasks += [waiting(arrivals, "b", sending) for _ in range(2)]
    await late(arrivals, 6)
    sending.set()
    assert await asyncio.gather(*tasks) == [b"late"] * 6
    check_that_everything_is_back(arrivals)


async def test_a_message_is_waited_for_although_too_many_are_late():
    arrivals, sending = Arrivals(10, 1, 1), asyncio.Event()
    first = waiting(arrivals)
    await late(arrivals, 1)
    second = waiting(arrivals, sending=sending)
    async with asyncio.timeout(20):
        while (places := arrivals._places["a"]).num_free:
            await asyncio.sleep(0)
    await asyncio.sleep(0.05)  # its time for a prompt message is over, or the test shows nothing
    assert not second.done()
    assert not places.num_free
    await ended(first, second)
    check_that_everything_is_back(arrivals)


async def test_callers_without_a_part_of_the_late_messages_are_refused():
    """Where more callers than that had late ones, a message of a further one was waited for without end."""
    arrivals = Arrivals(10, 1, 1)
    tasks = [waiting(arrivals, name) for name in "abc"]
    done, _ = await asyncio.wait(tasks, timeout=20, return_when=asyncio.FIRST_COMPLETED)
    while len(done) < 2:
        more, _ = await asyncio.wait(set(tasks) - done, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        assert more
        done |= more
    assert all(isinstance(task.exception(), Overloaded) for task in done)
    await ended(*set(tasks) - done)
    check_that_everything_is_back(arrivals)


async def test_a_call_has_a_message():
    arrivals = Arrivals(10, 1, 1)
    with pytest.raises(InvalidRequest, match="must have a message"):
        await arrivals.only_message(given(), "a")
    check_that_everything_is_back(arrivals)


async def test_the_end_of_a_call_is_not_waited_for():
    """It is one more event of gRPC, which took a tenth of what a short call costs."""
    receive = given(b"one", b"two")
    assert await Arrivals(10, 1, 1).only_message(receive, "a") == b"one"
    assert await receive() == b"two"


async def test_a_message_longer_than_its_method_takes_is_refused():
    with pytest.raises(TooLarge, match="the message has 11 bytes, and this method takes at most 10"):
        await Arrivals(10, 1, 1).only_message(given(bytes(11)), "a")


async def test_a_drain_ends_calls_with_a_place_late_ones_and_those_that_wait():
    arrivals = Arrivals(10, 2, 4)
    tasks = [waiting(arrivals) for _ in range(2)]
    async with asyncio.timeout(20):
        while arrivals._late.held.total() < 2:
            await asyncio.sleep(0.01)
    tasks += [waiting(arrivals) for _ in range(3)]
    await asyncio.sleep(0)
    arrivals.drain()
    arrivals.drain()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, Unavailable)
    check_that_everything_is_back(arrivals)
