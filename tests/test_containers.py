"""Builds the image and runs the stack of docker-compose.yml: `pytest -m docker tests/test_containers.py`.

Needs a Docker engine that can have the base images and reach a package index. Everything that it starts has a
name of its own and a port that the engine chooses, so that it meets nothing that runs already; all of it is
removed at the end, except the layers that the next build finds in the cache.
"""

import json
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from seq2seq_serve import kernels
from seq2seq_serve.client import Client, ClientError
from seq2seq_serve.client.sync import Pending
from seq2seq_serve.server.config import ServerConfig
from tests.models import TrainedRun

pytestmark = pytest.mark.docker

ROOT = Path(__file__).parent.parent
MAX_IMAGE_BYTES = 500 * 10**6
DRAIN_SECONDS = int(ServerConfig().notice_seconds + ServerConfig().drain_seconds)

T = TypeVar("T")


def run(*command: str) -> str:
    """What a command prints; where it fails, its complaint is the test's."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout.strip()


def wait_for(probe: Callable[[], T | None], what: str, limit_seconds: float = 60) -> T:
    """The first answer that is not None. Asks again and again: containers announce nothing."""
    end = time.monotonic() + limit_seconds
    while (answer := probe()) is None:
        assert time.monotonic() < end, f"{what}: not within {limit_seconds:g} seconds"
        time.sleep(0.2)
    return answer


@pytest.fixture(scope="session")  # before the models of conftest.py are made
def compose() -> tuple[str, ...]:
    """The command of Compose 2 or 1.29, where there is an engine to talk to."""
    if shutil.which("docker") is None:
        pytest.skip("there is no docker command")
    info = subprocess.run(["docker", "info"], capture_output=True, text=True)
    if info.returncode:
        pytest.skip(f"no Docker engine answers: {(info.stderr or info.stdout).strip().splitlines()[-1]}")
    for command in ("docker", "compose"), ("docker-compose",):
        if (
            shutil.which(command[0])
            and not subprocess.run([*command, "version"], capture_output=True).returncode
        ):
            return command
    pytest.skip("there is neither `docker compose` nor docker-compose")


@pytest.fixture(scope="session")
def bundles(trained_run: TrainedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like ./bundles, with a model of number words as its demo."""
    path = tmp_path_factory.mktemp("containers") / "bundles"  # pytest's own folder is closed to other users
    shutil.copytree(trained_run.bundle, path / "demo")
    return path


@dataclass(frozen=True)
class Stack:
    """The running services.

    Attributes:
        image: The server's image.
        server: Its container.
        compose: The command for this project, to be followed by what to do.
    """

    image: str
    server: str
    compose: tuple[str, ...]

    def address(self, service: str, port: int) -> str:
        return run(*self.compose, "port", service, str(port))


def wait_until_ready(address: str) -> None:
    def serving() -> bool | None:
        try:
            return client.health() == "SERVING" or None
        except ClientError:
            return None

    with Client(address) as client:
        wait_for(serving, f"{address} serves")


