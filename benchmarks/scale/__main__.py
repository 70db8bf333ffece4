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
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.flags import positive, seconds
from benchmarks.hardware import describe_hardware
from benchmarks.load.mix import BEAM_SIZE
from benchmarks.scale.answers import Objective, answer
from benchmarks.scale.fit import measure
from benchmarks.scale.simulation import Group, Policy
from benchmarks.scale.times import EngineTimes

Figures = dict[str, Any]


def main() -> int:
    """Run one command, print its table and one JSON object; returns 0 if done, 1 if it failed."""
    parser = _parser()
    options = parser.parse_args()
    if options.command == "answers" and min(options.slots) < BEAM_SIZE:
        parser.error(f"--slots {min(options.slots)}: at least {BEAM_SIZE}, which a beam takes")
    console = Console(stderr=True)
    report: Figures = {"benchmark": f"scale {options.command}", "hardware": describe_hardware()}
    try:
        report |= (answer_all if options.command == "answers" else _measure)(options, console)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    console.print((render_answers if options.command == "answers" else _render_times)(report))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))
    return 0


def _measure(options: argparse.Namespace, console: Console) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        bundle = options.bundle
        if bundle is None:
            # Imports torch, which the measured processes and --help do not need.
            from benchmarks.load.bundles import export_random

            console.print("exporting a random `base` model")
            export_random("base", bundle := Path(folder) / "bundle")
        return dataclasses.asdict(measure(bundle, num_rounds=1 if options.quick else 5))


def answer_all(options: argparse.Namespace, console: Console) -> Figures:
    """Simulates each number of slots with each policy, on all cores side by side."""
    fitted = json.loads(options.times.read_text())
    group = Group(
        EngineTimes.of(fitted.get("times", {})), BEAM_SIZE, options.servers, num_clients=options.clients
    )
    objective = Objective(options.latency, options.wait)
    num_calls = 1000 if options.quick else 3000
    cells = list(itertools.product(options.slots, Policy))
    # Not forked, as other threads run here.
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as pool:
        futures = [
            pool.submit(answer, group, objective, policy, slots, options.rate, num_calls)
            for slots, policy in cells
        ]
        rows = [future.result() for future in track(futures, description="simulating", console=console)]
    hardware = fitted.get("hardware", {})
    return {
        "times": dataclasses.asdict(group.times),
        "times_of": " ".join(str(hardware.get(name, "")) for name in ("cpu", "date", "commit")),
        "group": options.servers,
        "clients": options.clients,
        "objective": dataclasses.asdict(objective),
        "needed_rate": options.rate,
        "rows": rows,
    }


def _render_times(report: Figures) -> Table:
    table = _table(f"explains {report['explained']:.0%} of {report['num_turns']} turns", "", "microseconds")
    for num_rows, turn_seconds in report["times"]["rows_seconds"]:
        table.add_row(f"a turn of {num_rows} rows", f"{1e6 * turn_seconds:.0f}")
    for name, value in report["times"].items():
        if name != "rows_seconds":
            table.add_row(name.removesuffix("_seconds"), f"{1e6 * value:.1f}")
    return table


def render_answers(report: Figures) -> Table:
    """Returns the table of `answers` for the terminal."""
    columns = ("slots", "policy", "capacity", "rate", "slots_in_use", "wait_p99", "latency_p99", "servers")
    title = f"requests/s of each of {report['group']} servers; servers for {report['needed_rate']} requests/s"
    table = _table(title, *(column.replace("_", " ") for column in columns))
    for row in report["rows"]:
        cells = (row.get(column, "–") for column in columns)
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale",
        allow_abbrev=False,
        description=(__doc__ or "").splitlines()[0],
        epilog="example:\n  python -m benchmarks.scale fit --out times.json\n"
        "  python -m benchmarks.scale answers --times times.json --rate 300",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    fit, answers = (
        commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        for name, text in (
            ("fit", "measure the times of an engine on one core"),
            ("answers", "simulate many servers"),
        )
    )
    for command in (fit, answers):
        command.add_argument("--quick", action="store_true", help="less of everything")
        command.add_argument(
            "--out", type=Path, metavar="FILE", help="also write the JSON object to this file"
        )
    fit.add_argument(
        "--bundle",
        type=Path,
        metavar="FOLDER",
        help="an int8 bundle (default: exports `base` with random weights first)",
    )
    add = answers.add_argument
    add("--times", type=Path, metavar="FILE", required=True, help="the JSON object of `fit`")
    add(
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
        ("--latency", seconds, Objective.latency_seconds, "objective: p99 of the answer in seconds"),
        ("--wait", seconds, Objective.wait_seconds, "objective: p99 of the wait for a slot in seconds"),
    ):
        add(flag, type=kind, default=default, metavar="N", help=f"{text} (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
