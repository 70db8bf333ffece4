"""Where the parts of the reliability benchmark run: bundles made on the spot, and servers."""

from __future__ import annotations

import dataclasses
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.progress import Progress

from benchmarks.load_mix import MAX_TARGET_LENGTH, VOCAB_SIZE
from benchmarks.serving import RunningServer, serving
from bundle.names import Precision
from training.presets import PRESETS

Figures = dict[str, Any]

TINY, BASE = "tiny", "base"
_BASE_FLAGS = (
    *("--max-slots", "208"),
    *("--max-source-length", str(MAX_TARGET_LENGTH), "--max-target-length", str(MAX_TARGET_LENGTH)),
)
_SETTLED_SECONDS = 20.0
_SPARE_THREADS = 8  # gRPC and asyncio start some when they need them, and keep them


@dataclass(frozen=True)
class Bar:
    """One number, and what it has to be.

    Attributes:
        is_most: Whether `bar` is the most that it may be, or the least.
        is_timed: Whether it depends on how fast the machine is, and on who else uses it.
    """

    name: str
    value: float
    bar: float
    is_most: bool
    is_timed: bool = False

    @property
    def is_met(self) -> bool:
        """Whether it is; no number at all is not."""
        return self.value <= self.bar if self.is_most else self.value >= self.bar


def at_most(name: str, value: float, bar: float, *, is_timed: bool = False) -> Bar:
    """A bar from above."""
    return Bar(name, value, bar, is_most=True, is_timed=is_timed)


def at_least(name: str, value: float, bar: float, *, is_timed: bool = False) -> Bar:
    """A bar from below."""
    return Bar(name, value, bar, is_most=False, is_timed=is_timed)


def unexpected(codes: Counter[str], *expected: str, whose: str = "calls") -> Bar:
    """That every call ended with one of these statuses."""
    strange = sum(count for code, count in codes.items() if code not in expected)
    return at_most(f"{whose} that ended with anything but {', '.join(expected)}", strange, 0)


@dataclass(frozen=True)
class Place:
    """What a part needs.

    Attributes:
        folder: For bundles and logs.
        scale: Of all times and numbers.
        server_cores: CPUs of the servers.
        client_cores: CPUs of whoever asks them.
    """

    folder: Path
    scale: float
    server_cores: Sequence[int]
    client_cores: Sequence[int]
    progress: Progress

    def count(self, full: int, least: int = 1) -> int:
        """So many at this scale."""
        return max(round(full * self.scale), least)

    def seconds(self, full: float, least: float = 1.0) -> float:
        """So long at this scale."""
        return max(full * self.scale, least)

    def bundle(self, model: str) -> Path:
        """Of random weights in the sizes of the preset; made when it is asked for first."""
        path = self.folder / model
        if not path.exists():
            _export(model, path)
        return path

    @contextmanager
    def serving(
        self,
        model: str | Path,
        flags: Sequence[str] = (),
        *,
        stderr: IO[bytes] | int | None = None,
        **how: Any,
    ) -> Iterator[RunningServer]:
        """A server of a model, or of a folder, on its own cores; who asks it is on others.

        Its log goes to `stderr`, or to where `take_log` finds it.
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


def _export(preset: str, path: Path) -> None:
    from benchmarks.load import wide_tokenizer
    from benchmarks.peers_work import random_model
    from export.exporter import export_bundle

    config = dataclasses.replace(PRESETS[preset]().model, vocab_size=VOCAB_SIZE)
    trained = dataclasses.replace(random_model(config), tokenizer=wide_tokenizer())
    export_bundle(trained, path, (Precision.INT8,))


def state(server: RunningServer) -> dict[str, float]:
    """What a server says of itself now, gauges and counters summed over labels, and its threads."""
    values = defaultdict[str, float](float, threads=server.num_threads())
    for sample in server.samples():
        if "le" not in sample.labels:
            values[sample.name] += sample.value
    return values


def settled(server: RunningServer, before: Mapping[str, float]) -> dict[str, float]:
    """The same once nothing runs any more and what was opened is closed, or after a while."""
    end = time.monotonic() + _SETTLED_SECONDS
    while True:
        now = state(server)
        if all(bar.is_met for bar in nothing_left(before, now)) or time.monotonic() > end:
            return now
        time.sleep(0.2)


def nothing_left(before: Mapping[str, float], after: Mapping[str, float]) -> list[Bar]:
    """That a server whose callers have all left holds nothing for them."""
    held = ("seq2seq_slots_in_use", "seq2seq_num_requests_running", "seq2seq_num_requests_waiting")
    num_open = after["grpc_server_started_total"] - after["grpc_server_handled_total"]
    return [
        at_most("slots and requests that did not come back", sum(after[name] for name in held), 0),
        at_most("RPCs that never ended", num_open, 0),
        # A connection that is kept, and the one that asks.
        at_most("sockets and files left open", after["process_open_fds"] - before["process_open_fds"], 2),
        at_most("threads left over", after["threads"] - before["threads"], _SPARE_THREADS),
    ]
