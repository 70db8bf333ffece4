"""Checks the server's behaviour if callers or the machine misbehave: `python -m reliability`.

Callers use the loopback interface, and models have random weights. Each part has a function, with its bars;
`docs/reliability.md` says what the parts do and show. The last line on standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks.hardware import describe_hardware
from benchmarks.report import markdown, publish
from reliability.balance import balance
from reliability.freeze import freeze
from reliability.load import overload, unsteady
from reliability.machine import clock, pause
from reliability.neighbour import neighbour
from reliability.place import Figures, Place
from reliability.slow import slow

Part = Callable[[Place], Figures]

PARTS: dict[str, Part] = {
    part.__name__: part for part in (unsteady, overload, clock, pause, slow, freeze, neighbour, balance)
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, and print the bars and one JSON object; returns 0 if done, 1 if a part could not run."""
    options = _parser().parse_args(arguments)
    parts = options.only or list(PARTS)
    cores = sorted(os.sched_getaffinity(0))
    report: Figures = {
        "benchmark": "reliability",
        "hardware": describe_hardware(),
        "command": " ".join(["python", "-m", "reliability", *(arguments or sys.argv[1:])]),
        "scale": options.scale,
        "bars": [],
    }
    with tempfile.TemporaryDirectory() as name, Progress(console=Console(stderr=True)) as progress:
        run(Place(Path(name), options.scale, cores[:2], cores[2:] or cores, progress), parts, report)
    sys.stderr.write(table(report) + "\n")
    publish(report, options.out)
    return int(any("problem" in report[part] for part in parts))


def run(place: Place, parts: Sequence[str], report: Figures) -> None:
    """Run parts one after the other, and add their results to the report; a part that fails ends no other."""
    for part in parts:
        task = place.progress.add_task(part, total=None)
        of_part = replace(place, bars=[])
        try:
            report[part] = PARTS[part](of_part)
        except Exception as error:
            place.progress.console.print_exception()
            report[part] = {"problem": f"{type(error).__name__}: {error}"}
            of_part.at_most("the part could not be run", 1, 0)
        log = place.take_log()
        place.progress.console.out(log, end="", highlight=False)
        of_part.at_most("tracebacks in the servers' log", log.count("Traceback"), 0)
        place.progress.update(task, total=1, completed=1)
        report["bars"] += [{"part": part} | bar for bar in of_part.bars]


def table(report: Figures) -> str:
    """Returns all bars as a Markdown table, and what was not run."""
    rows = []
    for bar in report["bars"]:
        bound = f"{'≤' if bar['is'] == 'most' else '≥'} {bar['bar']:g}"
        rows.append(
            (bar["part"], bar["name"], f"{bar['value']:.4g}", bound, "yes" if bar["met"] else "**no**")
        )
    lines = [markdown(("part", "", "measured", "bar", "met"), rows, num_left=2)]
    for part in filter(report.__contains__, PARTS):
        missing = report[part].get("missing", {})
        lines += [f"\nNot run: {part}, {name}: {reason}." for name, reason in missing.items()]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m reliability",
        allow_abbrev=False,
        description=(__doc__ or "").splitlines()[0],
        epilog="example: python -m reliability --only overload --only balance",
    )
    only = "run this part; repeat the flag for several parts (default: all)"
    parser.add_argument("--only", action="append", choices=list(PARTS), help=only)
    scale = "factor of all times and numbers, such as 0.1 (default: 1, which takes half an hour)"
    parser.add_argument("--scale", type=float, default=1.0, help=scale)
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON object to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
