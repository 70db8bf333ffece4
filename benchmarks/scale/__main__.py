"""Simulates many servers with the times of a real engine: `python -m benchmarks.scale`.

* `fit` measures the turns of a real engine on one core: `base` with random weights in int8, and the requests
  of the load benchmark. Least squares give the time of a turn by its number of rows, and of a position, an
  encode call and a source token. A server process then gives what gRPC costs a call.
* `answers` runs the server's own engine, queue and scheduler on a virtual clock that goes on by these times:
  how many servers of how many slots serve a rate within an objective, by least-request and round-robin
  balancing, and what a lost server and a sudden rise cost.

Not simulated: several callers and priorities, targets that end before their length, networks between
machines, the time that a balancer itself needs. The last line on standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.flags import positive, seconds
from benchmarks.hardware import describe_hardware
from benchmarks.load.mix import BEAM_SIZE
from benchmarks.scale.answers import Question, answer_all
from benchmarks.scale.fit import measure_times
from benchmarks.scale.plot import save_plot
from benchmarks.scale.times import EngineTimes

Figures = dict[str, Any]


def main() -> int:
    """Run one command, print its tables and one JSON object; returns 0 if done, 1 if it failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale",
        allow_abbrev=False,
        description=__doc__.splitlines()[0],
        epilog="example:\n  python -m benchmarks.scale fit --out times.json\n"
        "  python -m benchmarks.scale answers --times times.json --rate 300 --plot scale.png",
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
    answers.add_argument("--times", type=Path, metavar="FILE", required=True, help="the JSON object of `fit`")
    answers.add_argument("--plot", type=Path, metavar="FILE", help="plot the answers into this file")
    for flag, kind, default, what in (
        ("--rate", positive, Question.rate, "requests per second that have to be served"),
        ("--slots", positive, Question.num_slots, f"slots of a server, at least {BEAM_SIZE}"),
        ("--clients", positive, Question.num_clients, "clients that balance by themselves, in turn"),
        ("--latency", seconds, Question.latency_seconds, "objective: p99 of the answer in seconds"),
        ("--wait", seconds, Question.wait_seconds, "objective: p99 of the wait for a slot in seconds"),
    ):
        help_text = f"{what} (default: %(default)s)"
        answers.add_argument(flag, type=kind, default=default, metavar="N", help=help_text)
    options = parser.parse_args()
    if options.command == "answers" and options.slots < BEAM_SIZE:
        parser.error(f"--slots {options.slots}: at least {BEAM_SIZE}, which a beam takes")
    console = Console(stderr=True)
    report: Figures = {"benchmark": f"scale {options.command}", "hardware": describe_hardware()}
    try:
        with Progress(console=console) as progress:
            report |= (_answer if options.command == "answers" else _measure)(options, progress)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for table in (render_answers if options.command == "answers" else _render_times)(report):
        console.print(table)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    if options.command == "answers" and options.plot:
        save_plot(report, options.plot)
    print(json.dumps(report))
    return 0


def _measure(options: argparse.Namespace, progress: Progress) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        bundle = options.bundle
        if bundle is None:
            # Imports torch, which the measured processes and --help do not need.
            from benchmarks.load.bundles import export_random

            progress.console.print("exporting a random `base` model")
            export_random("base", bundle := Path(folder) / "bundle")
        rounds = measure_times(bundle, 1 if options.quick else 5, progress)
    times = EngineTimes.median([each.times for each in rounds])
    return {"times": dataclasses.asdict(times), "rounds": [dataclasses.asdict(each) for each in rounds]}


def _answer(options: argparse.Namespace, progress: Progress) -> Figures:
    fitted = json.loads(options.times.read_text())
    question = Question(
        EngineTimes.of(fitted.get("times", {})),
        options.rate,
        options.slots,
        options.clients,
        options.latency,
        options.wait,
        num_calls=1000 if options.quick else Question.num_calls,
    )
    hardware = fitted.get("hardware", {})
    report: Figures = {
        "question": dataclasses.asdict(question),
        "times_of": " ".join(str(hardware.get(name, "")) for name in ("cpu", "date", "commit")),
    }
    began = time.monotonic()
    for name, figures in progress.track(answer_all(question, is_quick=options.quick), description="answers"):
        report.setdefault(name, []).append(figures)
    return report | {"seconds": time.monotonic() - began}


def _render_times(report: Figures) -> list[Table]:
    columns = [
        EngineTimes.of(each) for each in (report["times"], *(each["times"] for each in report["rounds"]))
    ]
    table = _table("microseconds", "", "median", *(f"round {i}" for i in range(1, len(columns))))
    for num_rows, _ in columns[0].rows_seconds:
        found = [times.turn_seconds(num_rows) for times in columns]
        table.add_row(f"a turn of {num_rows} rows", *(f"{1e6 * seconds:.0f}" for seconds in found))
    for name in [name for name in report["times"] if name != "rows_seconds"]:
        found = [getattr(times, name) for times in columns]
        table.add_row(name.removesuffix("_seconds"), *(f"{1e6 * seconds:.1f}" for seconds in found))
    return [table]


def render_answers(report: Figures) -> list[Table]:
    """Returns a table of each question, with a column for each figure."""
    tables = []
    for name, rows in report.items():
        if not isinstance(rows, list):
            continue
        columns = [column for column, value in rows[0].items() if not isinstance(value, list)]
        tables.append(_table(name, *(column.replace("_", " ") for column in columns)))
        for row in rows:
            cells = (row.get(column) for column in columns)
            tables[-1].add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells))
    return tables


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table


if __name__ == "__main__":
    sys.exit(main())
