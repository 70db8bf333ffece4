import ctypes
import gc
import weakref

import pytest

from seq2seq_serve.server.system.trimming import Trimmer, resident_bytes

MIB = 2**20


class Library:
    """A C library that counts how often it is asked to trim."""

    def __init__(self):
        self.num_trims = 0

    def malloc_trim(self, pad: int) -> None:
        self.num_trims += 1


@pytest.fixture
def library(monkeypatch):
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    return library


def trims(library: Library, sizes: list[int]) -> list[int]:
    """How often memory had been trimmed after each look at a process of these sizes, but for the first."""
    rest = iter([size * MIB for size in sizes])
    trimmer, counts = Trimmer(lambda: next(rest)), []
    for _ in sizes[1:]:
        if trimmer.look():
            trimmer.trim()
        counts.append(library.num_trims)
    return counts


def test_memory_is_trimmed_while_the_process_has_more_than_before(library):
    assert trims(library, [100, 100, 160, 900, 500, 120, 100]) == [0, 0, 1, 2, 2, 2]


def test_memory_in_use_for_minutes_becomes_the_new_baseline(library):
    counts = trims(library, [100, *[300] * 601, 340, 200, 300, 100])
    assert counts[29] == 30
    needed = 30 + 570 // 4 + 1
    # At last not enough more, less than ever, and then more than that.
    assert counts[600:] == [needed, needed, needed, needed + 1, needed + 1]


def test_memory_that_a_long_attack_needed_is_given_back_soon_after_it(library):
    """After half a minute it was taken for what the process needs, and kept."""
    counts = trims(library, [100, *[900] * 124])
    assert counts[123] == counts[119] + 1


def test_a_failed_reading_of_memory_is_ignored(library):
    """For want of a file descriptor, memory seemed to be 0, and everything more than before."""
    assert trims(library, [0, 300, 0, *[310] * 9])[-1] == 0


class Cycle:
    """Garbage that only the collector can free."""

    def __init__(self):
        self.itself = self


@pytest.fixture
def without_collector():
    gc.disable()
    yield
    gc.enable()


def test_reference_cycles_are_collected_before_memory_is_trimmed(library, without_collector):
    """Messages of refused calls stayed for up to a minute, and nothing was there to be trimmed."""
    gone, is_gone = weakref.ref(Cycle()), []
    library.malloc_trim = lambda _: is_gone.append(gone() is None)
    trims(library, [100, 900])
    assert is_gone == [True]


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    sizes = iter([100, 900])
    assert not Trimmer(lambda: next(sizes) * MIB).look()


def test_the_memory_of_this_process_is_measured():
    assert 10 * MIB < resident_bytes() < 2**40
