"""A fixture for all tests of bulk work."""

import pytest

from seq2seq_serve.bulk import __main__ as command
from seq2seq_serve.server.config import RunnerConfig


@pytest.fixture(autouse=True)
def _no_shared_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a process shares its threads, the sessions of other tests would have to share them, too."""
    monkeypatch.setattr(command, "_RUNNER", RunnerConfig(shares_threads=False))
