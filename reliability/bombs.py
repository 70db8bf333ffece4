"""A part of the reliability benchmark: small calls, and documents of the client, that expand."""

from __future__ import annotations

import asyncio
import time

from benchmarks.serving import RunningServer
from reliability.callers import good_calls
from reliability.documents import ATTACKS, translate
from reliability.payloads import Bomb, all_bombs, connection, until_end
from reliability.place import TINY, Bar, Figures, Place, at_most, nothing_left, settled, state, unexpected
from reliability.watch import resident_bytes, watched

_AT_ONCE = 24
_EXPANDED_BYTES = 4 * 2**20 - 64  # just below the server's limit of a message
_ANSWER_SECONDS, _BACK_SECONDS = 60.0, 5.0
_BACK_BYTES = 100 * 2**20
_DOCUMENT_BYTES = 60_000
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
        document_figures, document_bars = _documents(server.address, place)
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
        "documents": document_figures,
    }
    return figures, [
        at_most("memory over that at the start, MiB", max(peaks.values()) / 2**20, 1024),
        at_most("seconds until it is back", back_seconds, _BACK_SECONDS),
        *watch.bars(0.5, "beside bombs"),
        at_most("calls that ended with INTERNAL or UNKNOWN", bugs, 0),
        unexpected(codes, "OK", whose="good calls afterwards"),
        *document_bars,
        *nothing_left(before, after),
    ]


def _documents(address: str, place: Place) -> tuple[Figures, list[Bar]]:
    """Translate a document of every kind with the client's command."""
    names = list(ATTACKS)[:: max(len(ATTACKS) // place.count(len(ATTACKS), 3), 1)]
    task = place.progress.add_task("documents", total=len(names))
    found = {}
    for name in names:
        path = place.folder / f"document{ATTACKS[name].suffix}"
        path.write_bytes(ATTACKS[name].make(_DOCUMENT_BYTES))
        found[name] = translate(address, path)
        place.progress.advance(task)
    wrong = [
        name
        for name, one in found.items()
        if not one.is_right or (ATTACKS[name].is_refused and one.code == 0)
    ]
    most_bytes = max(one.max_bytes for one in found.values())
    slowest = max(found, key=lambda name: found[name].seconds)
    figures = {"wrong": wrong, "slowest": slowest, "seconds": found[slowest].seconds}
    return figures, [
        at_most("documents whose command did not end as expected", len(wrong), 0),
        at_most("memory of a command for a document of 60 kB, MiB", most_bytes / 2**20, 512),
        at_most("seconds of a command for it", found[slowest].seconds, 60, is_timed=True),
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
