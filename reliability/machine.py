"""Parts of the reliability benchmark: the wall clock jumps, and processes are paused."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from benchmarks.serving import RunningServer
from reliability.callers import good_calls, under_load
from reliability.place import TINY, Figures, Place, once

_IN_FLIGHT = 16
_HOUR = 3600
_JUMPS_SECONDS = (6 * _HOUR, -6 * _HOUR, 30 * 24 * _HOUR, 0)  # offsets from the true time
_ARRIVED_SECONDS = 60  # largest difference of the server's clock from the time that was set
_WAIT_SECONDS, _PROBE_SECONDS = 20.0, 0.02
_PAUSE_SECONDS = 8.0  # longer than the silence after which an instance is killed
_HEARTBEAT = "seq2seq_engine_heartbeat_timestamp_seconds"


def clock(place: Place) -> Figures:
    """Move the server's wall clock forth and back under load, but not its monotonic clock."""
    library = next(Path("/usr/lib").glob("**/faketime/libfaketimeMT.so.1"), None)
    if library is None:
        return {"missing": {"libfaketime": "a package of Debian and Ubuntu, which is not installed"}}
    jumps, offset = place.count(20, 2), place.folder / "offset"
    _set_clock(offset, 0)
    environment = {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",  # the same for older versions
    }
    with place.serving(TINY, environment=environment) as server, place.checked(server):
        codes, probes, num_seen = asyncio.run(_jump(server, offset, jumps))
        good = asyncio.run(good_calls(server.address, _IN_FLIGHT))
    place.at_least("jumps that the server's clock made", num_seen, jumps)
    place.expect(codes, "OK")
    place.expect(probes, "OK", whose="probes")
    place.expect(good, "OK", whose="calls afterwards")
    return {"codes": codes, "probes": probes, "after": good}


async def _jump(server: RunningServer, offset: Path, jumps: int) -> tuple[Counter[str], Counter[str], int]:
    """Move the clock; returns statuses of streams and probes, and the number of jumps that took effect."""
    probes, num_seen = Counter[str](), 0

    def probe() -> str:
        try:
            with urllib.request.urlopen(f"{server.metrics_url}/healthz", timeout=10):
                return "OK"
        except OSError as error:
            return str(error)

    async def probe_always() -> None:
        while True:
            probes[await asyncio.to_thread(probe)] += 1
            await asyncio.sleep(_PROBE_SECONDS)

    async with under_load(server.address, _IN_FLIGHT, seed=13) as codes:
        probing = asyncio.create_task(probe_always())
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


def pause(place: Place) -> Figures:
    """Stop a server of two instances under load and let it go on: alone, and with its instances."""
    with place.serving(TINY, ["--instances", "2"]) as server, place.checked(server) as now:
        parent = server.process.pid
        instances = [int(each) for each in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
        codes = asyncio.run(_pause(server, ([parent], [parent, *instances])))
        good = asyncio.run(good_calls(server.address, _IN_FLIGHT))
    place.at_least("instances that were paused", len(instances), 2)
    place.at_most("instances that were killed", now["seq2seq_core_restarts_total"], 0)
    place.expect(codes, "OK")
    place.expect(good, "OK", whose="calls afterwards")
    return {"codes": codes, "after": good}


async def _pause(server: RunningServer, groups: Sequence[Sequence[int]]) -> Counter[str]:
    """Stop each group of processes for some seconds; returns the statuses of the calls meanwhile."""
    async with under_load(server.address, _IN_FLIGHT, seed=14) as codes:
        for processes in groups:
            await good_calls(server.address, 1)
            for number, seconds in ((signal.SIGSTOP, _PAUSE_SECONDS), (signal.SIGCONT, 2.0)):
                for process in processes:
                    os.kill(process, number)
                await asyncio.sleep(seconds)  # the second time, rounds of the watcher
            await good_calls(server.address, 1)
    return codes
