import errno
import logging
import os
import resource

import pytest

from seq2seq_serve.server.descriptors import Descriptors


@pytest.fixture
def limits(monkeypatch):
    """The limits of a process that may raise its own."""
    pair = [1024, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(pair))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: pair.__setitem__(slice(None), limits))
    return pair


@pytest.mark.parametrize(
    ("hard", "limit"), [(4096, 4064), (1024, 992), (64, 56), (resource.RLIM_INFINITY, 2**20 - 32)]
)
def test_the_limit_is_raised_but_for_a_reserve(limits, hard, limit):
    limits[:] = [32, hard]
    assert Descriptors().limit == limit
    assert limits == [limit, hard]


def test_the_reserve_may_be_used_until_the_last_block_ends(limits):
    descriptors = Descriptors()
    with descriptors.reserved():
        with descriptors.reserved():
            assert limits[0] == 4096
        assert limits[0] == 4096
    assert limits[0] == descriptors.limit


def test_a_limit_that_cannot_be_raised_stays(limits, monkeypatch, caplog):
    def refuse(_, limits):
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    descriptors = Descriptors()
    with descriptors.reserved():
        assert descriptors.limit == 1024
    assert "the limit of 1024 open files and sockets cannot be raised: not allowed" in caplog.text


def test_a_warning_comes_once_until_there_is_room_again(limits, monkeypatch, caplog):
    numbers = iter([100, 3700, 3800, 3000, 3700, 100, 3700])
    monkeypatch.setattr(os, "open", lambda *_: next(numbers))
    monkeypatch.setattr(os, "close", lambda _: None)
    descriptors = Descriptors()
    with caplog.at_level(logging.WARNING):
        for num_warnings in (0, 1, 1, 1, 1, 1, 2):
            descriptors.check()
            assert len(caplog.records) == num_warnings
    assert "at least 3700 of 4064 files and sockets are open" in caplog.text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.EMFILE, "at least 4064 of 4064 files and sockets are open"),
        (errno.ENFILE, "the whole machine has no free file descriptor"),
    ],
)
def test_a_machine_without_descriptors_does_not_end_the_server(limits, monkeypatch, caplog, number, text):
    """The check raised where the whole machine had none left, which ended the loop that serves."""

    def refuse(*_):
        raise OSError(number, "none left")

    descriptors = Descriptors()
    monkeypatch.setattr(os, "open", refuse)
    for _ in range(2):
        descriptors.check()
    [record] = caplog.records
    assert text in record.getMessage()
