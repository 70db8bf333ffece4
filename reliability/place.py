"""The environment of the parts of the reliability benchmark: bundles, servers, and bars."""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks import report
from benchmarks.load.mix import MAX_TARGET_LENGTH
from benchmarks.serving import RunningServer, serving

Figures = dict[str, Any]
Bar = dict[str, Any]  # as of `benchmarks.report.bar`, with `timed`

TINY, BASE = "tiny", "base"
_BASE_FLAGS = ["--max-slots", "208"]
_BASE_FLAGS += ["--max-source-length", str(MAX_TARGET_LENGTH), "--max-target-length", str(MAX_TARGET_LENGTH)]
_SETTLED_SECONDS = 20.0
# gRPC, asyncio and the pools that read sources and build answers start threads on demand, and keep them; each
# of the four pools has up to four for each caller at once.
_SPARE_THREADS = 8 + 4 * 4


@dataclass
class Place:
    """The environment of one part, which adds its bars.

    Attributes:
        folder: Folder for bundles and logs.
        scale: Factor of all times and numbers.
        server_cores: CPUs of the servers.
        client_cores: CPUs of the callers.
        bars: What the part measured, beside the bounds.
    """

    folder: Path
    scale: float
    server_cores: Sequence[int]
    client_cores: Sequence[int]
    progress: Progress
    bars: list[Bar] = field(default_factory=list)

    def count(self, full: int, least: int = 1) -> int:
        """Returns a number at this scale, but at least `least`."""
        return max(round(full * self.scale), least)

    def seconds(self, full: float, least: float = 1.0) -> float:
        """Returns a duration at this scale, but at least `least`."""
        return max(full * self.scale, least)

    def at_most(self, name: str, value: float, bar: float, *, is_timed: bool = False) -> None:
        """Add a bar with an upper bound; `is_timed` if the value depends on the machine's speed and load."""
        self.bars.append(report.bar(name, value, bar, is_least=False) | {"timed": is_timed})

    def at_least(self, name: str, value: float, bar: float, *, is_timed: bool = False) -> None:
        """Add a bar with a lower bound."""
        self.bars.append(report.bar(name, value, bar) | {"timed": is_timed})

    def expect(self, codes: Counter[str], *expected: str, whose: str = "calls") -> None:
        """Add a bar that is met if every call ended with one of the expected statuses."""
        strange = sum(count for code, count in codes.items() if code not in expected)
        self.at_most(f"{whose} that ended with anything but {', '.join(expected)}", strange, 0)

    def bundle(self, model: str) -> Path:
        """Returns a bundle with the sizes of the preset and random weights; the first call exports it."""
        path = self.folder / model
        if not path.exists():
            # Imports torch, which a part that keeps its bundles does not need.
            from benchmarks.load.bundles import export_random

            export_random(model, path)
        return path

    @contextmanager
    def serving(self, model: str, flags: Sequence[str] = (), **how: Any) -> Iterator[RunningServer]:
        """Run a server of a model on the server's cores; this process moves to the callers'.

        The server's log goes to the file that `take_log` reads.
        """
        flags = ["--provider", "cpu", *(_BASE_FLAGS if model == BASE else ()), *flags]
        bundle, before = self.bundle(model), os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.server_cores)
        try:
            with self._log.open("ab") as log, serving(bundle, flags, stderr=log, **how) as server:
                os.sched_setaffinity(0, self.client_cores)
                yield server
        finally:
            os.sched_setaffinity(0, before)

    @contextmanager
    def checked(self, server: RunningServer) -> Iterator[dict[str, float]]:
        """Add bars that are met if the server holds nothing for callers after the block.

        Yields:
            The server's state, at first before the block; when the block has ended, after it.
        """
        before = state(server)
        current = before.copy()
        yield current
        current.update(once(server, lambda now: not _excess(before, now), _SETTLED_SECONDS))
        for name, (value, bar) in _held(before, current).items():
            self.at_most(name, value, bar)

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


def _held(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Returns what a server without callers should not hold for them, with the most that is allowed."""
    held = ("seq2seq_slots_in_use", "seq2seq_num_requests_running", "seq2seq_num_requests_waiting")
    grown = {name: after[name] - before[name] for name in ("process_open_fds", "threads")}
    return {
        "slots and requests that did not come back": (sum(after[name] for name in held), 0),
        "RPCs that never ended": (after["seq2seq_open_calls"], 0),
        # Two are allowed: a connection that is kept open, and the connection of this query.
        "sockets and files left open": (grown["process_open_fds"], 2),
        "threads left over": (grown["threads"], _SPARE_THREADS),
    }


def _excess(before: Mapping[str, float], after: Mapping[str, float]) -> bool:
    return any(value > bar for value, bar in _held(before, after).values())
