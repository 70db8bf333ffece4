"""A part of the reliability benchmark: small compressed calls that expand to millions of elements."""

from __future__ import annotations

import asyncio
import time

from benchmarks.serving import RunningServer
from reliability.callers import good_calls
from reliability.payloads import Bomb, all_bombs, connection, until_end
from reliability.place import TINY, Bar, Figures, Place, at_most, nothing_left, settled, state, unexpected
from reliability.watch import resident_bytes, watched

_AT_ONCE = 24
_EXPANDED_BYTES = 4 * 2**20 - 64  # just below the server's limit of a message
_ANSWER_SECONDS, _BACK_SECONDS = 60.0, 5.0
_BACK_BYTES = 100 * 2**20
_BUGS = ("INTERNAL", "UNKNOWN")


def bombs(place: Place) -> tuple[Figures, list[Bar]]:
    """Send bombs of every kind, each several times at once, while another caller streams and probes."""
    at_once = place.count(_AT_ONCE, 2)
    found = list(all_bombs(_EXPANDED_BYTES))
    found = found[:: max(len(found) // place.count(len(found), 5), 1)]
    task = place.progress.add_task("bombs", total=len(found))
    peaks: dict[str, float] = {}
    with place.serving(TINY, ["--open-repository"]) as server:
        asyncio.run(good_calls(server.address, 8))
        before, start = state(server), resident_bytes(server)
        with watched(server) as watch:
            for bomb in found:
                watch.peak_bytes = 0.0
                asyncio.run(_send(server.address, bomb, at_once))
                peaks[bomb.name] = watch.peak_bytes - start
                place.progress.advance(task)
        back_seconds = _seconds_until_back(server, start + _BACK_BYTES)
        codes = asyncio.run(good_calls(server.address, 8))
        after = settled(server, before)
        bugs = sum(
            sample.value
            for sample in server.samples()
            if sample.name == "seq2seq_requests_total" and sample.labels["code"] in _BUGS
        )
    figures = {
        "bombs": len(found),
        "at_once": at_once,
        "start_bytes": start,
        "most_bytes_over_start": dict(sorted(peaks.items(), key=lambda one: -one[1])[:5]),
        "back_seconds": back_seconds,
        "stream_gap_seconds": watch.stream_gap_seconds,
        "probe_seconds": watch.probe_seconds,
    }
    return figures, [
        at_most("memory over that at the start, MiB", max(peaks.values()) / 2**20, 1024),
        at_most("seconds until it is back", back_seconds, _BACK_SECONDS),
        *watch.bars(0.5, "beside bombs"),
        at_most("calls that ended with INTERNAL or UNKNOWN", bugs, 0),
        unexpected(codes, "OK", whose="good calls afterwards"),
        *nothing_left(before, after),
    ]


def _seconds_until_back(server: RunningServer, bound: float) -> float:
    started = time.monotonic()
    while resident_bytes(server) > bound and time.monotonic() < started + 2 * _BACK_SECONDS:
        time.sleep(0.05)
    return time.monotonic() - started


async def _send(address: str, bomb: Bomb, at_once: int) -> None:
    """Make the calls at once, each on its own connection, and wait until each has ended."""
    octets = connection(bomb)
    await asyncio.wait_for(
        asyncio.gather(*(_exchange(address, octets) for _ in range(at_once))), _ANSWER_SECONDS
    )


async def _exchange(address: str, octets: bytes) -> None:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(octets)
        await until_end(reader)
    finally:
        writer.close()
