"""Fixtures of the client's tests. A file that needs another server has a fixture `server` of its own."""

import sys
import tempfile

import pytest

from seq2seq_serve.client import Client
from seq2seq_serve.client.__main__ import main
from tests.server.service.harness import serving_on_a_thread


@pytest.fixture(scope="module")
def server():
    with serving_on_a_thread() as served:
        yield served


@pytest.fixture
def client(server):
    with Client(server.address) as client:
        yield client


@pytest.fixture
def run(server, capsys, monkeypatch, tmp_path):
    """Run a command against the server, in `tmp_path`: exit code, stdout, lines of stderr."""
    monkeypatch.chdir(tmp_path)

    def run(command: str, *arguments: str, stdin: bytes | None = None) -> tuple[int, str, list[str]]:
        with tempfile.TemporaryFile() as stream:  # the client reads from its descriptor
            stream.write(stdin or b"")
            stream.seek(0)
            monkeypatch.setattr(sys, "stdin", stream)
            address = [] if "--address" in arguments else ["--address", server.address]
            code = main([command, *address, *arguments])
        out, err = capsys.readouterr()
        return code, out, err.splitlines()

    return run
