import asyncio
from itertools import chain

import pytest

from seq2seq_serve.server.service.pace import Pace


class Loop:
    """The thread of an event loop whose pieces of work take a known time; it counts its rounds."""

    def __init__(self, *, has_others=True):
        self.thread_time, self.now, self.has_others = 0.0, 0.0, has_others
        self.num_rounds, self.begun = 0, []
        self.pace = Pace(lambda: self.has_others, lambda: self.thread_time, lambda: self.now)

    async def work(self, name, seconds):
        await self.pace.turn()
        self.begun.append((name, self.num_rounds, seconds))
        self.thread_time += seconds

    async def count_rounds(self):
        while True:
            await asyncio.sleep(0)
            self.num_rounds += 1

    async def do(self, works):
        counting = asyncio.create_task(self.count_rounds())
        async with asyncio.TaskGroup() as tasks:
            for name, seconds in enumerate(works):
                tasks.create_task(self.work(name, seconds))
        counting.cancel()
        rounds = {}
        for _, number, seconds in self.begun:
            rounds.setdefault(number, []).append(seconds)
        return list(rounds.values())


async def test_work_that_is_alone_does_not_wait():
    assert await Loop(has_others=False).do([1.0] * 50) == [[1.0] * 50]


async def test_rounds_are_short_beside_other_calls_whatever_a_piece_costs():
    """Eight pieces, however long, ran in each round: ten rounds of a call's own took 20 ms."""
    small, large = 2**-14, 2**-8
    works = [small] * 40 + [large] * 5 + [small] * 40
    loop = Loop()
    rounds = await loop.do(works)
    assert [name for name, *_ in loop.begun] == list(range(85))
    assert list(chain(*rounds)) == works
    for of_round in rounds:  # two at most, as they are counted; the last piece of each begins in time
        assert sum(sorted(of_round)[:-2]) <= 2 * 0.0002
    assert len(rounds) <= 40  # but they are not shorter than they may be


async def test_calls_of_the_last_second_count():
    loop = Loop()
    assert len(await loop.do([1.0] * 5)) == 5
    loop.has_others, loop.now = False, 0.9
    loop.begun.clear()
    assert len(await loop.do([1.0] * 5)) == 5
    loop.now = 1.1
    loop.begun.clear()
    assert len(await loop.do([1.0] * 5)) == 1


@pytest.mark.parametrize("seconds", [2**-14, 2**-12, 1.0])
async def test_those_that_wait_go_before_those_that_come_later(seconds):
    """Work that came in each round took its whole time."""
    loop = Loop()
    works = [asyncio.create_task(loop.work(number, seconds)) for number in range(7)]
    for number in range(7, 60):
        await asyncio.sleep(0)
        works.append(asyncio.create_task(loop.work(number, seconds)))
    await asyncio.wait(works, timeout=20)
    assert [name for name, *_ in loop.begun] == list(range(60))


@pytest.mark.parametrize("num_rounds", range(6))
async def test_work_whose_caller_leaves_gives_its_turn_to_others(num_rounds):
    loop = Loop()
    works = [asyncio.create_task(loop.work(number, 1.0)) for number in range(9)]
    for _ in range(num_rounds):
        await asyncio.sleep(0)
    for work in works[1:4]:
        work.cancel()
    await asyncio.wait(works, timeout=20)
    assert all(work.done() for work in works)
    assert {name for name, *_ in loop.begun} >= {4, 5, 6, 7, 8}
