"""Callers share a bounded amount, and each call that waits for room gets its turn."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seq2seq_serve.server.errors import Overloaded
from seq2seq_serve.server.service.shares import Room, Shares

LIMIT = 100


async def test_the_first_that_waits_goes_beyond_the_bound_and_no_other_does():
    """An amount larger than a caller's part never got room while others held theirs."""
    shares = Shares(LIMIT, "{}")
    shares.add("another", 60)
    rooms = [asyncio.ensure_future(shares.wait("a", amount)) for amount in (250, 70, 30, 70)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [room.done() for room in rooms] == [True, False, False, False]
    (await rooms[0]).close()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [room.done() for room in rooms] == [True, True, False, False]
    (await rooms[1]).shrink(10)
    await asyncio.sleep(0)
    assert [room.done() for room in rooms] == [True, True, True, False]
    for room in (await rooms[1], await rooms[2]):
        room.close()
    (await rooms[3]).close()
    assert dict(shares.held) == {"another": 60}


async def test_whoever_leaves_while_it_waits_holds_nothing():
    shares = Shares(LIMIT, "{}")
    first = await shares.wait("a", LIMIT)
    beyond = await shares.wait("b", LIMIT)
    waiting = [asyncio.ensure_future(shares.wait("b", LIMIT)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    beyond.close()  # the next one gets the room, and leaves before it knows
    waiting[1].cancel()
    for room in waiting[:2]:
        with pytest.raises(asyncio.CancelledError):
            await room
    first.close()
    (await waiting[2]).close()
    assert not shares.held
    room = await asyncio.wait_for(shares.wait("c", LIMIT), 20)
    room.close()


AMOUNTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 300), st.integers(0, 300)), max_size=25)


@settings(deadline=None)
@given(AMOUNTS)
def test_all_that_wait_get_room_and_one_of_them_at_most_is_beyond_the_bound(amounts):
    """Each is held for some turns of the loop, then shrinks, and ends."""
    shares, open_rooms, num_done = Shares(LIMIT, "{}"), list[Room](), 0

    async def hold(caller: str, amount: int, rest: int) -> None:
        nonlocal num_done
        room = await shares.wait(caller, amount)
        open_rooms.append(room)
        total = sum(one.amount for one in open_rooms)
        assert shares.held.total() >= total
        # Besides the one beyond the bound, those that fit, and those within the part of their caller
        largest = max((one.amount for one in open_rooms), default=0)
        assert total - largest <= LIMIT + len("abc") * LIMIT
        await asyncio.sleep(0)
        room.shrink(rest)
        await asyncio.sleep(0)
        open_rooms.remove(room)
        room.close()
        num_done += 1

    async def run() -> None:
        await asyncio.gather(*(hold(*one) for one in amounts))
        async with asyncio.timeout(20):  # one of two is beyond the bound
            for room in (await shares.wait("d", LIMIT), await shares.wait("e", LIMIT)):
                room.close()

    asyncio.run(run())
    assert num_done == len(amounts)
    assert not shares.held


def test_a_room_is_given_back_once_and_nothing_makes_no_caller():
    """A caller who held nothing took a part, and what was given back twice was another call's."""
    shares = Shares(LIMIT, "{}")
    with shares.add("idle", 0):
        first, second = shares.take("a", 30), shares.take("a", 30)
        first.close()
        first.close()
        assert dict(shares.held) == {"a": 30}
    second.close()
    assert not shares.held


async def test_a_room_grows_while_its_caller_has_room():
    shares = Shares(LIMIT, "{} bytes")
    with shares.add("a", 0) as room, shares.add("b", 40):
        assert "a" not in shares.held
        for amount in (10, 60, 30):  # what it has does not shrink
            room.grow(amount)
        assert dict(shares.held) == {"a": 60, "b": 40}
        with pytest.raises(Overloaded, match="100 bytes, 60 of them this caller's"):
            room.grow(61)
        assert (room.amount, shares.held["a"]) == (60, 60)
    assert not shares.held
