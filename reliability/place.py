"""The environment of the parts of the reliability benchmark: new bundles, servers, and bars."""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.progress import Progress

from benchmarks import report
from benchmarks.load.mix import MAX_TARGET_LENGTH
from benchmarks.serving import RunningServer, serving

Figures = dict[str, Any]
Bar = dict[str, Any]  # as of `benchmarks.report.bar`, with `timed`

TINY, BASE = "tiny", "base"
_BASE_FLAGS = (
    *("--max-slots", "208"),
    *("--max-source-length", str(MAX_TARGET_LENGTH), "--max-target-length", str(MAX_TARGET_LENGTH)),
)
_SETTLED_SECONDS = 20.0
# gRPC, asyncio and the pools that read sources and build answers start threads on demand, and keep them; each
# of the four pools has up to four for each caller at once.
_SPARE_THREADS = 8 + 4 * 4


def at_most(name: str, value: float, bar: float, *, is_timed: bool = False) -> Bar:
    """Returns a bar with an upper bound.

    Args:
        name: What was measured.
        value: The measured value.
        bar: The bound.
        is_timed: Whether the value depends on the speed and the load of the machine.
    """
    return report.bar(name, value, bar, is_least=False) | {"timed": is_timed}


def at_least(name: str, value: float, bar: float, *, is_timed: bool = False) -> Bar:
    """Returns a bar with a lower bound."""
    return report.bar(name, value, bar) | {"timed": is_timed}


def unexpected(codes: Counter[str], *expected: str, whose: str = "calls") -> Bar:
    """Returns a bar that is met if every call ended with one of the expected statuses."""
    strange = sum(count for code, count in codes.items() if code not in expected)
    return at_most(f"{whose} that ended with anything but {', '.join(expected)}", strange, 0)


@dataclass(frozen=True)
class Place:
    """The environment of a part.

    Attributes:
        folder: Folder for bundles and logs.
        scale: Factor of all times and numbers.
        server_cores: CPUs of the servers.
        client_cores: CPUs of the callers.
    """

    folder: Path
    scale: float
    server_cores: Sequence[int]
    client_cores: Sequence[int]
    progress: Progress

    def count(self, full: int, least: int = 1) -> int:
        """Returns a number at this scale, but at least `least`."""
        return max(round(full * self.scale), least)

    def seconds(self, full: float, least: float = 1.0) -> float:
        """Returns a duration at this scale, but at least `least`."""
        return max(full * self.scale, least)

    def bundle(self, model: str) -> Path:
        """Returns a bundle with the sizes of the preset and random weights; the first call exports it."""
        path = self.folder / model
        if not path.exists():
            # Imports torch, which a part that keeps its bundles does not need.
            from benchmarks.load.bundles import export_random

            export_random(model, path)
        return path

    @contextmanager
    def serving(
        self,
        model: str | Path | Sequence[Path],
        flags: Sequence[str] = (),
        *,
        stderr: IO[bytes] | int | None = None,
        **how: Any,
    ) -> Iterator[RunningServer]:
        """Run a server of a model, or of folders, on the server's cores; this process moves to the callers'.

        The server's log goes to `stderr`; by default, to the file that `take_log` reads.
        """
        path = self.bundle(model) if isinstance(model, str) else model
        flags = ["--provider", "cpu", *(_BASE_FLAGS if model == BASE else ()), *flags]
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.server_cores)
        try:
            with self._log.open("ab") as log, serving(path, flags, stderr=stderr or log, **how) as server:
                os.sched_setaffinity(0, self.client_cores)
                yield server
        finally:
            os.sched_setaffinity(0, before)

    def take_log(self) -> str:
        """Returns the log of the servers that have ended, and empties it."""
        with self._log.open("a+", encoding="utf-8", errors="replace") as log:
            log.seek(0)
            text = log.read()
            log.truncate(0)
        return text

    @property
    def _log(self) -> Path:
        return self.folder / "servers.log"


def status(server: RunningServer, path: str) -> int:
    """Returns the status of a page on the server's HTTP port."""
    try:
        with urllib.request.urlopen(f"{server.metrics_url}{path}", timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def state(server: RunningServer) -> dict[str, float]:
    """Returns a server's current gauges and counters, summed over labels, and its number of threads."""
    values = defaultdict[str, float](float, threads=server.num_threads())
    for sample in server.samples():
        if "le" not in sample.labels:
            values[sample.name] += sample.value
    return values


def once(
    server: RunningServer, is_wanted: Callable[[dict[str, float]], bool], seconds: float
) -> dict[str, float]:
    """Returns the server's state once it is as wanted, or the last one before a timeout."""
    end = time.monotonic() + seconds
    while not is_wanted(now := state(server)) and time.monotonic() < end:
        time.sleep(0.1)
    return now


def settled(server: RunningServer, before: Mapping[str, float]) -> dict[str, float]:
    """Returns the server's state once it holds nothing for callers any more, or after a timeout."""
    return once(server, lambda now: all(bar["met"] for bar in nothing_left(before, now)), _SETTLED_SECONDS)


def nothing_left(before: Mapping[str, float], after: Mapping[str, float]) -> list[Bar]:
    """Returns bars that are met if a server without callers holds nothing for them."""
    held = ("seq2seq_slots_in_use", "seq2seq_num_requests_running", "seq2seq_num_requests_waiting")
    return [
        at_most("slots and requests that did not come back", sum(after[name] for name in held), 0),
        at_most("RPCs that never ended", after["seq2seq_open_calls"], 0),
        # Two are allowed: a connection that is kept open, and the connection of this query.
        at_most("sockets and files left open", after["process_open_fds"] - before["process_open_fds"], 2),
        at_most("threads left over", after["threads"] - before["threads"], _SPARE_THREADS),
    ]
