"""Parts of the reliability benchmark: no log can be written, the wall clock jumps, processes are paused."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

from benchmarks.serving import RunningServer
from reliability.callers import good_calls, under_load
from reliability.place import (
    TINY,
    Bar,
    Figures,
    Place,
    at_least,
    at_most,
    nothing_left,
    once,
    settled,
    state,
    status,
    unexpected,
)

_IN_FLIGHT = 16
_HOUR = 3600
_JUMPS_SECONDS = (6 * _HOUR, -6 * _HOUR, 30 * 24 * _HOUR, 0)  # offsets from the true time
_ARRIVED_SECONDS = 60  # largest difference of the server's clock from the time that was set
_WAIT_SECONDS = 20.0
_PROBE_SECONDS = 0.02
_PAUSE_SECONDS = 8.0  # longer than the silence after which an instance is killed
_HEARTBEAT = "seq2seq_engine_heartbeat_timestamp_seconds"


def logs(place: Place) -> tuple[Figures, list[Bar]]:
    """Write a log line for every call to a full disk, and to a pipe whose reader is closed."""
    number = place.count(1000, 32)
    figures: Figures = {}
    bars = []
    for name, opened in (("full disk", _full_disk), ("pipe without a reader", _deserted_pipe)):
        with opened() as stderr, place.serving(TINY, ["--log-level", "debug"], stderr=stderr) as server:
            before = state(server)
            codes = asyncio.run(good_calls(server.address, number))
            after = settled(server, before)
            server.process.terminate()
            exit_code = server.wait()
        figures[name] = {
            "codes": codes,
            "exit_code": exit_code,
            "resident_bytes": [values["process_resident_memory_bytes"] for values in (before, after)],
        }
        bars += [
            at_least(f"{name}: calls that were answered", codes["OK"], number),
            at_most(f"{name}: exit code after SIGTERM", abs(exit_code), 0),
        ]
    return figures, bars


@contextmanager
def _full_disk() -> Iterator[int]:
    full = os.open("/dev/full", os.O_WRONLY)
    yield full
    os.close(full)


@contextmanager
def _deserted_pipe() -> Iterator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def clock(place: Place) -> tuple[Figures, list[Bar]]:
    """Move the server's wall clock forth and back under load, but not its monotonic clock."""
    library = next(Path("/usr/lib").glob("**/faketime/libfaketimeMT.so.1"), None)
    if library is None:
        return {"skipped": "libfaketime, a package of Debian and Ubuntu, is not installed"}, []
    jumps = place.count(20, 2)
    offset = place.folder / "offset"
    _set_clock(offset, 0)
    environment = {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",  # the same for older versions
    }
    with place.serving(TINY, environment=environment) as server:
        before = state(server)
        codes, probes, num_seen = asyncio.run(_jump(server, offset, jumps))
        good = asyncio.run(good_calls(server.address, _IN_FLIGHT))
        after = settled(server, before)
    return {"codes": codes, "probes": probes, "after": good}, [
        at_least("jumps that the server's clock made", num_seen, jumps),
        unexpected(codes, "OK"),
        at_most("probes that failed", probes.total() - probes[200], 0),
        unexpected(good, "OK", whose="calls afterwards"),
        *nothing_left(before, after),
    ]


async def _jump(server: RunningServer, offset: Path, jumps: int) -> tuple[Counter[str], Counter[int], int]:
    """Move the clock; returns statuses of streams and probes, and the number of jumps that took effect."""
    probes, num_seen = Counter[int](), 0

    async def probe() -> None:
        while True:
            probes[await asyncio.to_thread(status, server, "/healthz")] += 1
            await asyncio.sleep(_PROBE_SECONDS)

    async with under_load(server.address, _IN_FLIGHT, seed=13) as codes:
        probing = asyncio.create_task(probe())
        for _, seconds in zip(range(jumps), cycle(_JUMPS_SECONDS), strict=False):
            _set_clock(offset, seconds)
            num_seen += await asyncio.to_thread(_has_arrived, server, seconds)
        probing.cancel()
        await asyncio.wait({probing})
    return codes, probes, num_seen


def _has_arrived(server: RunningServer, seconds: float) -> bool:
    """Wait until the server reports the time that was set; returns whether it did."""

    def has_arrived(now: dict[str, float]) -> bool:
        return abs(now[_HEARTBEAT] - (time.time() + seconds)) < _ARRIVED_SECONDS

    return has_arrived(once(server, has_arrived, _WAIT_SECONDS))


def _set_clock(offset: Path, seconds: int) -> None:
    new = offset.with_suffix(".new")
    new.write_text(f"{seconds:+d}")
    new.replace(offset)  # atomically: a half-written file would be another time


def pause(place: Place) -> tuple[Figures, list[Bar]]:
    """Stop a server of two instances under load and let it go on: alone, and with its instances."""
    with place.serving(TINY, ["--instances", "2"]) as server:
        before = state(server)
        parent = server.process.pid
        instances = [int(each) for each in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
        codes = asyncio.run(_pause(server, ([parent], [parent, *instances])))
        good = asyncio.run(good_calls(server.address, _IN_FLIGHT))
        after = settled(server, before)
    return {"codes": codes, "after": good}, [
        at_least("instances that were paused", len(instances), 2),
        unexpected(codes, "OK"),
        at_most("instances that were killed", after["seq2seq_core_restarts_total"], 0),
        unexpected(good, "OK", whose="calls afterwards"),
        *nothing_left(before, after),
    ]


async def _pause(server: RunningServer, groups: tuple[list[int], ...]) -> Counter[str]:
    """Stop each group of processes for some seconds; returns the statuses of the calls meanwhile."""
    async with under_load(server.address, _IN_FLIGHT, seed=14) as codes:
        for processes in groups:
            await good_calls(server.address, 1)
            for process in processes:
                os.kill(process, signal.SIGSTOP)
            await asyncio.sleep(_PAUSE_SECONDS)
            for process in processes:
                os.kill(process, signal.SIGCONT)
            await asyncio.sleep(2.0)  # rounds of the watcher
            await good_calls(server.address, 1)
    return codes
