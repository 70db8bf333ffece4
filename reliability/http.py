"""A part of the reliability benchmark: bodies over HTTP that come slowly, in chunks, or too late."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from urllib.parse import urlsplit

from benchmarks.serving import RunningServer
from reliability.place import TINY, Bar, Figures, Place, at_most, nothing_left, settled, state
from reliability.watch import Watch, watched

_CHUNKED_BYTES, _CHUNK = 3_600_000, b"1\r\na\r\n"
_NUM_CHUNKED, _NUM_SLOW, _NUM_OPEN = 2, 256, 60
_SLOW_CALLER = "127.0.0.2"
_PROBE_SECONDS = 3.0
_NO_STATUS = "no status"
_BODY = json.dumps({"input_ids": [5, 6, 7], "min_new_tokens": 100, "max_new_tokens": 100}).encode()


def http(place: Place) -> tuple[Figures, list[Bar]]:
    """Attack the HTTP port while it is probed, and end the server while calls over HTTP are open."""
    with place.serving(TINY) as server:
        path = f"/v2/models/{json.loads(_get(server, '/v2/models/stats'))['model_stats'][0]['name']}/generate"
        before = state(server)
        watch = _watch_beside_chunks(server, path)
        other_status = _status_beside_slow_bodies(server, path)
        after = settled(server, before)
        statuses = asyncio.run(_statuses_at_the_end(server, path))
        exit_code = server.wait()
    figures = {"probe_seconds": watch.probe_seconds, "statuses_at_sigterm": dict(statuses)}
    strange = sum(count for status, count in statuses.items() if status not in ("200", "503"))
    return figures, [
        *watch.bars(0.5, "beside bodies in chunks"),
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
            except ConnectionError:  # it is refused at its head
                return

    with watched(server) as watch, ThreadPoolExecutor(_NUM_CHUNKED) as pool:
        for _ in range(_NUM_CHUNKED):
            pool.submit(attack)
        time.sleep(_PROBE_SECONDS)
    return watch


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
