"""The parts of `benchmarks.gpu_check`; runs each in a process of its own with a time limit."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from rich.console import Console

from benchmarks.gpu_check import answers, more, service, steps
from benchmarks.gpu_check.place import SCALES, Findings, Place, write_json
from benchmarks.gpu_check.prepare import restore
from benchmarks.hardware import describe_hardware
from benchmarks.report import bars_table, table

# In the order of what they are worth, with limits in seconds. A part fills the findings, and returns what
# is wrong, or an empty text.
PARTS: dict[str, tuple[Callable[[Place, Findings], str], float]] = {
    "device": (answers.device, 60),
    "tokens": (answers.tokens, 60),
    "server": (service.server, 60),
    "speed": (steps.speed, 70),
    "load": (service.load, 70),
    "profile": (steps.profile, 40),
    "memory": (more.memory, 60),
    "precisions": (answers.other_precisions, 40),
    "families": (answers.families, 60),
    "training": (more.training, 60),
    "static": (steps.static, 60),
    "tests": (more.tests, 120),
}
_CUDA = "CUDAExecutionProvider"
_LEAST_SECONDS = 5.0
_TIMES_ON_A_CPU = 3  # limits are longer there, because other programs run beside
_COLUMNS = 110  # a pipe has 80, which cuts the names of columns
_MAX_SHOWN = 600  # characters of a finding; the JSON has all of it


def run(device: str, prepared: Path, names: list[str], seconds: float, out: Path | None) -> int:
    """Run parts; returns 0 if every one passed, 1 if one failed, 2 if the device cannot be used at all."""
    console = Console(stderr=True, markup=False, highlight=False, width=_COLUMNS)
    if device == "cuda" and _CUDA not in ort.get_available_providers():
        folder = Path(ort.__file__).parent
        print(f"gpu_check: onnxruntime {ort.__version__} in {folder} does not have {_CUDA}", file=sys.stderr)
        return 2
    deadline = time.monotonic() + seconds
    report: dict[str, Any] = {"benchmark": "gpu_check", "device": device, "hardware": describe_hardware()}
    report["versions"] = {module.__name__: module.__version__ for module in (ort, torch, np)}
    with tempfile.TemporaryDirectory() as name:
        started = time.monotonic()
        # Each part is a fork of this process, so that none waits for imports and weights. A process that
        # forks must not have threads, and must not have used CUDA.
        torch.set_num_threads(1)
        place = Place(SCALES[device], Path(name))
        report["weights_are_those_of_the_export"] = restore(prepared, place)
        console.print(f"bundles: restored in {time.monotonic() - started:.1f} s")
        report["parts"] = parts = {}
        for part in names:
            parts[part] = run_part(part, place, deadline)
            report["bars"] = steps.bars({name: each["found"] for name, each in parts.items()})
            _show(console, part, parts[part])
            if out:
                out.parent.mkdir(parents=True, exist_ok=True)
                write_json(report, out, indent=1)
            if part == "device" and "captured" not in parts[part]["found"]:
                console.print("gpu_check: without a step on the device, the other parts cannot run")
                return 2
    console.print(bars_table(report["bars"]))
    print(json.dumps(report))
    return int(any(part["status"] != "passed" for part in parts.values()))


def run_part(name: str, place: Place, deadline: float) -> dict[str, Any]:
    """Run a part in a process; returns its record, with what it had found when it crashed or was killed."""
    started = time.monotonic()
    limit = PARTS[name][1] * (1 if place.scale.on_cuda else _TIMES_ON_A_CPU)
    limit = min(limit, deadline - started)
    if limit < _LEAST_SECONDS:
        return {"status": "no time was left", "seconds": 0.0, "problem": "", "found": {}}
    process = multiprocessing.get_context("fork").Process(target=_run_here, args=(name, place))
    process.start()
    process.join(limit)
    problem = ""
    if process.is_alive():
        problem = f"stopped after its {limit:.0f} s"
    elif process.exitcode:
        problem = f"the process ended with {process.exitcode}"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)  # it may have started a server
    process.join()
    path = place.folder / f"{name}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    problem = "; ".join(filter(None, (problem, found.pop("problem", ""))))
    seconds = round(time.monotonic() - started, 1)
    status = "failed" if problem else "passed"
    return {"status": status, "seconds": seconds, "problem": problem, "found": found}


def _run_here(name: str, place: Place) -> None:
    os.setsid()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # standard output is for the report
    torch.set_num_threads(os.cpu_count() or 1)
    found = Findings(place.folder / f"{name}.json")
    try:
        part, _ = PARTS[name]
        found["problem"] = part(place, found)
    except Exception as error:
        found["problem"] = f"{type(error).__name__}: {error}"
        traceback.print_exc()


def _show(console: Console, name: str, part: dict[str, Any]) -> None:
    """Print a part's status, its results as a table, and the beginning of each other finding."""
    console.print(f"{name}: {part['status']} in {part['seconds']} s {part['problem']}".rstrip())
    for key, value in part["found"].items():
        if key == "results" and value:
            columns = list(dict.fromkeys(column for result in value for column in result))
            rows = [[_cell(result.get(column, "")) for column in columns] for result in value]
            console.print(table("", columns, rows))
        else:
            console.print(f"  {key}: {json.dumps(value)}"[:_MAX_SHOWN])


def _cell(value: float | str) -> str:
    return f"{value:,.3f}" if isinstance(value, float) else str(value)
