"""What the server does where callers or the machine misbehave: `python -m benchmarks.reliability`.

Parts, each with its bars, over the loopback interface, with random weights exported on the spot:

- hostile: 20,000 calls of random bytes, damaged messages and extreme values, over all RPCs; a good call is
  answered after each hundred, and none ends with INTERNAL or UNKNOWN;
- unsteady: `base` in int8 at 80 % of its capacity for 10 minutes, 20 % of the calls cancelled, 10 % with a
  deadline that is too short, 5 % on connections that are cut; every call ends once, every slot, socket and
  thread comes back, and memory stays within 5 % of that after the first tenth of the time;
- overload: three times the capacity for 2 minutes; at least 90 % of it is answered, who is refused hears so
  within 50 ms at p99 with a time to come again, and nobody who was accepted is lost;
- sigterm: the server is ended under load, 20 times; who was accepted is answered, others get UNAVAILABLE,
  and it exits with 0 within its grace;
- reload: versions are swapped under load, 50 times, and 10 broken bundles are refused; no call fails;
- files: every file of the served bundle is overwritten, cut, renamed and removed under load, and one of each
  of 40 versions while it is loaded; no answer changes by a bit, and a load is whole or refused;
- step: a step that raises fails its own sequences, and the server goes on;
- budget: more than slots, queue and memory have room for is refused with the error that says so;
- logs: a full disk for the log, and nobody who reads it; no call notices;
- clock: the wall clock jumps by hours both ways under load; deadlines and probes go on as if nothing was;
- bombs: 24 calls at once, of some kilobytes that expand to millions of elements, for every repeated field of
  every RPC; memory stays within 1 GiB of that at the start and is back within 5 s, and others go on;
- slow: one stream in ten is not read any further; the others' p99 between tokens stays within 1.5 times;
- freeze: texts that are slow to cut, on every way in, and 200 of the longest at once; no stream and no probe
  waits for more than half a second, and SIGTERM ends the server within five;
- neighbour: one stream beside each option that costs much, of one caller and of four; no gap beside
  alignments is longer than 10 median steps, and stop sequences, constraints and a `top_k` a call cost little.

The last line on standard output is one JSON object. `docs/reliability.md` says what the parts mean.
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
from benchmarks.reliability_bombs import bombs
from benchmarks.reliability_faults import budget, step
from benchmarks.reliability_files import files
from benchmarks.reliability_freeze import freeze
from benchmarks.reliability_hostile import hostile
from benchmarks.reliability_load import overload, sigterm, unsteady
from benchmarks.reliability_machine import clock, logs
from benchmarks.reliability_neighbour import neighbour
from benchmarks.reliability_place import Bar, Figures, Place, at_most
from benchmarks.reliability_reload import reload
from benchmarks.reliability_report import bar_record, failed_bar, for_people, markdown
from benchmarks.reliability_slow import slow

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
        bombs,
        slow,
        freeze,
        neighbour,
    )
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, print what came out, and end with one JSON object; 0 done, 1 a part could not run."""
    options = _parser().parse_args(arguments)
    if options.table:
        sys.stdout.write(markdown(json.loads(options.table.read_text())))
        return 0
    cores = sorted(os.sched_getaffinity(0))
    console = Console(stderr=True)
    report: Figures = {
        "benchmark": "reliability",
        "hardware": describe_hardware(),
        "command": " ".join(["python", "-m", "benchmarks.reliability", *(arguments or sys.argv[1:])]),
        "scale": options.scale,
        "bars": [],
    }
    with tempfile.TemporaryDirectory() as name, Progress(console=console) as progress:
        place = Place(Path(name), options.scale, cores[:2], cores[2:] or cores, progress)
        run(place, options.only or list(PARTS), report)
    console.print(for_people(report))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))
    return int(any("problem" in report[part] for part in options.only or PARTS))


def run(place: Place, parts: Sequence[str], report: Figures) -> None:
    """Run parts one after the other, each whatever became of the others, and note what they found."""
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
        report["bars"] += [bar_record(part, bar) for bar in bars]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reliability",
        allow_abbrev=False,
        description=(__doc__ or "").splitlines()[0],
        epilog="example: python -m benchmarks.reliability --only hostile --only sigterm",
    )
    parser.add_argument("--only", action="append", choices=list(PARTS), help="this part (default: all)")
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="of all times and numbers, such as 0.1 (default: 1, half an hour)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON object to this file")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="only print the table of such a file, as Markdown"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
