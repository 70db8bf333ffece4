"""Measures single calls beside bulk work: `python -m benchmarks.beside`.

A process makes calls at a fixed rate, unary ones and streams in turn, to a server with its default settings.
A latency counts from the time when the call was due. First the process is alone; then another process does
bulk work meanwhile: `translate_many`, or batches of `GenerateBatch` with and without joined answers. The
kinds take turns within each round, and medians over the rounds are reported. All processes share the
processors. The last line on standard output is one JSON object.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import time
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.progress import Progress

from benchmarks.flags import positive, seconds
from benchmarks.hardware import describe_hardware
from benchmarks.load.generator import precise_loop
from benchmarks.load.mix import quantile
from benchmarks.report import command, markdown, median, publish
from benchmarks.serving import serving
from seq2seq_serve.client import AsyncClient, Client
from seq2seq_serve.protos.seq2seq_v1_pb2 import BatchItem, GenerateBatchRequest, Source
from seq2seq_serve.protos.seq2seq_v1_pb2_grpc import Seq2SeqStub

_ALONE, _MANY, _JOINED, _PLAIN = "alone", "translate_many", "joined batches", "plain batches"
_SHARES = {"p50": 0.5, "p99": 0.99}
_SETTLE_TEXTS = 1000  # of bulk work before a measurement


def main() -> int:
    """Measures, prints a table and one JSON object; returns 0."""
    parser = command("beside", __doc__, "bundles/demo runs/demo/test.source.txt --rounds 3")
    add = parser.add_argument
    add("bundle", type=Path, help="folder of the bundle")
    add("sources", type=Path, help="file with a text in each line")
    add("--rounds", type=positive, default=3, help="timed rounds (default: %(default)s)")
    add("--seconds", type=seconds, default=5.0, help="duration of each measurement (default: %(default)s)")
    add("--rate", type=positive, default=50, help="calls a second (default: %(default)s)")
    add("--items", type=positive, default=2000, help="texts of a batch (default: %(default)s)")
    options = parser.parse_args()
    texts = [line for line in options.sources.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not texts:
        parser.error(f"no line of {options.sources} has a text")
    rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in (_ALONE, _MANY, _JOINED, _PLAIN)}
    with serving(options.bundle) as server, Progress(console=Console(stderr=True)) as progress:
        for _ in progress.track(range(options.rounds), description="rounds"):
            for kind, figures in rounds.items():
                calls = _Calls(server.address, texts, options.rate, options.seconds)
                figures.append(_measure(server.address, kind, texts, options.items, calls))
    medians = {
        kind: {name: median(one[name] for one in figures) for name in figures[0]}
        for kind, figures in rounds.items()
    }
    columns = ("beside", "unary: p50, p99 ms", "first piece: p50, p99 ms", "texts/s of bulk work")
    rows = []
    for kind, row in medians.items():
        times = [
            [f"{1e3 * row[f'{name}_{share}']:.1f}" for share in _SHARES] for name in ("unary", "first_piece")
        ]
        rows.append((kind, *map(", ".join, times), f"{row['texts_per_second']:.0f}"))
    print(markdown(columns, rows), file=sys.stderr)
    report = {"benchmark": "beside", "hardware": describe_hardware(), "kinds": medians}
    publish(report, options.out)
    return 0


def _measure(
    address: str, kind: str, texts: Sequence[str], num_items: int, calls: _Calls
) -> dict[str, float]:
    """Returns the latencies of calls in seconds, and the speed of the bulk work beside them."""
    context = multiprocessing.get_context("spawn")
    done = context.Value("q", 0)
    bulk = context.Process(target=_bulk, args=(address, kind, texts, num_items, done), daemon=True)
    if kind != _ALONE:
        bulk.start()
        while done.value < _SETTLE_TEXTS:
            if not bulk.is_alive():
                raise RuntimeError("the process with the bulk work has ended")
            time.sleep(0.1)
    try:
        before, began = done.value, time.perf_counter()
        with asyncio.Runner(loop_factory=precise_loop) as runner:
            figures = runner.run(calls.make())
        return figures | {"texts_per_second": (done.value - before) / (time.perf_counter() - began)}
    finally:
        if kind != _ALONE:
            bulk.kill()
            bulk.join()


def _bulk(address: str, kind: str, texts: Sequence[str], num_items: int, done: Any) -> None:
    """Translates for ever, and counts the texts."""
    endless = cycle(texts)
    with Client(address) as client, grpc.insecure_channel(address) as channel:
        while kind == _MANY:
            for _ in client.translate_many(endless):
                done.value += 1
        stub = Seq2SeqStub(channel)
        while True:
            items = [BatchItem(sources=[Source(text=text)]) for text in islice(endless, num_items)]
            for answer in stub.GenerateBatch(
                GenerateBatchRequest(items=items, joins_answers=kind == _JOINED)
            ):
                done.value += 1 + len(answer.more)


class _Calls:
    """Calls at a fixed rate, which do not wait for each other's answers."""

    def __init__(self, address: str, texts: Sequence[str], rate: int, num_seconds: float) -> None:
        self._address, self._texts = address, texts
        self._times = [number / rate for number in range(max(2, int(rate * num_seconds)))]

    async def make(self) -> dict[str, float]:
        """Returns the quantiles of the latencies in seconds."""
        unary, first = list[float](), list[float]()
        async with AsyncClient(self._address) as client, asyncio.TaskGroup() as tasks:
            await client.translate(self._texts[0])  # connects
            began = time.perf_counter()
            for number, (at, text) in enumerate(zip(self._times, cycle(self._texts), strict=False)):
                await asyncio.sleep(began + at - time.perf_counter())
                call = (
                    _stream(client, text, began + at, first)
                    if number % 2
                    else _unary(client, text, began + at, unary)
                )
                tasks.create_task(call)
        return {
            f"{name}_{share}": quantile(values, q)
            for name, values in (("unary", unary), ("first_piece", first))
            for share, q in _SHARES.items()
        }


async def _unary(client: AsyncClient, text: str, due: float, latencies: list[float]) -> None:
    await client.translate(text)
    latencies.append(time.perf_counter() - due)


async def _stream(client: AsyncClient, text: str, due: float, latencies: list[float]) -> None:
    is_first = True
    async for _ in client.stream(text):
        if is_first:
            latencies.append(time.perf_counter() - due)
        is_first = False


if __name__ == "__main__":
    sys.exit(main())
