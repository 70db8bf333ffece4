"""Streams wait for their turn before they take the sound that they decode."""

import asyncio
from types import SimpleNamespace

import pytest

from seq2seq_serve.server.service.live import admission
from seq2seq_serve.server.service.live.admission import DecodingLine


class Clock:
    """Monotonic seconds that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(admission, "time", SimpleNamespace(monotonic=lambda: self.now))


class Turn:
    """A stream in the line: it has a place from `has_begun` until it is finished."""

    def __init__(self, line: DecodingLine) -> None:
        self.has_begun, self._is_finished = False, asyncio.Event()
        self.task = asyncio.create_task(self._run(line))

    async def _run(self, line: DecodingLine) -> None:
        async with line.place():
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


async def test_streams_take_turns_in_the_order_in_which_they_came(monkeypatch):
    clock, line = Clock(monkeypatch), DecodingLine(1)
    turns = await begun(line, 4)
    for number in range(1, 4):
        assert [turn.has_begun for turn in turns] == [place < number for place in range(4)]
        clock.now += 1
        await turns[number - 1].finish()
    await turns[3].finish()


async def test_each_core_has_a_place(monkeypatch):
    Clock(monkeypatch)
    assert await num_at_once(DecodingLine(3)) == 3


async def test_many_are_decoded_at_once_if_that_takes_little_time_and_few_once_it_takes_more(monkeypatch):
    clock, line, numbers = Clock(monkeypatch), DecodingLine(1), []
    for seconds in (0.01, 0.2):
        for _ in range(60):
            [turn] = await begun(line, 1)
            clock.now += seconds
            await turn.finish()
        numbers.append(await num_at_once(line))
    assert numbers == [10, 1]


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_stream_that_ends_leaves_its_place(has_begun, monkeypatch):
    Clock(monkeypatch)
    line = DecodingLine(1)
    turns = await begun(line, 3)
    turns[0 if has_begun else 1].task.cancel()
    await settle()
    assert [turn.has_begun for turn in turns] == [True, has_begun, False]
    await turns[1 if has_begun else 0].finish()
    assert turns[2].has_begun
    await turns[2].finish()
    assert await num_at_once(line) == 1
