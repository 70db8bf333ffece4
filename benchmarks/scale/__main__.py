"""A model of many servers: `python -m benchmarks.scale`.

* `fit` measures the turns of a real engine on one core: `base` with random weights in int8, and the requests
  of the load benchmark. Least squares give the time of a turn by its number of rows, and of a position, an
  encode call and a source token. A server process then gives what gRPC costs a call.
* `validate` runs real server processes and a separate load generator, with Poisson arrivals through gRPC and
  the balancer of the clients of this project, and lets the model serve the same requests at the same times.
  Each round fits the times anew on the servers' cores, all at once. The machine's speed changes between a fit
  and a run, so the model also gets the processor time that the servers took for the work that they counted.
  Arrival rates are shares of a measured capacity. The bar is 15 % for p50 and p99 of the whole latency, in
  medians over the rounds.
* `answers` simulates many servers with fitted times: how many slots and how many replicas, which policy, how
  fast to scale, and what a lost replica costs.

Not modelled: several callers and priorities, beams that end early, networks between machines, failing steps.
The last line on standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.flags import positive, seconds
from benchmarks.hardware import describe_hardware
from benchmarks.load.mix import BEAM_SIZE
from benchmarks.scale import answers, validate
from benchmarks.scale.plot import save_plot
from benchmarks.scale.times import EngineTimes

Figures = dict[str, Any]

_VALIDATION = validate.Plan(validate.SETUPS, loads=(0.5, 0.8), num_rounds=3, num_calls=1000)
_QUICK_VALIDATION = dataclasses.replace(_VALIDATION, num_rounds=1, num_calls=300)
_ANSWERS = answers.Plan(
    num_calls=10_000, sizes=(1, 2, 4, 8, 16, 64), slots=(4, 8, 16, 32, 64, 128), full_scale_seconds=2.5
)
_QUICK_ANSWERS = answers.Plan(num_calls=2_000, sizes=(1, 4, 16), slots=(8, 32), full_scale_seconds=0.0)
_LEAST_SLOTS = 4 * BEAM_SIZE


def main() -> int:
    """Run one command, print its tables and one JSON object.

    Returns:
        0 if done, even if a bar is not met; 1 if it failed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale",
        allow_abbrev=False,
        description=__doc__.splitlines()[0],
        epilog="example:\n  python -m benchmarks.scale fit --out times.json\n"
        "  python -m benchmarks.scale answers --times times.json --plot scale.png",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    asked = answers.Servers()
    commands = parser.add_subparsers(dest="command", required=True)
    helps = {
        "fit": "measure the times of an engine on one core",
        "validate": "compare the model with real servers",
        "answers": "simulate many servers",
    }
    for name, text in helps.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.add_argument("--quick", action="store_true", help="less of everything")
        command.add_argument(
            "--out", type=Path, metavar="FILE", help="also write the JSON object to this file"
        )
        if name == "answers":
            command.add_argument(
                "--times", type=Path, metavar="FILE", required=True, help="the JSON object of `fit`"
            )
            command.add_argument("--plot", type=Path, metavar="FILE", help="plot the answers into this file")
            for flag, kind, default, what in (
                ("--slots", positive, asked.num_slots, "slots of a server, at least 16"),
                ("--clients", positive, asked.num_clients, "clients or proxies that balance by themselves"),
                ("--latency", seconds, asked.latency_seconds, "objective: p99 of the answer in seconds"),
                ("--wait", seconds, asked.wait_seconds, "objective: p99 of the wait for a slot in seconds"),
            ):
                help_text = f"{what} (default: %(default)s)"
                command.add_argument(flag, type=kind, default=default, metavar="N", help=help_text)
        else:
            command.add_argument(
                "--bundle",
                type=Path,
                metavar="FOLDER",
                help="an int8 bundle (default: exports `base` with random weights first)",
            )
    options = parser.parse_args()
    if options.command == "answers" and options.slots < _LEAST_SLOTS:
        parser.error(
            f"--slots {options.slots}: at least {_LEAST_SLOTS}, as some servers have a quarter of it"
        )
    console = Console(stderr=True)
    report: Figures = {"benchmark": f"scale {options.command}", "hardware": describe_hardware()}
    try:
        with tempfile.TemporaryDirectory() as name, Progress(console=console) as progress:
            if options.command == "answers":
                times = EngineTimes.of(json.loads(options.times.read_text()).get("times", {}))
                plan = _QUICK_ANSWERS if options.quick else _ANSWERS
                report["times"] = dataclasses.asdict(times)
                servers = answers.Servers(options.slots, options.clients, options.latency, options.wait)
                report |= answers.Answers(times, servers, plan, progress).all()
            else:
                bundle = options.bundle or _export(Path(name) / "bundle", console)
                report |= _MEASURE[options.command](bundle, options.quick, progress)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for table in _RENDER[options.command](report):
        console.print(table)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    if options.command == "answers" and options.plot:
        save_plot(report, options.plot)
    print(json.dumps(report))
    return 0


