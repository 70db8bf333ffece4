"""Checks and measures everything that needs a CUDA device, in one unattended command of eight minutes.

    python -m benchmarks.gpu_check prepare                      # here: bundles and packages, in .gpu
    python -m benchmarks.gpu_check --out gpu.json               # there
    python -m benchmarks.gpu_check --parts device,families --out gpu.json

The parts run in the order of what they are worth, each in a process of its own with a time limit, so that one
that hangs or crashes does not hide the next. A part fails if something is wrong or if a bar is missed. When a
part ends, its findings are printed on standard error and the file of `--out` is rewritten. The last line on
standard output is one JSON object.

`prepare` needs the whole project. The check itself needs neither a network nor an export: the bundles were
exported before, and random weights are computed on the spot. `--device cpu` runs all parts at tiny sizes; it
tests the check itself, and its times are meaningless.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch

from benchmarks.gpu_check import families, more, prepare, service, steps
from benchmarks.gpu_check.place import SCALES, Findings, Place
from benchmarks.hardware import describe_hardware
from benchmarks.report import as_lines, command, publish, write

# In the order of what they are worth, with limits in seconds. A part fills the findings, and yields each
# problem.
PARTS: dict[str, tuple[Callable[[Place, Findings], Iterator[str]], float]] = {
    "device": (families.device, 60),
    "families": (families.families, 120),
    "server": (service.server, 90),
    "speed": (steps.speed, 80),
    "load": (service.load, 120),
    "profile": (steps.profile, 40),
    "memory": (more.memory, 60),
    "training": (more.training, 60),
    "tests": (more.tests, 120),
}
_CUDA = "CUDAExecutionProvider"
_LEAST_SECONDS = 5.0
_TIMES_ON_A_CPU = 3  # limits are longer there, because other programs run beside


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns 0 if every part passed, 1 if one failed, 2 if something is missing."""
    options = _parser().parse_args(arguments)
    if options.command == "prepare":
        prepare.prepare(options.folder, SCALES[options.device])
        if options.device == "cuda":
            prepare.pack_packages(options.folder)
        return 0
    if not (options.folder / prepare.BUNDLES).is_dir():
        print(f"gpu_check: there are no bundles in {options.folder}: run `prepare` first", file=sys.stderr)
        return 2
    if options.device == "cuda" and _CUDA not in ort.get_available_providers():
        folder = Path(ort.__file__).parent
        print(f"gpu_check: onnxruntime {ort.__version__} in {folder} does not have {_CUDA}", file=sys.stderr)
        return 2
    deadline = time.monotonic() + options.seconds
    report: dict[str, Any] = {
        "benchmark": "gpu_check",
        "device": options.device,
        "hardware": describe_hardware(),
        "versions": {module.__name__: module.__version__ for module in (ort, torch, np)},
        "parts": {},
    }
    with tempfile.TemporaryDirectory() as name:
        # Each part is a fork of this process, so that none waits for imports and weights. A process that
        # forks must not have threads, and must not have used CUDA.
        torch.set_num_threads(1)
        place = Place(SCALES[options.device], Path(name))
        report["weights_are_those_of_the_export"] = prepare.restore(options.folder, place)
        for part in options.parts:
            report["parts"][part] = record = run_part(part, place, deadline)
            print(f"{part}: {as_lines(record)}", file=sys.stderr, flush=True)
            if options.out:
                write(report, options.out)
            if part == "device" and "captured" not in record["found"]:
                print("gpu_check: without a step on the device, the other parts cannot run", file=sys.stderr)
                return 2
    publish(report, options.out)
    return int(any(record["status"] != "passed" for record in report["parts"].values()))


def run_part(name: str, place: Place, deadline: float) -> dict[str, Any]:
    """Run a part in a process; returns its record, with what it had found when it crashed or was killed."""
    started = time.monotonic()
    limit = PARTS[name][1] * (1 if place.scale.on_cuda else _TIMES_ON_A_CPU)
    limit = min(limit, deadline - started)
    if limit < _LEAST_SECONDS:
        return {"status": "no time was left", "found": {}}
    process = multiprocessing.get_context("fork").Process(target=_run_here, args=(name, place))
    process.start()
    process.join(limit)
    problems = []
    if process.is_alive():
        problems.append(f"stopped after its {limit:.0f} s")
    elif process.exitcode:
        problems.append(f"the process ended with {process.exitcode}")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)  # it may have started a server
    process.join()
    path = place.folder / f"{name}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    problems += found.pop("problems", [])
    seconds = round(time.monotonic() - started, 1)
    status = "failed" if problems else "passed"
    return {"status": status, "seconds": seconds, "problems": problems, "found": found}


def _run_here(name: str, place: Place) -> None:
    os.setsid()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # standard output is for the report
    torch.set_num_threads(os.cpu_count() or 1)
    found = Findings(place.folder / f"{name}.json")
    problems: list[str] = []
    try:
        part, _ = PARTS[name]
        for problem in part(place, found):
            problems.append(problem)
            found["problems"] = problems
    except Exception as error:
        found["problems"] = [*problems, f"{type(error).__name__}: {error}"]
        traceback.print_exc()


def _parser() -> argparse.ArgumentParser:
    parser = command("gpu_check", __doc__, "prepare\n--out benchmarks/results/2026-12-01-gpu-h200.json")
    add = parser.add_argument
    add(
        "command",
        nargs="?",
        choices=("check", "prepare"),
        default="check",
        help="check (default): run the parts; prepare: export the bundles and pack the packages that a "
        "machine with torch usually lacks",
    )
    parts = f"comma-separated names of the parts to check (default: {','.join(PARTS)})"
    add("--parts", type=_parts, default=list(PARTS), help=parts)
    add(
        "--device",
        choices=tuple(SCALES),
        default="cuda",
        help="cpu runs tiny sizes, to test the check itself (default: %(default)s)",
    )
    folder = "folder of the prepared bundles (default: %(default)s)"
    add("--folder", type=Path, default=Path(".gpu"), help=folder)
    add("--seconds", type=float, default=480, help="start no part after this time (default: %(default)s)")
    return parser


def _parts(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown parts {unknown}; there are {', '.join(PARTS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
