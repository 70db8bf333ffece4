"""Watches a server under attack: gaps in the streams of other callers, their probes, and its memory."""

from __future__ import annotations

import asyncio
import math
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.serving import RunningServer
from reliability.place import Bar, at_most
from seq2seq_serve.client import AsyncClient
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateOptions

_LENGTH = 200  # tokens of a stream


@dataclass
class Watch:
    """Measurements of the other callers.

    Attributes:
        peak_bytes: The largest resident memory of the server.
        stream_gap_seconds: The longest time between two pieces, also of two streams that follow each other.
        probe_seconds: The longest time to an answer of `/healthz`.
        num_failed: The number of streams and probes that failed.
    """

    peak_bytes: float = 0.0
    stream_gap_seconds: float = 0.0
    probe_seconds: float = 0.0
    num_failed: int = 0

    def bars(self, most_seconds: float, beside: str) -> list[Bar]:
        """Returns bars that are met if nobody waited for long beside an attack."""
        return [
            at_most(
                f"longest gap of a stream, {beside}", self.stream_gap_seconds, most_seconds, is_timed=True
            ),
            at_most(f"longest wait for /healthz, {beside}", self.probe_seconds, most_seconds, is_timed=True),
            at_most(f"streams and probes that failed, {beside}", self.num_failed, 0),
        ]


@contextmanager
def watched(server: RunningServer) -> Iterator[Watch]:
    """Measure memory, consecutive streams, and probes, each in its own thread."""
    watch = Watch()

    def probes(is_over: threading.Event) -> None:
        while not is_over.wait(0.02):
            started = time.perf_counter()
            try:
                with urllib.request.urlopen(f"{server.metrics_url}/healthz", timeout=30):
                    pass
            except OSError:
                watch.num_failed += 1
            watch.probe_seconds = max(watch.probe_seconds, time.perf_counter() - started)

    async def streams(is_over: threading.Event) -> None:
        options, last = GenerateOptions(min_new_tokens=_LENGTH), math.inf
        async with AsyncClient(server.address) as client:
            while not is_over.is_set():
                try:
                    async for _ in client.stream([5, 6, 7], options=options):
                        now = time.perf_counter()
                        watch.stream_gap_seconds, last = max(watch.stream_gap_seconds, now - last), now
                except Exception:
                    watch.num_failed += 1

    with beside(partial(watch_memory, server, watch), probes, lambda is_over: asyncio.run(streams(is_over))):
        yield watch


@contextmanager
def beside(*works: Callable[[threading.Event], object]) -> Iterator[None]:
    """Run functions, each in its own thread, until the block ends; they get the event that tells them."""
    is_over = threading.Event()
    threads = [threading.Thread(target=work, args=(is_over,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def watch_memory(server: RunningServer, watch: Watch, is_over: threading.Event) -> None:
    """Measure the server's largest memory."""
    while not is_over.wait(0.005):
        watch.peak_bytes = max(watch.peak_bytes, resident_bytes(server))


def resident_bytes(server: RunningServer) -> float:
    """Returns the server's resident memory; Linux only."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return 1024 * float(status.partition("VmRSS:")[2].split()[0])
