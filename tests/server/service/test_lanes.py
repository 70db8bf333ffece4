"""One thread for many callers: the answers' and those of the texts."""

import asyncio
import threading

import pytest

from seq2seq_serve.server.service.lanes import Lane


def test_work_whose_caller_leaves_is_not_begun_and_others_have_their_turn():
    """Each work that a caller left behind was begun, one after another, before anybody else's."""
    go, begun = threading.Event(), threading.Event()
    done: list[str] = []

    def hold() -> None:
        begun.set()
        assert go.wait(20)

    async def run():
        lane = Lane("lane")
        first = asyncio.ensure_future(lane.run(hold, 5, "a"))
        await asyncio.to_thread(begun.wait, 20)
        for _ in range(3):
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            first = asyncio.ensure_future(lane.run(lambda: done.append("left"), 5, "a"))
            await asyncio.sleep(0.01)
        first.cancel()
        other = asyncio.ensure_future(lane.run(lambda: done.append("other"), 7, "b"))
        await asyncio.sleep(0.01)
        assert lane.num_bytes["a"] == 5  # of what the thread works on, and of nothing else
        go.set()
        await other
        assert done == ["other"]
        await asyncio.sleep(0.01)
        assert not lane.num_bytes
        lane.stop()

    asyncio.run(run())
