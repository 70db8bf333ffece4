import asyncio
from itertools import chain

import pytest

from seq2seq_serve.server.service.pace import Pace


class Loop:
    """An event loop's thread whose pieces of work take a known time, and which counts its rounds."""

    def __init__(self):
        self.now, self.num_rounds, self.by_round = 0.0, 0, {}
        self.pace = Pace(lambda: self.now)

    async def work(self, seconds):
        if not self.pace.has_time():
            await self.pace.turn()
        self.by_round.setdefault(self.num_rounds, []).append(seconds)
        self.now += seconds

    async def count_rounds(self):
        while True:
            await asyncio.sleep(0)
            self.num_rounds += 1


async def rounds_of(works, num_others):
    loop = Loop()
    for _ in range(num_others):
        loop.pace.make_way()
    counting = asyncio.create_task(loop.count_rounds())
    async with asyncio.TaskGroup() as tasks:
        for seconds in works:
            tasks.create_task(loop.work(seconds))
    counting.cancel()
    return list(loop.by_round.values())


@pytest.mark.parametrize("num_others", [0, 1])
async def test_work_that_is_alone_does_not_wait(num_others):
    assert await rounds_of([1.0] * 50, num_others) == [[1.0] * 50]


async def test_rounds_are_short_beside_other_calls_whatever_a_piece_costs():
    """Eight pieces, however long, ran in each round: ten rounds of a call's own took 20 ms."""
    small, large = 2**-14, 2**-8
    rounds = await rounds_of([small] * 40 + [large] * 5 + [small] * 40, 2)
    assert sorted(chain(*rounds)) == [small] * 80 + [large] * 5
    for works in rounds:  # two at most, as they are counted; the last piece of each begins in time
        assert sum(sorted(works)[:-2]) <= 2 * 0.0002
    assert len(rounds) <= 40  # but they are not shorter than they may be


async def test_work_whose_caller_leaves_gives_its_turn_to_others():
    loop = Loop()
    for _ in range(2):
        loop.pace.make_way()
    tasks = [asyncio.create_task(loop.work(0.001)) for _ in range(6)]
    await asyncio.sleep(0)
    for task in tasks[1:4]:
        task.cancel()
    await asyncio.wait(tasks, timeout=10)
    assert [task.cancelled() for task in tasks] == [False, True, True, True, False, False]
