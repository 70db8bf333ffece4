"""A whole server process on the stub: its start, calls of every kind, reloads beside traffic, and its end."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.gpu_check.service import VERSIONS, Life, live, repository
from benchmarks.serving import serving
from seq2seq_serve.client import Client
from tests.cuda_stub.log import Log, read_log
from tests.cuda_stub.run import Stub

pytestmark = pytest.mark.cuda_stub


class Run(NamedTuple):
    """A server process on the stub, and its log."""

    life: Life
    provider: str
    stderr: str
    log: Log


@pytest.fixture(scope="module")
def run(stub: Stub, cuda_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("service")
    log, stderr = folder / "log", folder / "stderr"
    flags = ["--provider", "require", "--open-repository", "--max-slots", "8", "--log-level", "info"]
    bundle = repository(cuda_bundle, folder)
    with (
        stderr.open("wb") as file,
        serving(bundle, flags, stderr=file, environment=stub.environment(log)) as server,
        Client(server.address, timeout_seconds=60) as client,
    ):
        [model] = client.models()
        life = live(server, client)
    return Run(life, model.provider, stderr.read_text(), read_log(log.read_text()))


def test_the_log_names_the_device_and_its_memory(run):
    assert re.search(r"fp16 on cuda \(Stub of an H100, \d+ GiB\), 8 slots", run.stderr)


def test_the_model_runs_on_cuda_and_steps_are_captured(run):
    assert run.provider == "cuda"
    assert run.log.whole.captures
    assert "not captured" not in run.stderr


def test_calls_of_every_kind_are_answered(run):
    assert run.life.problems == []


def test_reloads_beside_traffic_fail_no_call(run):
    assert run.life.loaded == list(VERSIONS)
    assert list(run.life.traffic) == ["answered"]


def test_the_server_finishes_a_stream_and_exits_with_0(run):
    assert run.life.last_answer == 1
    assert run.life.exit_code == 0


def test_nothing_that_cuda_refuses_is_asked_of_it(run):
    assert run.log.whole.errors == []
