"""Checks the server's behaviour if callers or the machine misbehave: `python -m reliability`.

Callers use the loopback interface, and models have random weights. Each part has a function, with its bars;
`docs/reliability.md` says what the parts do and show. The last line on standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks.hardware import describe_hardware
from reliability.balance import balance
from reliability.bombs import bombs
from reliability.faults import budget, step
from reliability.files import files
from reliability.freeze import freeze
from reliability.hostile import hostile
from reliability.http import http
from reliability.idle import idle
from reliability.load import overload, sigterm, unsteady
from reliability.machine import clock, logs, pause
from reliability.multiplication import multiplication
from reliability.neighbour import neighbour
from reliability.place import Bar, Figures, Place, at_most
from reliability.reload import reload
from reliability.report import failed_bar, markdown
from reliability.slow import slow
from reliability.sounds import sounds

Part = Callable[[Place], tuple[Figures, list[Bar]]]

PARTS: dict[str, Part] = {
    part.__name__: part
    for part in (
        hostile,
        unsteady,
        overload,
        sigterm,
        reload,
        files,
        step,
        budget,
        logs,
        clock,
        pause,
        bombs,
        multiplication,
        slow,
        freeze,
        neighbour,
        http,
        idle,
        sounds,
        balance,
    )
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, and print the bars and one JSON object; returns 0 if done, 1 if a part could not run."""
    options = _parser().parse_args(arguments)
    if options.table:
        sys.stdout.write(markdown(json.loads(options.table.read_text())))
        return 0
    cores = sorted(os.sched_getaffinity(0))
    report: Figures = {
        "benchmark": "reliability",
        "hardware": describe_hardware(),
        "command": " ".join(["python", "-m", "reliability", *(arguments or sys.argv[1:])]),
        "scale": options.scale,
        "bars": [],
    }
    with tempfile.TemporaryDirectory() as name, Progress(console=Console(stderr=True)) as progress:
        place = Place(Path(name), options.scale, cores[:2], cores[2:] or cores, progress)
        run(place, options.only or list(PARTS), report)
    sys.stderr.write(markdown(report))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))
    return int(any("problem" in report[part] for part in options.only or PARTS))


def run(place: Place, parts: Sequence[str], report: Figures) -> None:
    """Run parts one after the other, and add their results to the report; a part that fails ends no other."""
    for part in parts:
        task = place.progress.add_task(part, total=None)
        try:
            figures, bars = PARTS[part](place)
        except Exception as error:
            place.progress.console.print_exception()
            figures, bars = {"problem": f"{type(error).__name__}: {error}"}, [failed_bar()]
        log = place.take_log()
        place.progress.console.out(log, end="", highlight=False)
        bars.append(at_most("tracebacks in the servers' log", log.count("Traceback"), 0))
        place.progress.update(task, total=1, completed=1)
        report[part] = figures
        report["bars"] += [{"part": part} | bar for bar in bars]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m reliability",
        allow_abbrev=False,
        description=(__doc__ or "").splitlines()[0],
        epilog="example: python -m reliability --only hostile --only sigterm",
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=list(PARTS),
        help="run this part; repeat the flag for several parts (default: all)",
    )
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="factor of all times and numbers, such as 0.1 (default: 1, which takes 45 minutes)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON object to this file")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="only print the bars of an --out file as a Markdown table"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
