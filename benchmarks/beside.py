"""Compares two running servers: `python -m benchmarks.beside 127.0.0.1:50051=PID 127.0.0.1:9000=PID,PID`.

PID are the processes that serve an address. Their processor time is counted, but not that of others, such as
the controllers of a cluster. Callers in closed loops send short Korean texts; the servers take turns in each
round. The results are medians over the rounds, and the ratios of the second server to the first one. The last
line on standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path

from grpc import aio

from benchmarks.flags import positive
from benchmarks.hardware import describe_hardware
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.protos.seq2seq_v1_pb2_grpc import Seq2SeqStub

_LOADS = (("Generate", 1), ("Generate", 64), ("GenerateStream", 1), ("GenerateStream", 32))
_TEXTS = ("오늘은 금요일 입니다", "나는 학생이다", "비가 온다", "어제 친구와 함께 영화를 봤습니다")
_REQUESTS = cycle([pb.GenerateRequest(sources=[pb.Source(text=text)]) for text in _TEXTS])


@dataclass(frozen=True)
class Server:
    """A running server and the ids of its processes."""

    address: str
    process_ids: tuple[int, ...]

    def processor_seconds(self) -> float:
        """Returns the processor time of all threads so far."""
        tasks = (Path(f"/proc/{process}/task") for process in self.process_ids)
        files = (file for task in tasks for file in task.glob("*/schedstat"))
        return sum(int(file.read_text().split()[0]) for file in files) / 1e9


@dataclass(frozen=True)
class Measured:
    """One load on one server."""

    requests_per_second: float
    processor_ms: float
    median_ms: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.beside", description="Compare two running servers of one model."
    )
    parser.add_argument(
        "servers", nargs=2, type=_server, metavar="ADDRESS=PID,PID", help="the first is the baseline"
    )
    parser.add_argument("--rounds", type=positive, default=9, help="default %(default)s")
    parser.add_argument("--seconds", type=float, default=1.5, help="time of each load (default %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the result there")
    options = parser.parse_args(arguments)
    loads = asyncio.run(_measure(options.servers, options.rounds, options.seconds))
    result = json.dumps({**describe_hardware(), "rounds": options.rounds, "loads": loads}, ensure_ascii=False)
    if options.out is not None:
        options.out.write_text(result + "\n", encoding="utf-8")
    sys.stdout.write(result + "\n")


def _server(text: str) -> Server:
    address, _, processes = text.partition("=")
    return Server(address, tuple(map(int, processes.split(","))))


async def _measure(servers: Sequence[Server], num_rounds: int, seconds: float) -> list[dict[str, object]]:
    stubs = {server: Seq2SeqStub(aio.insecure_channel(server.address)) for server in servers}  # type: ignore[no-untyped-call]
    for server, stub in stubs.items():
        await _load(server, stub, "Generate", 64, seconds)  # opens connections
    rounds: dict[tuple[str, int, Server], list[Measured]] = {}
    for _ in range(num_rounds):
        for method, num_callers in _LOADS:
            for server in random.sample(servers, len(servers)):
                measured = await _load(server, stubs[server], method, num_callers, seconds)
                rounds.setdefault((method, num_callers, server), []).append(measured)
    loads = []
    for method, num_callers in _LOADS:
        first, second = (_median(rounds[method, num_callers, server]) for server in servers)
        ratios = {name: round(second[name] / first[name], 2) for name in first}
        sys.stderr.write(f"{method} x {num_callers}: {ratios}\n")
        loads.append({"method": method, "callers": num_callers, "servers": [first, second], "ratios": ratios})
    return loads


async def _load(server: Server, stub: Seq2SeqStub, method: str, num_callers: int, seconds: float) -> Measured:
    times: list[float] = []
    began, processor = time.monotonic(), server.processor_seconds()

    async def call() -> None:
        while (start := time.monotonic()) < began + seconds:
            if method == "Generate":
                await stub.Generate(next(_REQUESTS))
            else:
                async for _ in stub.GenerateStream(next(_REQUESTS)):
                    pass
            times.append(time.monotonic() - start)

    await asyncio.gather(*(call() for _ in range(num_callers)))
    elapsed, used = time.monotonic() - began, server.processor_seconds() - processor
    return Measured(len(times) / elapsed, 1000 * used / len(times), 1000 * statistics.median(times))


def _median(measured: Sequence[Measured]) -> dict[str, float]:
    columns = zip(*(asdict(one).values() for one in measured), strict=True)
    return dict(zip(asdict(measured[0]), map(statistics.median, columns), strict=True))


if __name__ == "__main__":
    main()