@pytest.fixture(scope="module")
def stack(
    compose: tuple[str, ...], bundles: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    name = f"seq2seq-test-{uuid.uuid4().hex[:8]}"
    override = tmp_path_factory.mktemp("compose") / "override.json"  # JSON is YAML
    server = {"image": f"{name}:cpu", "volumes": [f"{bundles}:/bundles:ro"]}
    override.write_text(json.dumps({"services": {"server": server}}))
    ports = [f"{port}=127.0.0.1:0" for port in ("GRPC_PORT", "METRICS_PORT", "PROMETHEUS_PORT")]
    command = ("env", *ports, *compose, "-p", name, "-f", "docker-compose.yml", "-f", str(override))
    try:
        # Without what trains the demo's model, and without Grafana, which cannot be had everywhere.
        run(*command, "up", "--build", "--detach", "--no-deps", "server", "prometheus")
        stack = Stack(server["image"], run(*command, "ps", "-q", "server"), command)
        wait_until_ready(stack.address("server", 50051))
        yield stack
    finally:
        subprocess.run([*command, "logs", "--no-color", "server"], cwd=ROOT)  # shown where the start failed
        subprocess.run([*command, "down", "--volumes", "--timeout", "5"], cwd=ROOT, capture_output=True)
        subprocess.run(["docker", "image", "rm", server["image"]], capture_output=True)


def test_image_is_small(stack):
    assert int(run("docker", "image", "inspect", "-f", "{{.Size}}", stack.image)) <= MAX_IMAGE_BYTES


def test_image_has_no_torch_and_no_compiler(stack):
    look = (
        "import importlib.util as u, shutil as s; print(u.find_spec('torch'), s.which('cc'), s.which('gcc'))"
    )
    assert run("docker", "run", "--rm", "--entrypoint", "python", stack.image, "-c", look) == "None None None"


def test_image_has_operators_of_its_own_sources(stack):
    look = (
        "from seq2seq_serve import kernels; print(kernels.library('_cuda_operators'), kernels.instructions())"
    )
    found = run("docker", "run", "--rm", "--entrypoint", "python", stack.image, "-c", look)
    assert found == f"/app/kernels/_cuda_operators.so {kernels.instructions()}"


def test_server_is_not_root_and_can_write_nothing(stack):
    for folder in "/app", "/tmp", "/bundles":
        touch = subprocess.run(
            ["docker", "exec", stack.server, "touch", f"{folder}/file"], capture_output=True, text=True
        )
        assert touch.returncode == 1
        assert "Read-only file system" in touch.stderr
    assert run("docker", "exec", stack.server, "id", "-u") == "10001"


def test_compose_waits_longer_than_the_server_drains(stack):
    assert int(run("docker", "inspect", "-f", "{{.Config.StopTimeout}}", stack.server)) > DRAIN_SECONDS


def test_the_log_of_the_container_has_no_warning(stack):
    log = subprocess.run(["docker", "logs", stack.server], capture_output=True, text=True)
    assert log.stdout == ""
    model, version, files, ready = log.stderr.splitlines()
    assert " model demo: int8 on cpu" in model
    assert " is served" in version
    assert " connections of gRPC callers may be open" in files
    assert " ready: gRPC on 0.0.0.0:50051, " in ready


def test_a_sentence_is_translated_from_outside(stack):
    address = stack.address("server", 50051)
    answer = run(sys.executable, "-m", "client", "translate", "--address", address, "하나 둘 셋")
    assert answer.startswith("one"), answer  # it was trained for seconds: the first word is sure


def test_container_becomes_healthy(stack):
    def healthy() -> str | None:
        status = run("docker", "inspect", "-f", "{{.State.Health.Status}}", stack.server)
        return None if status == "starting" else status

    assert wait_for(healthy, "the health check") == "healthy"


OVERLOADED = (
    "RESOURCE_EXHAUSTED: the queue is full: with this call it would have 1025 requests, and at most 1024 "
    "may wait"
)


def text_or_refusal(call: Pending) -> str:
    try:
        return call.result().hypotheses[0].text
    except ClientError as error:
        return str(error)


def test_docker_stop_finishes_or_refuses_every_request_and_exits_0(stack, bundles):
    options = ["--detach", "--read-only", "--publish", "127.0.0.1:0:50051"]
    options += ["--volume", f"{bundles}:/bundles:ro"]
    server = run("docker", "run", *options, stack.image, "/bundles/demo", "--insecure", "--max-slots", "1")
    try:
        address = run("docker", "port", server, "50051/tcp").splitlines()[0]
        wait_until_ready(address)
        with Client(address) as client, ThreadPoolExecutor() as pool:
            text = client.translate("하나 둘 셋 넷")
            pending = [client.submit("하나 둘 셋 넷") for _ in range(2000)]  # some come while it drains
            pending[100].result()
            stopping = pool.submit(run, "docker", "stop", "--time", str(DRAIN_SECONDS + 10), server)
            # Also the client says it by itself, of a server whose health says that it will end, and where it
            # repeats a refused call until there is no server.
            away = re.compile(
                "UNAVAILABLE: ((model demo|the server) is shutting down|no server is ready .*"
                "|no server answers at .* \\(connections to all backends failing.*)"
            )
            answers = {away.sub("UNAVAILABLE", text_or_refusal(call)) for call in pending}
            stopping.result()
        assert text in answers
        assert answers <= {text, "UNAVAILABLE", OVERLOADED}
        assert run("docker", "inspect", "-f", "{{.State.ExitCode}}", server) == "0"
    finally:
        subprocess.run(["docker", "rm", "--force", "--volumes", server], capture_output=True)
