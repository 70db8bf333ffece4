"""Measures bulk work beside the same engine without files: `python -m benchmarks.bulk`.

* direct: the lines of the input go straight into the engine, as many at once as in bulk work. Nothing is
  planned, read or written; the answers are texts.
* bulk: `python -m bulk` with the same settings, from its first shard to its last.
* ray (with `--nodes`): the same on a Ray cluster of simulated nodes on this machine, with one worker of one
  thread on each. With `--kill`, also a cluster that loses a node after a third of the shards.

The contenders take turns within each round, because the machine's speed varies over time. Ratios are those of
one round, and their medians are reported. Not measured: the loading of models, the planning, the start of
actors. Every output is compared with the first one, line by line. The last line on standard output is one
JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from operator import ne, truediv
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.flags import positive
from benchmarks.hardware import describe_hardware
from benchmarks.report import command, markdown, median, publish
from seq2seq_serve.bulk.engine import Job, start_worker
from seq2seq_serve.client.files.formats import Writer, split_into_shards
from seq2seq_serve.client.files.plan import TEXT, Shard, state_of
from seq2seq_serve.client.files.run import AnyWorker, RunProgress
from seq2seq_serve.client.files.worker import RunFiles
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateOptions
from seq2seq_serve.server.config import RunnerConfig
from seq2seq_serve.server.settings import add_flags, override

_RUNNER = RunnerConfig(shares_threads=True)  # the defaults of its flags


def main() -> int:
    """Measures, prints a table and one JSON object; returns 0 if all outputs are equal."""
    options = _parser().parse_args()
    lines = options.input.read_text().splitlines()
    texts = [lines[number % len(lines)] for number in range(options.lines)]
    with tempfile.TemporaryDirectory() as name, Progress(console=Console(stderr=True)) as progress:
        figures = asyncio.run(_measure(options, texts, Path(name), progress))
    rows = [
        (name, f"{row['lines_per_second']:.0f}", f"{row['to_direct']:.3f}")
        for name, row in figures["contenders"].items()
    ]
    print(markdown(("medians", "lines/s", "to direct"), rows), file=sys.stderr)
    publish({"benchmark": "bulk", "hardware": describe_hardware(), **figures}, options.out)
    return 0 if figures["different_lines"] == 0 else 1


async def _measure(
    options: argparse.Namespace, texts: list[str], folder: Path, progress: Progress
) -> dict[str, Any]:
    (folder / "input.txt").write_text("".join(f"{text}\n" for text in texts))
    shards = split_into_shards(folder / "input.txt", "input", options.shard_lines)
    inputs = {str(folder / "input.txt"): state_of(folder / "input.txt")}
    runner = override(_RUNNER, vars(options))
    contenders: dict[str, Callable[[Job], Awaitable[float]]] = {"bulk": lambda job: _bulk(job, shards)}
    if options.nodes:
        contenders["ray"] = lambda job: _ray(job, shards, options.nodes, is_killed=False)
    if options.kill:
        contenders["ray, a node killed"] = lambda job: _ray(job, shards, options.nodes, is_killed=True)
    rates: dict[str, list[float]] = {name: [] for name in ("direct", *contenders)}
    outputs: list[list[str]] = []
    for number in progress.track(range(options.rounds), description="rounds"):
        for name in rates:
            writer = Writer(folder / f"{name}-{number}", TEXT, "target")
            files = RunFiles("text", writer, inputs)
            job = Job(options.bundle.absolute(), runner, GenerateOptions(), files)
            if name == "direct":
                seconds, targets = await _direct(job, texts)
            else:
                seconds = await contenders[name](job)
                targets = [line for shard in shards for line in writer.path(shard).read_text().splitlines()]
            rates[name].append(len(texts) / seconds)
            outputs.append(targets)
    return {
        "lines": len(texts),
        "shard_lines": options.shard_lines,
        "contenders": {
            name: {
                "lines_per_second": median(found),
                "to_direct": median(map(truediv, found, rates["direct"])),
            }
            for name, found in rates.items()
        },
        "different_lines": sum(sum(map(ne, outputs[0], each)) for each in outputs),
    }


async def _direct(job: Job, texts: list[str]) -> tuple[float, list[str]]:
    """Returns the seconds that the texts take, and their targets."""
    worker = await start_worker(job)
    started = time.perf_counter()
    targets = [result.text async for result in worker.answers(texts)]
    seconds = time.perf_counter() - started
    await worker.stop()
    return seconds, targets


async def _bulk(job: Job, shards: list[Shard]) -> float:
    worker = await start_worker(job)

    async def start() -> AnyWorker:
        return worker

    started = time.perf_counter()
    await RunProgress().translate(shards, start, 1)
    return time.perf_counter() - started


async def _ray(job: Job, shards: list[Shard], num_nodes: int, is_killed: bool) -> float:
    """Returns the seconds from the start of the last worker; a node may be killed after that."""
    import ray
    from ray.cluster_utils import Cluster

    from seq2seq_serve.bulk.cluster import connect

    job = replace(job, runner=replace(job.runner, num_threads=1, num_instances=1))
    cluster = Cluster()
    for _ in range(num_nodes):
        node = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    start, num_workers = connect(cluster.address, job, num_nodes)
    ready = [await start() for _ in range(num_workers)]

    async def next_worker() -> AnyWorker:
        return ready.pop() if ready else await start()

    async def kill() -> None:
        while sum(job.files.writer.is_done(shard) for shard in shards) < len(shards) / 3:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)

    killing = asyncio.create_task(kill()) if is_killed else None
    started = time.perf_counter()
    await RunProgress().translate(shards, next_worker, num_workers)
    seconds = time.perf_counter() - started
    if killing is not None:
        await killing
    ray.shutdown()
    cluster.shutdown()
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = command("bulk", __doc__, "bundles/demo --input runs/demo/test.source.txt --nodes 3")
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE", help="a folder written by `python -m export`")
    add("--input", type=Path, required=True, metavar="FILE", help="lines of text, repeated up to --lines")
    add("--lines", type=positive, default=20_000, help="default %(default)s")
    add("--shard-lines", type=positive, default=2_000, help="default %(default)s")
    add("--rounds", type=positive, default=5, help="default %(default)s")
    add("--nodes", type=positive, help="also measure a Ray cluster of N simulated nodes")
    add("--kill", action="store_true", help="with --nodes: also kill a node of such a cluster")
    add_flags(parser, _RUNNER)
    return parser


if __name__ == "__main__":
    sys.exit(main())
