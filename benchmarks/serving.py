"""Runs a real server process for benchmarks and tests: starts it, waits for readiness, and terminates it."""

from __future__ import annotations

import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_READY_SECONDS, _STOP_SECONDS = 120.0, 60.0
_KEPT_SECONDS = 1.0  # for which the server answers scrapes with the same samples


def cpu_seconds(process_id: int) -> float:
    """Returns the processor time that a process has used so far, on all cores; Linux only."""
    # The 12th and 13th field after the command's name in parentheses: user and system time (proc(5)).
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class RunningServer:
    """A running server process and its addresses.

    Attributes:
        address: Host and port of gRPC.
        metrics_url: URL of the HTTP port, without a path.
        is_ended: Whether a caller has waited for its end; then that caller checks the exit code.
        scraped_at: When `samples` had its last answer, in monotonic seconds.
    """

    process: subprocess.Popen[bytes]
    address: str
    metrics_url: str
    is_ended: bool = False
    scraped_at: float = -math.inf

    def samples(self) -> list[Sample]:
        """Returns all current samples of `/metrics`, at the earliest a second after the last call."""
        time.sleep(max(self.scraped_at + _KEPT_SECONDS - time.monotonic(), 0))
        with urllib.request.urlopen(f"{self.metrics_url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        self.scraped_at = time.monotonic()
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def histogram(self, name: str) -> Histogram:
        """Returns the current state of one histogram of `/metrics`, summed over all its labels."""
        buckets: dict[float, float] = {}
        for sample in self.samples():
            if sample.name == f"{name}_bucket":
                bound = float(sample.labels["le"])
                buckets[bound] = buckets.get(bound, 0.0) + sample.value
        return Histogram(sorted(buckets.items()))

    def wait(self) -> int:
        """Wait for the end of a server that was terminated; returns its exit code."""
        self.is_ended = True
        return self.process.wait(_STOP_SECONDS)

    def cpu_seconds(self) -> float:
        """Returns `cpu_seconds` of the process and of the instances that it has started."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
        return sum(map(cpu_seconds, (self.process.pid, *children)))

    def num_threads(self) -> int:
        """Returns the current number of threads of the process; Linux only."""
        return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))


@dataclass(frozen=True)
class Histogram:
    """Cumulative counts by upper bound, as Prometheus keeps them."""

    buckets: list[tuple[float, float]]

    @property
    def count(self) -> int:
        """The number of observations."""
        return int(self.buckets[-1][1]) if self.buckets else 0

    def since(self, earlier: Histogram) -> Histogram:
        """Returns the observations after `earlier`, a previous state of the same histogram."""
        before = dict(earlier.buckets)
        return Histogram([(bound, count - before.get(bound, 0.0)) for bound, count in self.buckets])

    def quantile(self, q: float) -> float:
        """Returns a quantile, interpolated within its bucket as in Prometheus; NaN without observations."""
        if not self.count:
            return math.nan
        rank, low_bound, low_count = q * self.count, 0.0, 0.0
        for bound, count in self.buckets:
            if count >= rank:
                if math.isinf(bound):
                    return low_bound
                return low_bound + (bound - low_bound) * (rank - low_count) / (count - low_count)
            low_bound, low_count = bound, count
        return low_bound


@contextmanager
def serving(
    bundle: Path | Sequence[Path],
    flags: Sequence[str] = (),
    *,
    module: Sequence[str] = ("server",),
    stderr: IO[bytes] | int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[RunningServer]:
    """Runs `python -m server bundle`; the server is ready on entry and terminated on exit.

    Args:
        bundle: Folder of the bundle, or of several.
        flags: Additional command-line flags.
        module: The module that is run, and its own arguments before the server's.
        stderr: Receives the server's log; None means this process's standard error.
        environment: Additional environment variables.

    Raises:
        RuntimeError: The server did not become ready, or did not exit with 0 after SIGTERM.
    """
    port, metrics_port = free_ports(2)
    paths = [bundle] if isinstance(bundle, Path) else bundle
    command = [sys.executable, "-m", *module, *map(str, paths), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--metrics-port", str(metrics_port), "--log-level", "warning", *flags]
    process = subprocess.Popen(command, stderr=stderr, env=os.environ | dict(environment or {}))
    server = RunningServer(process, f"127.0.0.1:{port}", f"http://127.0.0.1:{metrics_port}")
    try:
        wait_until_ready(process, f"{server.metrics_url}/readyz")
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        code = process.wait(_STOP_SECONDS)
    if code != 0 and not server.is_ended:
        raise RuntimeError(f"the server exited with {code}")


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    """Wait until `url` answers with 200.

    Raises:
        RuntimeError: The process ended, or the server was not ready in time.
    """
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server exited with {process.returncode} before it was ready")
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"the server was not ready after {_READY_SECONDS:.0f} s")


def free_ports(count: int) -> list[int]:
    """Returns unused ports of all interfaces, below those that Linux gives to outgoing connections."""
    ports = set[int]()
    while len(ports) < count:
        port = random.randint(20_000, 32_000)
        with suppress(OSError), socket.create_server(("", port)):
            ports.add(port)
    return list(ports)
