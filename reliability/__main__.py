"""Checks the server's behaviour if callers or the machine misbehave: `python -m reliability`.

Each part has its own bars. Callers use the loopback interface, and models have random weights. The parts:

- hostile: 20,000 calls with random bytes, damaged messages and extreme values, over all RPCs; no call ends
  with INTERNAL or UNKNOWN, and a good call is answered after each hundred;
- unsteady: `base` in int8 at 80 % of its capacity for 10 minutes, with 20 % of the calls cancelled, 10 % with
  too short a deadline, and 5 % on closed connections; every call ends once, every slot, socket and thread is
  released, and memory stays within 5 % of its value after the first tenth of the time;
- overload: three times the capacity for 2 minutes; at least 90 % of the capacity is answered, calls are
  refused within 50 ms at p99 with a retry delay, and no accepted call is lost;
- sigterm: the server is terminated under load, 20 times; accepted calls are answered, others get UNAVAILABLE,
  and it exits with 0 within its drain time;
- reload: versions are swapped under load, 50 times, and 10 broken bundles are refused; no call fails;
- files: every file of the served bundle is overwritten, truncated, renamed and removed under load, and one
  file of each of 40 versions during its load; answers stay the same bit for bit, and a load succeeds
  completely or is refused;
- step: a step that raises fails only its own sequences, and the server continues;
- budget: requests beyond the room of slots, queue and memory are refused with the right error;
- logs: the log goes to a full disk, or to a pipe without a reader; no call fails;
- clock: the wall clock jumps by hours in both directions under load; deadlines and probes are not affected;
- pause: a server of two instances is stopped under load for 8 s, alone and with its instances; no call fails;
- bombs: 24 calls at once, of some kilobytes that expand to millions of elements, for every repeated field of
  every RPC; memory stays within 1 GiB of its initial value and returns to it within 5 s, and other callers
  are not blocked; then the client's command translates a small document of every kind that is hard to read,
  or refuses it, within 512 MiB;
- multiplication: messages whose options hold for hundreds of items; memory stays within 256 MiB of its
  initial value, and no gap of another stream is longer than 0.3 s;
- slow: one stream in ten is not read to its end; the others' p99 between tokens grows at most 1.5 times, and
  2,000 streams that nobody reads hold at most 456 MiB;
- freeze: texts that are slow to split, by every RPC that takes text, and 200 of the longest at once; no
  stream and no probe waits for more than half a second, and the server exits within 5 s after SIGTERM;
- neighbour: one stream beside each expensive option, used by one caller and by four; no gap beside
  alignments is longer than 10 median steps, and stop sequences, constraints and a `top_k` per call are cheap;
- http: bodies of one-byte chunks, bodies that are hard to read, 256 slow bodies of one caller, 40 clients of
  /metrics, and SIGTERM with 60 calls over HTTP open; no probe waits for more than half a second, a call
  beside scrapes takes at most 0.1 s, others are answered, and every call gets a status;
- idle: calls without a message, watches of the health, probes with long messages, and calls that are
  cancelled at once; memory stays within 256 MiB of its initial value, and short calls of another caller take
  at most 1 s;
- sounds: the most expensive sound that is read, and a batch of 400 long ones; a short sound and a text of
  the same caller wait for at most 5 s, and memory stays within 768 MiB of its initial value;
- balance: three servers of unlike size without a proxy and behind Envoy, HAProxy and nginx; SIGTERM of one
  loses no call, SIGKILL only calls that ran there, with UNAVAILABLE; a server that is not ready is left
  within a second, and p99 behind a proxy stays within 2 times that of one server with all slots.

The last line on standard output is one JSON object. `docs/reliability.md` explains the parts.
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
