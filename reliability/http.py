"""A part of the reliability benchmark: bodies over HTTP that are slow, in chunks, late or hard to read."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection
from statistics import median
from urllib.parse import urlsplit

from benchmarks.load.mix import quantile
from benchmarks.serving import RunningServer
from reliability.place import TINY, Bar, Figures, Place, at_most, nothing_left, settled, state
from reliability.watch import Watch, beside, resident_bytes, watched
from seq2seq_serve.client import AsyncClient, GenerateOptions

_CHUNKED_BYTES, _CHUNK = 3_600_000, b"1\r\na\r\n"
_NUM_CHUNKED, _NUM_SLOW, _NUM_OPEN = 2, 256, 60
_SLOW_CALLER = "127.0.0.2"
_PROBE_SECONDS = 3.0
_NO_STATUS = "no status"
_NUM_SCRAPING = 40
_LEARNED = 20  # answers after which a client delays its acknowledgements
_FORM, _MULTIPART = "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"
# Bodies by what is hard to read of them: the page, the content's type, and the body.
_HARD = {
    "escapes": ("/translate", _FORM, b"q=" + b"%41" * 1_300_000),
    "spaces after a boundary": ("/v1/audio/transcriptions", _MULTIPART, b"--x" + b" " * 25_000_000),
    "boundaries": ("/v1/audio/transcriptions", _MULTIPART, b"\r\n--x" * 5_000_000),
    "tags": (
        "/translate",
        "",
        json.dumps({"q": "<" * 4_000_000, "source": "ko", "target": "en", "format": "html"}).encode(),
    ),
    "numbers": ("/v2/models/tiny/generate", "", json.dumps({"input_ids": [5] * 1_000_000}).encode()),
    "brackets": ("/v2/models/tiny/generate", "", b"[" * 4_000_000),
}
_BODY = json.dumps({"input_ids": [5, 6, 7], "min_new_tokens": 100, "max_new_tokens": 100}).encode()


def http(place: Place) -> tuple[Figures, list[Bar]]:
    """Attack the HTTP port while it is probed, and end the server while calls over HTTP are open."""
    with place.serving(TINY) as server:
        path = f"/v2/models/{json.loads(_get(server, '/v2/models/stats'))['model_stats'][0]['name']}/generate"
        before = state(server)
        watch = _watch_beside_chunks(server, path)
        start = resident_bytes(server)
        with watched(server) as hard_watch:
            seconds = {name: _seconds_of_refusal(server, *hard) for name, hard in _HARD.items()}
        scraped_seconds = _call_seconds_beside_scrapes(server)
        kept_seconds = _seconds_on_a_kept_connection(server)
        other_status = _status_beside_slow_bodies(server, path)
        after = settled(server, before)
        statuses = asyncio.run(_statuses_at_the_end(server, path))
        exit_code = server.wait()
    figures = {
        "probe_seconds": watch.probe_seconds,
        "statuses_at_sigterm": dict(statuses),
        "refusal_seconds": seconds,
        "call_seconds_beside_scrapes": scraped_seconds,
    }
    strange = sum(count for status, count in statuses.items() if status not in ("200", "503"))
    return figures, [
        *watch.bars(0.5, "beside bodies in chunks"),
        *hard_watch.bars(0.3, "beside bodies that are hard to read"),
        at_most("longest time to refuse such a body, seconds", max(seconds.values()), 0.5, is_timed=True),
        at_most("memory over that before, MiB", (hard_watch.peak_bytes - start) / 2**20, 256, is_timed=True),
        at_most("p90 of a call beside 40 scrapers, seconds", scraped_seconds, 0.1, is_timed=True),
        at_most("an answer on a kept connection, seconds", kept_seconds, 0.03, is_timed=True),
        at_most("calls refused beside slow bodies of another caller", int(other_status != "200"), 0),
        at_most("calls at SIGTERM that got neither 200 nor 503", strange, 0),
        at_most("exit code after SIGTERM", abs(exit_code), 0),
        *nothing_left(before, after),
    ]


def _get(server: RunningServer, path: str) -> bytes:
    with urllib.request.urlopen(f"{server.metrics_url}{path}", timeout=30) as answer:
        content: bytes = answer.read()
        return content


def _head(path: str, header: str) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{header}\r\n\r\n".encode()


def _connection(server: RunningServer, caller: str = "127.0.0.1") -> socket.socket:
    address = ("127.0.0.1", urlsplit(server.metrics_url).port or 0)
    return socket.create_connection(address, 30, source_address=(caller, 0))


def _watch_beside_chunks(server: RunningServer, path: str) -> Watch:
    def attack() -> None:
        with _connection(server) as client:
            try:
                client.sendall(_head(path, "Transfer-Encoding: chunked"))
                client.sendall(_CHUNK * (_CHUNKED_BYTES // len(_CHUNK)))
            except ConnectionError:  # it is refused after a thousand
                return

    with watched(server) as watch, ThreadPoolExecutor(_NUM_CHUNKED) as pool:
        for _ in range(_NUM_CHUNKED):
            pool.submit(attack)
        time.sleep(_PROBE_SECONDS)
    return watch


def _seconds_of_refusal(server: RunningServer, path: str, kind: str, body: bytes) -> float:
    """Returns the time until a body is refused; raises RuntimeError if it is not."""
    connection = HTTPConnection(urlsplit(server.metrics_url).netloc, timeout=60)
    started = time.perf_counter()
    try:
        connection.request("POST", path, body, {"Content-Type": kind})
        status = connection.getresponse().status
    except ConnectionError:  # it is refused by its length
        status = 413
    finally:
        connection.close()
    if status not in (400, 413):
        raise RuntimeError(f"{path} answered {status} to a wrong body")
    return time.perf_counter() - started


def _call_seconds_beside_scrapes(server: RunningServer) -> float:
    """Returns the 90th percentile of short calls over gRPC beside clients that scrape without a pause."""

    def scrape(is_over: threading.Event) -> None:
        while not is_over.is_set():
            _get(server, "/metrics")

    async def calls() -> list[float]:
        seconds = []
        async with AsyncClient(server.address) as client:
            end = time.monotonic() + _PROBE_SECONDS
            while time.monotonic() < end:
                started = time.perf_counter()
                await client.generate([5, 6, 7], options=GenerateOptions(max_new_tokens=8))
                seconds.append(time.perf_counter() - started)
                await asyncio.sleep(0.05)
        return seconds

    with beside(*[scrape] * _NUM_SCRAPING):
        return quantile(asyncio.run(calls()), 0.9)


def _seconds_on_a_kept_connection(server: RunningServer) -> float:
    connection = HTTPConnection(urlsplit(server.metrics_url).netloc, timeout=30)
    seconds = []
    for _ in range(2 * _LEARNED):
        started = time.perf_counter()
        connection.request("GET", "/healthz")
        connection.getresponse().read()
        seconds.append(time.perf_counter() - started)
    connection.close()
    return median(seconds[_LEARNED:])


def _status_beside_slow_bodies(server: RunningServer, path: str) -> str:
    """Returns the status of a call while another caller has begun as many bodies as requests may be open."""
    with ExitStack() as stack:
        for _ in range(_NUM_SLOW):
            slow = stack.enter_context(_connection(server, _SLOW_CALLER))
            slow.sendall(_head(path, "Content-Length: 100"))
        client = stack.enter_context(_connection(server))
        client.sendall(_head(path, f"Content-Length: {len(_BODY)}") + _BODY)
        return client.recv(100).split()[1].decode()


async def _statuses_at_the_end(server: RunningServer, path: str) -> Counter[str]:
    """Returns the statuses of calls that are open at SIGTERM, half of them without all of their body."""
    port = urlsplit(server.metrics_url).port
    calls = [await asyncio.open_connection("127.0.0.1", port) for _ in range(_NUM_OPEN)]
    for number, (_, writer) in enumerate(calls):
        writer.write(_head(path, f"Content-Length: {len(_BODY)}") + _BODY[: -(number % 2) or None])
    while (await asyncio.to_thread(state, server))["seq2seq_open_calls"] < _NUM_OPEN // 2:
        await asyncio.sleep(0.01)
    server.process.terminate()
    statuses = Counter[str]()
    for reader, writer in calls:
        words = (await reader.read()).split()
        statuses[words[1].decode() if words else _NO_STATUS] += 1
        writer.close()
    return statuses
