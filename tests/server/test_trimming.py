import ctypes

import pytest

from server.trimming import Trimmer, resident_bytes

MIB = 2**20


class Library:
    """A C library that counts how often it is asked to trim."""

    num_trims = 0

    def malloc_trim(self, pad: int) -> None:
        self.num_trims += 1


@pytest.fixture
def library(monkeypatch):
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    return library


def test_memory_is_trimmed_while_the_process_has_more_than_before(library):
    sizes = iter([100, 100, 160, 900, 500, 120, 100])
    trimmer = Trimmer(lambda: next(sizes) * MIB)
    for num_trims in (0, 0, 1, 2, 2, 2):
        trimmer.look()
        assert library.num_trims == num_trims


def test_memory_that_stays_in_use_is_what_the_process_needs(library):
    sizes = iter([100, *[300] * 40, 340, 200, 300, 100])
    trimmer = Trimmer(lambda: next(sizes) * MIB)
    for _ in range(41):
        trimmer.look()
    assert library.num_trims == 30
    for num_trims in (30, 31):  # less than ever, and then more than that
        trimmer.look()
        assert library.num_trims == num_trims


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    sizes = iter([100, 900])
    Trimmer(lambda: next(sizes) * MIB).look()


def test_the_memory_of_this_process_is_measured():
    assert 10 * MIB < resident_bytes() < 2**40
