"""Streams wait for their turn before they take the sound that they decode."""

import asyncio

import pytest

from seq2seq_serve.server.service.live.admission import DecodingLine


class Turn:
    """A stream in the line: it has a place from `has_begun` until it is finished."""

    def __init__(self, line: DecodingLine, caller: str = "a", priority: float = 0) -> None:
        self.has_begun, self._is_finished = False, asyncio.Event()
        self.task = asyncio.create_task(self._run(line, caller, priority))

    async def _run(self, line: DecodingLine, caller: str, priority: float) -> None:
        async with line.place(caller, priority):
            self.has_begun = True
            await self._is_finished.wait()

    async def finish(self) -> None:
        self._is_finished.set()
        await self.task
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def begun(line: DecodingLine, number: int) -> list[Turn]:
    turns = [Turn(line) for _ in range(number)]
    await settle()
    return turns


async def num_at_once(line: DecodingLine) -> int:
    turns = await begun(line, 40)
    number = sum(turn.has_begun for turn in turns)
    for turn in turns:
        turn.task.cancel()
    await settle()
    return number


async def test_streams_take_turns_in_the_order_in_which_they_came():
    line = DecodingLine(1)
    turns = await begun(line, 4)
    for number in range(1, 4):
        assert [turn.has_begun for turn in turns] == [place < number for place in range(4)]
        await turns[number - 1].finish()
    await turns[3].finish()


async def test_each_core_has_a_place():
    assert await num_at_once(DecodingLine(3)) == 3


async def test_callers_take_turns_and_the_lowest_priority_goes_first():
    """A caller with one stream got two in a hundred decodings beside a caller with forty streams."""
    line, order = DecodingLine(1), list[str]()
    many = [Turn(line, "many") for _ in range(6)]
    await settle()
    few, urgent = Turn(line, "few"), Turn(line, "many", -1)
    await settle()
    turns = {**dict.fromkeys(many, "many"), few: "few", urgent: "urgent"}
    while turns:
        [now] = [turn for turn in turns if turn.has_begun]
        order.append(turns.pop(now))
        await now.finish()
    assert order == ["many", "urgent", "few", *["many"] * 5]


async def test_a_caller_who_comes_again_has_every_second_turn():
    line, order = DecodingLine(1), list[str]()
    turns = {Turn(line, "many"): "many" for _ in range(6)}
    turns[Turn(line, "few")] = "few"
    await settle()
    for _ in range(5):
        [now] = [turn for turn in turns if turn.has_begun]
        order.append(caller := turns.pop(now))
        turns[Turn(line, caller)] = caller
        await now.finish()
    assert order == ["many", "few", "many", "few", "many"]
    for turn in turns:
        turn.task.cancel()
    await settle()


async def test_many_are_decoded_at_once_if_that_takes_little_time_and_few_once_it_takes_more():
    line, numbers = DecodingLine(1), []
    for seconds in (0.01, 0.2):
        for _ in range(60):
            line.record(seconds)
        numbers.append(await num_at_once(line))
    assert numbers == [10, 1]


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_stream_that_ends_leaves_its_place(has_begun):
    line = DecodingLine(1)
    turns = await begun(line, 3)
    turns[0 if has_begun else 1].task.cancel()
    await settle()
    assert [turn.has_begun for turn in turns] == [True, has_begun, False]
    await turns[1 if has_begun else 0].finish()
    assert turns[2].has_begun
    await turns[2].finish()
    assert await num_at_once(line) == 1
