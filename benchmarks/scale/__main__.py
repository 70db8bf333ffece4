"""Simulates many servers with the times of a real engine: `python -m benchmarks.scale`.

* `fit` measures the turns of a real engine on one core: `base` with random weights in int8, and the requests
  of the load benchmark. Least squares give the time of a turn by its number of rows, and of a position, an
  encode call and a source token. A server process then gives what gRPC costs a call.
* `answers` runs the server's own engine, queue and scheduler on a virtual clock that goes on by these times:
  how many servers of how many slots serve a rate within an objective, with clients that take servers in turn
  and with a proxy that counts open calls.

Not simulated: several callers and priorities, targets that end before their length, networks between
machines, the time that a balancer itself needs, servers that start, fail or are slower than others. The last
line on standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.flags import positive, seconds
from benchmarks.hardware import describe_hardware
from benchmarks.load.mix import BEAM_SIZE
from benchmarks.report import command, markdown, publish
from benchmarks.scale.fit import measure
from benchmarks.scale.model import EngineTimes, Group, Policy, best_rate

Figures = dict[str, Any]

_NUM_CALLS = 3000  # whose figures count in each simulation


def main() -> int:
    """Run one command, print its table and one JSON object; returns 0 if done, 1 if it failed."""
    parser = _parser()
    options = parser.parse_args()
    if min(options.slots) < BEAM_SIZE:
        parser.error(f"--slots {min(options.slots)}: at least {BEAM_SIZE}, which a beam takes")
    if options.command == "answers" and not options.times:
        parser.error("answers needs --times, the JSON object of fit")
    console = Console(stderr=True)
    report: Figures = {"benchmark": f"scale {options.command}", "hardware": describe_hardware()}
    try:
        report |= (answer_all if options.command == "answers" else _measure)(options, console)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    explained = "explains {explained:.0%} of {num_turns} turns"
    shown = render_answers(report) if options.command == "answers" else explained.format_map(report)
    print(shown, file=sys.stderr)
    publish(report, options.out)
    return 0


def _measure(options: argparse.Namespace, console: Console) -> Figures:
    if options.bundle:
        return measure(options.bundle)
    # Imports torch, which the measured processes and --help do not need.
    from benchmarks.load.bundles import export_random

    console.print("exporting a random `base` model")
    with tempfile.TemporaryDirectory() as folder:
        export_random("base", Path(folder) / "bundle")
        return measure(Path(folder) / "bundle")


def answer_all(options: argparse.Namespace, console: Console) -> Figures:
    """Simulates each number of slots with each policy, on all cores side by side."""
    fitted = json.loads(options.times.read_text())
    times = EngineTimes.of(fitted.get("times", {}))
    groups = [
        Group(times, slots, options.servers, policy, options.clients)
        for slots, policy in itertools.product(options.slots, Policy)
    ]
    objective = {"latency_seconds": options.latency, "wait_seconds": options.wait}
    # Not forked, as other threads run here.
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        futures = [pool.submit(best_rate, group, _NUM_CALLS, **objective) for group in groups]
        rows = [future.result() for future in track(futures, description="simulating", console=console)]
    for row in rows:  # without a rate within the objective, no number of servers would do
        row["servers"] = math.ceil(options.rate / row["rate"]) if row["rate"] else None
    hardware = fitted.get("hardware", {})
    return {
        "times": dataclasses.asdict(times),
        "times_of": " ".join(str(hardware.get(name, "")) for name in ("cpu", "date", "commit")),
        "group": options.servers,
        "clients": options.clients,
        "objective": objective,
        "needed_rate": options.rate,
        "rows": rows,
    }


def render_answers(report: Figures) -> str:
    """Returns the Markdown table of `answers`: requests/s of each server, and the servers for the rate."""
    columns = ("slots", "policy", "capacity", "rate", "slots_in_use", "wait_p99", "latency_p99", "servers")
    rows = []
    for row in report["rows"]:
        cells = (row.get(column, "–") for column in columns)
        rows.append([f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells])
    return markdown([column.replace("_", " ") for column in columns], rows)


def _parser() -> argparse.ArgumentParser:
    parser = command("scale", __doc__, "fit --out times.json\nanswers --times times.json --rate 300")
    add = parser.add_argument
    add(
        "command",
        choices=("fit", "answers"),
        help="fit: measure the times of an engine on one core; answers: simulate many servers",
    )
    add(
        "--bundle",
        type=Path,
        metavar="FOLDER",
        help="fit: an int8 bundle (default: exports `base` with random weights first)",
    )
    group = parser.add_argument_group("answers")
    group.add_argument("--times", type=Path, metavar="FILE", help="the JSON object of `fit`")
    group.add_argument(
        "--slots",
        type=positive,
        nargs="+",
        default=[8, 16, 32, 64, 128],
        metavar="N",
        help=f"slots of a server, at least {BEAM_SIZE}; a table row for each (default: 8 16 32 64 128)",
    )
    for flag, kind, default, text in (
        ("--rate", positive, 300, "requests per second that have to be served"),
        ("--servers", positive, 4, "servers of the simulated group"),
        ("--clients", positive, Group.num_clients, "clients that balance by themselves, in turn"),
        ("--latency", seconds, 1.0, "objective: p99 of the answer in seconds"),
        ("--wait", seconds, 0.1, "objective: p99 of the wait for a slot in seconds"),
    ):
        group.add_argument(flag, type=kind, default=default, metavar="N", help=f"{text} (default: {default})")
    return parser


if __name__ == "__main__":
    sys.exit(main())
