"""A fixture for all tests of bulk work."""

import dataclasses

import pytest

from seq2seq_serve.bulk import __main__ as command


@pytest.fixture(autouse=True)
def _no_shared_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a process shares its threads, the sessions of other tests would have to share them, too."""
    given = command.runner_config
    monkeypatch.setattr(
        command, "runner_config", lambda options: dataclasses.replace(given(options), shares_threads=False)
    )
