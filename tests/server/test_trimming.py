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
    sizes = iter([100, *[300] * 601, 340, 200, 300, 100])
    trimmer = Trimmer(lambda: next(sizes) * MIB)
    for _ in range(30):
        trimmer.look()
    assert library.num_trims == 30
    for _ in range(571):
        trimmer.look()
    num_trims = 30 + 570 // 4 + 1
    assert library.num_trims == num_trims
    for num_more in (0, 0, 1):  # not enough more, less than ever, and then more than that
        trimmer.look()
        assert library.num_trims == num_trims + num_more


def test_memory_that_a_long_attack_needed_is_given_back_soon_after_it(library):
    """After half a minute it was taken for what the process needs, and kept."""
    sizes = iter([100, *[900] * 124])
    trimmer = Trimmer(lambda: next(sizes) * MIB)
    for _ in range(120):
        trimmer.look()
    num_trims = library.num_trims
    for _ in range(4):
        trimmer.look()
    assert library.num_trims == num_trims + 1


def test_a_look_that_cannot_read_is_no_look(library):
    """For want of a file descriptor, memory seemed to be 0, and everything more than before."""
    sizes = iter([0, 300, 0, *[310] * 9])
    trimmer = Trimmer(lambda: next(sizes) * MIB)
    for _ in range(11):
        trimmer.look()
    assert library.num_trims == 0


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    sizes = iter([100, 900])
    Trimmer(lambda: next(sizes) * MIB).look()


def test_the_memory_of_this_process_is_measured():
    assert 10 * MIB < resident_bytes() < 2**40