def _export(folder: Path, console: Console) -> Path:
    # Imports torch, which the measured processes and --help do not need.
    from benchmarks.load.bundles import export_random

    console.print("exporting a random `base` model")
    export_random("base", folder)
    return folder


def _measure_times(bundle: Path, quick: bool, progress: Progress) -> Figures:
    rounds = validate.measure_times(bundle, 1 if quick else 5, progress)
    times = EngineTimes.median([each.times for each in rounds])
    return {"times": dataclasses.asdict(times), "rounds": [dataclasses.asdict(each) for each in rounds]}


def _validate(bundle: Path, quick: bool, progress: Progress) -> Figures:
    plan = _QUICK_VALIDATION if quick else _VALIDATION
    rows = validate.validate(bundle, plan, progress)
    return {
        "plan": dataclasses.asdict(plan),
        "bar": validate.BAR,
        "rows": rows,
        "load_average": os.getloadavg(),
    }


_MEASURE: dict[str, Callable[[Path, bool, Progress], Figures]] = {
    "fit": _measure_times,
    "validate": _validate,
}


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


def _render_validation(report: Figures) -> list[Table]:
    names = ("latency_p50", "latency_p99", "wait_p50", "wait_p99", "first_token_p50", "first_token_p99")
    by_fit = names[:2]
    columns = (*names, "slower than fit", *(f"by the fit alone: {name}" for name in by_fit))
    table = _table("milliseconds: real, model, error", "servers", "load", *columns)
    for row in report["rows"]:
        cells = [_compared(row[name]) for name in names]
        alone = [_compared(row["by_fit_alone"][name]) for name in by_fit]
        table.add_row(row["setup"], f"{row['load']:.0%}", *cells, f"{row['slower_than_fit']:.2f}", *alone)
    return [table]


def _compared(cell: dict[str, float]) -> str:
    return f"{1e3 * cell['real']:.0f} {1e3 * cell['model']:.0f} {cell['error']:+.0%}"


def _render_answers(report: Figures) -> list[Table]:
    slots = _table("slots", "slots", "capacity/s", "calls/s within the objective", "slots in use", "p99 ms")
    for row in report["by_slots"]:
        met = (f"{row['slots_in_use']:.0%}", f"{1e3 * row['latency_p99']:.0f}") if row["rate"] else ("–", "–")
        slots.add_row(str(row["slots"]), f"{row['capacity']:.1f}", f"{row['rate']:.1f}", *met)
    sizes = sorted({row["size"] for row in report["by_size"]})
    size = _table("calls/s a replica within the objective, by replicas", "policy", *map(str, sizes))
    for policy in dict.fromkeys(row["policy"] for row in report["by_size"]):
        size.add_row(policy, *(f"{row['rate']:.1f}" for row in report["by_size"] if row["policy"] == policy))
    replicas = _table("replicas by calls/s", "policy", *(f"{rate:,}" for rate in answers.RATES))
    found = [row for row in report["replicas"] if "simulated" not in row]
    for policy in dict.fromkeys(row["policy"] for row in found):
        replicas.add_row(policy, *(f"{row['replicas']:,}" for row in found if row["policy"] == policy))
    cells = list(dict.fromkeys((row["replicas"], row["load"]) for row in report["policies"]))
    policies = _table("p99 latency, ms", "policy", *(f"{name}, {load:.0%}" for name, load in cells))
    for policy in dict.fromkeys(row["policy"] for row in report["policies"]):
        rows = [row for row in report["policies"] if row["policy"] == policy]
        policies.add_row(policy, *(f"{1e3 * row['latency_p99']:.0f}" for row in rows))
    clients = _table("p99 latency at 80 %, ms, by clients", "policy", "clients", "p99")
    for row in report["clients_of_own_counts"]:
        clients.add_row(row["policy"], str(row["clients"]), f"{1e3 * row['latency_p99']:.0f}")
    rises = []
    for name, title in (("jump", "a sudden rise"), ("ramp", "a slow rise")):
        columns = (
            "threshold",
            "pod_seconds",
            "learn_seconds",
            "max_waiting",
            "bad_seconds",
            "recovered_seconds",
        )
        rises.append(_table(title, *columns, "refused", "worst p99 s", "replicas"))
        for row in report[name]:
            rises[-1].add_row(
                *(f"{row[column]:g}" for column in columns),
                f"{row['refused']:.1%}",
                f"{row['worst_p99']:.1f}",
                str(row["replicas"][-1][1]),
            )
    lost = _table("one lost", "replicas", "load", "p99 before", "p99 during", "recovered s", "retried")
    for row in report["one_lost"]:
        lost.add_row(
            str(row["size"]),
            f"{row['load']:.0%}",
            f"{1e3 * row['latency_p99_before']:.0f}",
            f"{1e3 * row['latency_p99_during']:.0f}",
            f"{row['recovered_seconds']:g}",
            f"{row['retried']:.1f}",
        )
    return [slots, size, replicas, policies, clients, *rises, lost]


_RENDER: dict[str, Callable[[Figures], list[Table]]] = {
    "fit": _render_times,
    "validate": _render_validation,
    "answers": _render_answers,
}


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table


if __name__ == "__main__":
    sys.exit(main())
