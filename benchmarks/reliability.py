"""What the server does when its callers do not behave: `python -m benchmarks.reliability`.

Four parts, each with its bars, over the loopback interface, with random weights exported on the spot:

- hostile: 20,000 calls of random bytes, damaged messages and extreme values, over all RPCs; a good call is
  answered after each hundred, and none ends with INTERNAL or UNKNOWN;
- unsteady: `base` in int8 at 80 % of its capacity, 20 % of the calls cancelled, 10 % with a deadline that is
  too short, 5 % on connections that are cut; every call ends once, every slot and socket comes back, and
  memory stays within 5 % of that after the first tenth of the time;
- overload: three times the capacity; at least 90 % of it is answered, who is refused hears so within 50 ms at
  p99 with a time to come again, and nobody who was accepted is lost;
- sigterm: the server is ended under load, 20 times; who was accepted is answered, others get UNAVAILABLE,
  and it exits with 0.

The last line on standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import signal
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.hardware import describe_hardware
from benchmarks.load_mix import MAX_TARGET_LENGTH, MIX, VOCAB_SIZE, Job, draw_jobs, poisson_arrivals, quantile
from benchmarks.reliability_hostile import attack
from benchmarks.serving import RunningServer, serving
from bundle.names import Precision
from client import AsyncClient, ClientError

_PARTS = ("hostile", "unsteady", "overload", "sigterm")
_IN_FLIGHT = 64
_CAPACITY_SECONDS = 15.0
_UNSTEADY_LOAD, _OVERLOAD = 0.8, 3.0
_CANCELLED, _LATE, _CUT = 0.20, 0.10, 0.05
_SHORT_SECONDS = 0.02
_PATIENT_SECONDS = 120.0
_ENDS = ("OK", "CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")

Figures = dict[str, Any]


def main() -> int:
    """Run the parts, print what came out, and end with one JSON object; 0 done, 1 failed."""
    options = _parser().parse_args()
    usable = sorted(os.sched_getaffinity(0))
    server_cores, client_cores = usable[:2], usable[2:] or usable
    console = Console(stderr=True)
    report: Figures = {
        "benchmark": "reliability",
        "hardware": describe_hardware(),
        "command": " ".join(["python", "-m", "benchmarks.reliability", *sys.argv[1:]]),
        "bars": [],
    }
    with tempfile.TemporaryDirectory() as name, Progress(console=console) as progress:
        bench = _Bench(Path(name), options.scale, server_cores, client_cores, progress)
        for part in options.only or _PARTS:
            task = progress.add_task(part, total=None)
            figures, bars = getattr(bench, part)()
            progress.update(task, total=1, completed=1)
            report[part] = figures
            report["bars"] += [{"part": part} | bar for bar in bars]
    console.print(_table(report["bars"]))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))
    return 0


class _Bench:
    """The parts; every one starts a server of its own."""

    def __init__(
        self,
        folder: Path,
        scale: float,
        server_cores: Sequence[int],
        client_cores: Sequence[int],
        progress: Progress,
    ) -> None:
        self._folder = folder
        self._scale = scale
        self._cores = (server_cores, client_cores)
        self._progress = progress

    def hostile(self) -> tuple[Figures, list[Figures]]:
        num_calls = max(round(20_000 * self._scale), 100)
        with self._serving("tiny", ["--open-repository"]) as server:
            task = self._progress.add_task("hostile calls", total=num_calls)
            codes = asyncio.run(
                attack(server.address, num_calls, 0, lambda count: self._progress.advance(task, count))
            )
        bugs = {name: count for name, count in codes.items() if name.startswith(("INTERNAL", "UNKNOWN"))}
        return {"codes": codes}, [_bar("INTERNAL or UNKNOWN", sum(bugs.values()), 0, is_most=True)]

    def unsteady(self) -> tuple[Figures, list[Figures]]:
        seconds = 600.0 * self._scale
        with self._serving("base") as server:
            capacity = asyncio.run(_capacity(server.address, _CAPACITY_SECONDS))
            before = _gauges(server)
            codes, sizes = asyncio.run(_unsteady(server, _UNSTEADY_LOAD * capacity, seconds))
            after = _settled(server, before)
        early, late = sizes[max(len(sizes) // 10, 1) - 1], sizes[-1]
        strange = sum(count for code, count in codes.items() if code not in _ENDS)
        figures = {"capacity": capacity, "codes": codes, "resident_bytes": sizes, "gauges": after}
        return figures, [
            _bar("calls that ended in no expected way", strange, 0, is_most=True),
            _bar("slots that did not come back", after["seq2seq_slots_in_use"], 0, is_most=True),
            _bar(
                "sockets and files left open",
                after["process_open_fds"] - before["process_open_fds"],
                2,
                is_most=True,
            ),
            _bar("memory over that of the first tenth", late / early, 1.05, is_most=True),
        ]

    def overload(self) -> tuple[Figures, list[Figures]]:
        seconds = 120.0 * self._scale
        with self._serving("base") as server:
            capacity = asyncio.run(_capacity(server.address, _CAPACITY_SECONDS))
            run = asyncio.run(_open_loop(server.address, _OVERLOAD * capacity, seconds))
        answered = [one for one in run if one.code == "OK"]
        refused = [one for one in run if one.code == "RESOURCE_EXHAUSTED"]
        goodput = sum(one.end <= seconds for one in answered) / seconds
        lost = len(run) - len(answered) - len(refused)
        figures: Figures = {
            "capacity": capacity,
            "goodput": goodput,
            "codes": Counter(one.code for one in run),
            "refused_p99_seconds": quantile([one.end - one.start for one in refused], 0.99),
        }
        return figures, [
            _bar("answered a second, of the capacity", goodput / capacity, 0.9),
            _bar("p99 of a refusal, ms", 1e3 * figures["refused_p99_seconds"], 50, is_most=True),
            _bar("refusals with a time to come again", sum(one.has_retry for one in refused), len(refused)),
            _bar("calls that ended otherwise", lost, 0, is_most=True),
        ]

    def sigterm(self) -> tuple[Figures, list[Figures]]:
        times = max(round(20 * self._scale), 1)
        codes: Counter[str] = Counter()
        exits: Counter[int] = Counter()
        for _ in range(times):
            with self._serving("tiny", ["--max-slots", "16"]) as server:
                codes += asyncio.run(_until_it_ends(server))
                exits[server.process.wait(60)] += 1
        strange = sum(count for code, count in codes.items() if code not in ("OK", "UNAVAILABLE"))
        return {"codes": codes, "exits": exits}, [
            _bar("calls that ended with neither OK nor UNAVAILABLE", strange, 0, is_most=True),
            _bar("exits with 0", exits[0], times),
        ]

    def _serving(self, preset: str, flags: Sequence[str] = ()) -> Any:
        bundle = self._folder / preset
        if not bundle.exists():
            _export(preset, bundle)
        server_cores, client_cores = self._cores
        os.sched_setaffinity(0, server_cores)
        try:
            return _pinned(serving(bundle, ["--provider", "cpu", *_limits(preset), *flags]), client_cores)
        finally:
            os.sched_setaffinity(0, server_cores)


class _pinned:  # noqa: N801 (a context manager)
    """A server on its own cores; who asks it is on others as soon as it runs."""

    def __init__(self, server: Any, client_cores: Sequence[int]) -> None:
        self._server = server
        self._client_cores = client_cores

    def __enter__(self) -> RunningServer:
        running: RunningServer = self._server.__enter__()
        os.sched_setaffinity(0, self._client_cores)
        return running

    def __exit__(self, *error: Any) -> None:
        self._server.__exit__(*error)


def _limits(preset: str) -> list[str]:
    if preset != "base":
        return []
    return ["--max-slots", "208"] + [
        word for name in ("source", "target") for word in (f"--max-{name}-length", str(MAX_TARGET_LENGTH))
    ]


def _export(preset: str, path: Path) -> None:
    from benchmarks.load import wide_tokenizer
    from benchmarks.peers_work import random_model
    from export.exporter import export_bundle
    from training.presets import PRESETS

    config = dataclasses.replace(PRESETS[preset]().model, vocab_size=VOCAB_SIZE)
    trained = dataclasses.replace(random_model(config), tokenizer=wide_tokenizer())
    export_bundle(trained, path, (Precision.INT8,))


@dataclasses.dataclass(slots=True)
class _Call:
    """One call of the open loop; seconds since its start."""

    start: float
    end: float = 0.0
    code: str = "OK"
    has_retry: bool = False


async def _capacity(address: str, seconds: float) -> float:
    """Requests a second of a closed loop that is always full."""
    jobs, done = iter(draw_jobs(100_000, MIX, seed=1)), 0
    end = time.monotonic() + seconds

    async def worker(client: AsyncClient) -> None:
        nonlocal done
        while time.monotonic() < end:
            job = next(jobs)
            await client.generate(job.source_ids, options=job.options())
            done += time.monotonic() < end

    async with AsyncClient(address, timeout_seconds=_PATIENT_SECONDS) as client:
        await asyncio.gather(*(worker(client) for _ in range(_IN_FLIGHT)))
    return done / seconds


async def _open_loop(address: str, rate: float, seconds: float) -> list[_Call]:
    calls: list[_Call] = []
    jobs = draw_jobs(round(rate * seconds), MIX, seed=2)
    async with AsyncClient(address, timeout_seconds=_PATIENT_SECONDS) as client, asyncio.TaskGroup() as tasks:
        started = time.monotonic()

        async def call(job: Job) -> None:
            one = _Call(time.monotonic() - started)
            calls.append(one)
            try:
                await client.generate(job.source_ids, options=job.options())
            except ClientError as error:
                one.code, one.has_retry = error.code, error.retry_after_seconds is not None
            one.end = time.monotonic() - started

        for job, arrival in zip(jobs, poisson_arrivals(rate, seed=3), strict=False):
            await asyncio.sleep(arrival - (time.monotonic() - started))
            tasks.create_task(call(job))
    return calls


async def _unsteady(server: RunningServer, rate: float, seconds: float) -> tuple[Counter[str], list[float]]:
    """Callers of every kind; the statuses that they saw, and the server's memory as time went by."""
    chance, codes, sizes = random.Random(4), Counter[str](), list[float]()

    async def patient(client: AsyncClient, job: Job, timeout: float) -> None:
        try:
            async for _ in client.stream(job.source_ids, options=job.options(), timeout_seconds=timeout):
                pass
            codes["OK"] += 1
        except ClientError as error:
            codes[error.code] += 1

    async def fickle(client: AsyncClient, job: Job, patience: float) -> None:
        task = asyncio.ensure_future(patient(client, job, _PATIENT_SECONDS))
        done, _ = await asyncio.wait({task}, timeout=patience)
        if not done:
            task.cancel()
            await asyncio.wait({task})
            codes["CANCELLED"] += 1

    async def cut(job: Job, patience: float) -> None:
        async with AsyncClient(server.address) as own:  # whose connection is gone after the block
            await fickle(own, job, patience)

    async def watch() -> None:
        while True:
            sizes.append(_gauges(server)["process_resident_memory_bytes"])
            await asyncio.sleep(max(seconds / 60, 0.5))

    watching = asyncio.create_task(watch())
    async with AsyncClient(server.address) as client, asyncio.TaskGroup() as tasks:
        started = time.monotonic()
        for arrival in poisson_arrivals(rate, seed=5):
            if arrival > seconds:
                break
            await asyncio.sleep(arrival - (time.monotonic() - started))
            (job,) = draw_jobs(1, MIX, seed=chance.getrandbits(30))
            kind, patience = chance.random(), chance.uniform(0.0, 0.5)
            if kind < _CANCELLED:
                tasks.create_task(fickle(client, job, patience))
            elif kind < _CANCELLED + _LATE:
                tasks.create_task(patient(client, job, _SHORT_SECONDS))
            elif kind < _CANCELLED + _LATE + _CUT:
                tasks.create_task(cut(job, patience))
            else:
                tasks.create_task(patient(client, job, _PATIENT_SECONDS))
    watching.cancel()
    return codes, sizes


