"""Runs the parts of `benchmarks.gpu_check`, each in a process of its own with a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu_check.parts import PARTS
from benchmarks.gpu_check.place import SCALES, Findings, Place
from benchmarks.gpu_check.prepare import restore
from benchmarks.gpu_check.steps import bars
from benchmarks.hardware import describe_hardware

_ROOT = Path(__file__).parents[2]
_LEAST_SECONDS = 5.0
_COLUMNS = 110  # a pipe has 80, which cuts the names of columns
_MAX_SHOWN = 600  # characters of a finding; the JSON has all of it


def run(device: str, prepared: Path, names: list[str], seconds: float, out: Path | None) -> int:
    """Run parts; returns 0 if every one passed, 1 if one failed."""
    console = Console(stderr=True, markup=False, highlight=False, width=_COLUMNS)
    deadline = time.monotonic() + seconds
    report: dict[str, Any] = {"benchmark": "gpu_check", "device": device, "hardware": describe_hardware()}
    with tempfile.TemporaryDirectory() as name:
        folder, started = Path(name), time.monotonic()
        report["weights_are_those_of_the_export"] = restore(prepared, folder, SCALES[device])
        console.print(f"bundles: restored in {time.monotonic() - started:.1f} s")
        report["parts"] = parts = {}
        for part in names:
            parts[part] = _run(part, device, folder, deadline)
            report["bars"] = bars(parts)
            _show(console, part, parts[part])
            if out:
                _write(report, out)
    for bar in report["bars"]:
        console.print(_describe(bar))
    print(json.dumps(report))
    return int(any(part["status"] != "passed" for part in parts.values()))


def run_part(name: str, device: str, folder: Path) -> int:
    """Run a part in this process; returns 0 if it passed, 1 if it failed."""
    found = Findings(folder / f"{name}.json")
    try:
        found["problem"] = PARTS[name].run(Place(SCALES[device], folder), found)
    except Exception as error:
        found["problem"] = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    return int(bool(found["problem"]))


def _run(name: str, device: str, folder: Path, deadline: float) -> dict[str, Any]:
    """Run a part in a process; returns its record, with what it had found when it crashed or was killed."""
    started = time.monotonic()
    limit = min(PARTS[name].seconds, deadline - started)
    if limit < _LEAST_SECONDS:
        return {"status": "no time was left", "seconds": 0.0, "problem": "", "found": {}}
    command = [sys.executable, "-m", "benchmarks.gpu_check", "part", name, "--device", device]
    process = subprocess.Popen(
        [*command, "--folder", str(folder)], stdout=sys.stderr, cwd=_ROOT, start_new_session=True
    )
    try:
        code = process.wait(limit)
        problem = "" if code in (0, 1) else f"the process ended with {code}"
    except subprocess.TimeoutExpired:
        problem = f"stopped after its {limit:.0f} s"
    finally:
        _kill(process)
    path = folder / f"{name}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    problem = "; ".join(filter(None, (problem, found.pop("problem", "" if problem else "it found nothing"))))
    seconds = round(time.monotonic() - started, 1)
    status = "failed" if problem else "passed"
    return {"status": status, "seconds": seconds, "problem": problem, "found": found}


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a part: it may have started a server."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _write(report: dict[str, Any], out: Path) -> None:
    """Replace the file atomically, so that an interrupted run leaves a complete one."""
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f"{out.name}.part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    part.replace(out)


def _show(console: Console, name: str, part: dict[str, Any]) -> None:
    """Print a part's status, its results as a table, and the beginning of each other finding."""
    console.print(f"{name}: {part['status']} in {part['seconds']} s {part['problem']}".rstrip())
    for key, value in part["found"].items():
        if key == "results" and value:
            console.print(_table(value))
        else:
            console.print(f"  {key}: {json.dumps(value)}"[:_MAX_SHOWN])


def _table(results: list[dict[str, Any]]) -> Table:
    columns = list(dict.fromkeys(column for result in results for column in result))
    table = Table(*columns)
    for result in results:
        cells = (result.get(column, "") for column in columns)
        table.add_row(*(f"{cell:,.3f}" if isinstance(cell, float) else str(cell) for cell in cells))
    return table


def _describe(bar: dict[str, Any]) -> str:
    if bar["is_met"] is None:
        return f"not measured: {bar['bar']}"
    side = "at most" if "at most" in bar else "at least"
    met = "met" if bar["is_met"] else "NOT MET"
    return f"{met}: {bar['bar']} is {bar['measured']:.2f}, {side} {bar[side]}"
