import threading

import pytest

from seq2seq_serve.server.runner.readers_writer import ReadersWriterLock


@pytest.fixture
def lock():
    return ReadersWriterLock()


class Holder:
    """A thread that takes a lock, and keeps it until `give_back`."""

    def __init__(self, hold) -> None:
        self.has_it = threading.Event()
        self._give_back = threading.Event()
        self._hold = hold
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def give_back(self) -> None:
        self._give_back.set()
        self._thread.join(20)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with self._hold():
            self.has_it.set()
            self._give_back.wait(20)


def test_many_read_at_once(lock):
    readers = [Holder(lock.reading) for _ in range(3)]
    assert all(reader.has_it.wait(20) for reader in readers)
    for reader in readers:
        reader.give_back()


@pytest.mark.parametrize("other", ["reading", "writing"])
def test_who_writes_is_alone(lock, other):
    writer = Holder(lock.writing)
    assert writer.has_it.wait(20)
    second = Holder(getattr(lock, other))
    assert not second.has_it.wait(0.05)
    writer.give_back()
    assert second.has_it.wait(20)
    second.give_back()


def test_who_waits_to_write_comes_before_new_readers(lock):
    reader = Holder(lock.reading)
    assert reader.has_it.wait(20)
    writer = Holder(lock.writing)
    while not lock._num_waiting:
        pass
    late = Holder(lock.reading)
    assert not late.has_it.wait(0.05)
    reader.give_back()
    assert writer.has_it.wait(20)
    assert not late.has_it.wait(0.05)
    writer.give_back()
    assert late.has_it.wait(20)
    late.give_back()


@pytest.mark.parametrize("how", ["reading", "writing"])
def test_an_error_gives_it_back(lock, how):
    with pytest.raises(ValueError, match="mine"), getattr(lock, how)():
        raise ValueError("mine")
    with lock.writing():
        pass