async def _until_it_ends(server: RunningServer) -> Counter[str]:
    """Callers that go on until they are refused, while the server is told to end."""
    codes: Counter[str] = Counter()
    jobs = iter(draw_jobs(100_000, MIX, seed=6))

    async def worker(client: AsyncClient) -> None:
        while codes["UNAVAILABLE"] < _IN_FLIGHT:
            job = next(jobs)
            try:
                await client.generate(job.source_ids, options=job.options())
                codes["OK"] += 1
            except ClientError as error:
                codes[error.code] += 1
                return

    async def end_it() -> None:
        await asyncio.sleep(1.0)
        server.process.send_signal(signal.SIGTERM)

    async with AsyncClient(server.address, timeout_seconds=_PATIENT_SECONDS) as client:
        await asyncio.gather(end_it(), *(worker(client) for _ in range(_IN_FLIGHT)))
    return codes


def _gauges(server: RunningServer) -> dict[str, float]:
    """What the server says of itself now, summed over labels."""
    with urllib.request.urlopen(f"{server.metrics_url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if family.type == "gauge":
            values[family.name] = sum(sample.value for sample in family.samples)
    return values


def _settled(server: RunningServer, before: dict[str, float]) -> dict[str, float]:
    """The same once nothing runs any more, or after a while."""
    end = time.monotonic() + 20
    while True:
        now = _gauges(server)
        is_quiet = not now["seq2seq_slots_in_use"] and now["process_open_fds"] <= before["process_open_fds"]
        if is_quiet or time.monotonic() > end:
            return now
        time.sleep(0.5)


def _bar(name: str, value: float, bar: float, *, is_most: bool = False) -> Figures:
    is_met = value <= bar if is_most else value >= bar
    return {"name": name, "value": value, "bar": bar, "is": "most" if is_most else "least", "met": is_met}


def _table(bars: Sequence[Figures]) -> Table:
    table = Table(title="reliability")
    for column in ("part", "", "value", "bar", "met"):
        table.add_column(column, justify="right")
    for bar in bars:
        sign = "≤" if bar["is"] == "most" else "≥"
        cells = (f"{bar['value']:.4g}", f"{sign} {bar['bar']:g}", "yes" if bar["met"] else "no")
        table.add_row(bar["part"], bar["name"], *cells)
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reliability",
        description=(__doc__ or "").splitlines()[0],
        epilog="example: python -m benchmarks.reliability --only hostile --only sigterm",
    )
    parser.add_argument("--only", action="append", choices=_PARTS, help="this part (default: all)")
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="of all times and numbers, such as 0.1 (default: 1, 20 minutes)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON object to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
