"""The sharing out of shards, with workers that translate nothing."""

import asyncio
import errno
from collections import Counter

import pytest

from seq2seq_serve.client.files import run as run_module
from seq2seq_serve.client.files.plan import JobError, Shard
from seq2seq_serve.client.files.run import RunProgress, plan_run
from seq2seq_serve.client.files.worker import Done, WorkerLost
from seq2seq_serve.documents.segments import WrongFile

SHARDS = [Shard(f"a-{number:05}", "/in/a.txt", 10 * number, 10, 0) for number in range(12)]


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    monkeypatch.setattr(run_module, "_PAUSE_SECONDS", 0.0)


class FakeWorkers:
    """Starts workers that translate nothing, and knows what they did.

    Args:
        errors: What a shard raises, one try after the other.
        lives: The number of shards after which the n-th worker is lost.
    """

    def __init__(self, errors=(), lives=()):
        self.errors = {name: list(raised) for name, raised in dict(errors).items()}
        self.lives = list(lives)
        self.done, self.tries = [], Counter()
        self.num_started = self.num_stopped = 0

    async def start(self):
        self.num_started += 1
        return Worker(self, self.lives.pop(0) if self.lives else 1000)


class Worker:
    num_unsaved_lines = 1

    def __init__(self, office, life):
        self.office, self.life = office, life

    async def translate(self, shard):
        self.office.tries[shard.name] += 1
        await asyncio.sleep(0)
        if self.life == 0:
            raise WorkerLost("it was killed")
        self.life -= 1
        if errors := self.office.errors.get(shard.name):
            raise errors.pop(0)
        self.office.done.append(shard)
        return Done(shard.num_lines, 1, 2)

    async def stop(self):
        self.office.num_stopped += 1


def translate(office, num_workers=2):
    run = RunProgress()
    try:
        asyncio.run(asyncio.wait_for(run.translate(SHARDS, office.start, num_workers), 20))
    finally:
        assert office.num_stopped == office.num_started
    return run


def test_every_shard_is_done_once():
    office = FakeWorkers()
    run = translate(office)
    assert sorted(office.done, key=lambda shard: shard.name) == SHARDS
    assert (run.num_lines, run.num_failed_lines, run.failed) == (120, 12, {})
    assert run.num_from_memory == 24
    assert office.num_started == 2


def test_a_shard_that_keeps_failing_is_left_out():
    office = FakeWorkers({"a-00003": [OSError("no space")] * 9})
    run = translate(office)
    assert run.failed == {"a-00003": "no space"}
    assert (run.num_lines, office.tries["a-00003"]) == (110, 3)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_another_worker_does_the_shards_of_a_lost_one(num_workers):
    office = FakeWorkers(lives=[2, 4, 1, 2])
    run = translate(office, num_workers)
    assert sorted(office.done, key=lambda shard: shard.name) == SHARDS
    assert run.num_lines == 120
    assert office.num_started > num_workers


def test_workers_that_are_lost_one_after_the_other_end_the_run():
    office = FakeWorkers(lives=[2, *[0] * 9])
    with pytest.raises(WorkerLost, match=r"5 workers .* killed"):
        translate(office, num_workers=1)
    assert len(office.done) == 2


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_a_shard_that_always_ends_its_worker_is_left_out_and_no_other(num_workers):
    office = FakeWorkers({"a-00003": [WorkerLost("it was killed")] * 9})
    run = translate(office, num_workers)
    assert run.failed == {"a-00003": "it was killed"}
    assert run.num_lines == 110


def test_a_full_disk_ends_the_run():
    office = FakeWorkers({"a-00002": [OSError(errno.ENOSPC, "no space")]})
    with pytest.raises(OSError, match="no space"):
        translate(office)
    assert office.tries["a-00002"] == 1


def test_a_mistake_that_all_shards_share_ends_the_run():
    office = FakeWorkers({"a-00002": [JobError("beam_size is 99")]})
    with pytest.raises(JobError, match="beam_size is 99"):
        translate(office)


def test_a_worker_that_never_comes_does_not_hold_up_the_others():
    class Full(FakeWorkers):
        async def start(self):
            if self.num_started == 1:
                await asyncio.Event().wait()
            return await super().start()

    office = Full()
    assert translate(office).num_lines == 120


def test_the_progress_counts_the_lines_of_shards_that_are_not_done():
    run = RunProgress(num_lines=20)
    run._workers += [Worker(FakeWorkers(), 1), Worker(FakeWorkers(), 1)]
    for worker, number in zip(run._workers, (3, 4), strict=True):
        worker.num_unsaved_lines = number
    assert run.num_lines_now == 27


def test_a_damaged_input_is_reported_before_the_next_ones_are_read(tmp_path):
    """All inputs were read for their digests first."""
    damaged = tmp_path / "a.txt.gz"
    damaged.write_text("not gzip")
    with pytest.raises(WrongFile, match="not a whole file of gzip"):
        plan_run(tmp_path / "out", [damaged, tmp_path / "missing.txt"], {}, 10, "")
    assert not (tmp_path / "out").exists()
