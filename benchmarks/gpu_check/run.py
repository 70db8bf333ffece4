"""Runs the parts of `benchmarks.gpu_check`, and prints and records their findings.

After a failed part, the others still run. This module imports everything that the parts need.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu_check import design as gpu_design
from benchmarks.gpu_check import parts as gpu_parts
from benchmarks.gpu_check import speed as gpu_speed
from benchmarks.gpu_check.place import CPU_SCALE, CUDA_SCALE, Place, random_model
from benchmarks.hardware import describe_hardware
from seq2seq_serve.bundle.names import Precision

_ROOT = Path(__file__).parents[2]
_BUDGET_SECONDS = 460.0  # no part begins and no command runs after this time, so the check takes 8 minutes
_LEAST_SECONDS = 5.0
_COLUMNS = 110  # a pipe has 80, which cuts the names of columns
_MAX_SHOWN = 400  # characters of a finding; the JSON has all of it

_Part = Callable[[], dict[str, Any]]


def run(command: str, device: str, out: Path | None) -> int:
    """Run the parts of a command; returns 0 if every part passed, 1 if one failed."""
    console = Console(stderr=True, markup=False, highlight=False, width=_COLUMNS)
    with tempfile.TemporaryDirectory() as name:
        report = measure(command, Path(name), device, console, out)
    print(json.dumps(report))
    return int(any(part["status"] != "passed" for part in report["parts"].values()))


def measure(
    command: str, folder: Path, device: str, console: Console, out: Path | None = None
) -> dict[str, Any]:
    """Run all parts, one after another, and rewrite the report after each."""
    deadline = time.monotonic() + _BUDGET_SECONDS
    scale = CUDA_SCALE if device == "cuda" else CPU_SCALE
    place = Place(scale, folder, random_model(scale.model))
    report: dict[str, Any] = {"benchmark": f"gpu_check {command}", "device": device}
    report["hardware"] = describe_hardware()
    if device == "cuda":
        report["hardware"]["gpu"] = torch.cuda.get_device_name()
    parts = report["parts"] = {}
    report["bars"] = []
    for name, part in _parts(command, place, deadline).items():
        parts[name] = _run(part, deadline)
        _show(console, name, parts[name])
        if name == "speed" and parts[name]["found"]:
            report["bars"] = gpu_speed.bars(place, parts[name]["found"])
            for bar in report["bars"] if device == "cuda" else []:
                console.print(_describe(bar))
        if out:
            _write(report, out)
    return report


def _parts(command: str, place: Place, deadline: float) -> dict[str, _Part]:
    """Returns the parts by name, the most important ones first because time may run out."""
    on_cuda = place.scale.device == "cuda"
    if command == "design":
        first: dict[str, _Part] = {
            "graphs": partial(gpu_design.graphs, place),
            "attention": partial(gpu_design.attention, place),
            "steps": partial(gpu_design.steps, place),
        }
        precisions = dict.fromkeys((*place.scale.precisions, Precision.FP32))
        then: dict[str, _Part] = {
            "placement": partial(gpu_parts.placement, place),
            "parity": partial(gpu_parts.parity, place),
            "tokens": partial(gpu_parts.tokens, place),
        }
        last: dict[str, _Part] = {"tests": partial(_tests, deadline)}
    else:
        first = {}
        precisions = dict.fromkeys(place.scale.precisions)
        then = {"speed": partial(gpu_speed.speed, place), "memory": partial(gpu_parts.memory, place)}
        last = {"training": partial(_training, deadline), "demo": partial(_demo, place.folder, deadline)}
    exports = {f"export {precision}": partial(gpu_parts.export, place, precision) for precision in precisions}
    return first | exports | then | (last if on_cuda else {})


def _write(report: dict[str, Any], out: Path) -> None:
    """Replace the file atomically, so that an interrupted run leaves a complete one."""
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f"{out.name}.part")
    part.write_text(json.dumps(report, indent=2) + "\n")
    part.replace(out)


def _show(console: Console, name: str, part: dict[str, Any]) -> None:
    """Print a part's status, its results as a table, and the beginning of each other finding."""
    console.print(f"{name}: {_summary(part)}")
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


def _run(part: _Part, deadline: float) -> dict[str, Any]:
    """Run a part and return its record; an error in the part does not end the check."""
    started = time.monotonic()
    found: dict[str, Any] = {}
    problem = ""
    if started > deadline - _LEAST_SECONDS:
        return {"status": "no time was left", "seconds": 0.0, "problem": "", "found": found}
    try:
        found = part()
    except gpu_parts.PartFailed as error:
        found, problem = error.found, str(error)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    seconds = round(time.monotonic() - started, 1)
    status = "failed" if problem else "passed"
    return {"status": status, "seconds": seconds, "problem": problem, "found": found}


def _demo(folder: Path, deadline: float) -> dict[str, Any]:
    """Train the demo on the device, export it, and score its test set through the server."""
    run, bundle = str(folder / "run"), str(folder / "demo")
    _command(deadline, "training", "train", "demo", "--out", run, "--device", "cuda")
    _command(deadline, "export", run, bundle, "--precision", "fp32,int8,fp16,bf16")
    demo = _command(deadline, "benchmarks.demo", bundle, "--run", run)
    found: dict[str, Any] = json.loads(demo.splitlines()[-1])
    return found


def _training(deadline: float) -> dict[str, Any]:
    """Measure tokens per second of `base` and of a plain loop, and the model FLOPs utilisation."""
    try:
        speed = _command(deadline, "benchmarks.training_speed", "--presets", "base", "--steps", "5")
    except subprocess.CalledProcessError as error:
        lines = error.output.splitlines()
        if not lines:
            raise
        raise gpu_parts.PartFailed("slower than the plain loop", json.loads(lines[-1])) from error
    found: dict[str, Any] = json.loads(speed.splitlines()[-1])
    return found


def _tests(deadline: float) -> dict[str, Any]:
    """Run the tests marked `gpu`; files without such tests are not collected, since they need more packages.

    Warnings are not errors and plugins are off, because the machine's packages differ from our environment.
    """
    files = gpu_test_files()
    options = ("-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider")
    try:
        done = _command(deadline, "pytest", *options, *files, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    except subprocess.CalledProcessError as error:
        lines = error.output.splitlines() or [str(error)]
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        raise gpu_parts.PartFailed(lines[-1], {"files": files, "failed": failed}) from error
    return {"files": files, "summary": done.splitlines()[-1]}


def gpu_test_files() -> list[str]:
    """Returns the test files that contain a test marked `gpu`."""
    files = sorted((_ROOT / "tests").rglob("test_*.py"))
    marked = [file for file in files if "pytest.mark.gpu\n" in file.read_text(encoding="utf-8")]
    return [str(file.relative_to(_ROOT)) for file in marked]


def _command(deadline: float, *arguments: str, **environment: str) -> str:
    """Run a module with this interpreter; returns its standard output.

    Raises:
        subprocess.SubprocessError: The module failed, or the deadline passed.
    """
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=False,
        timeout=max(deadline - time.monotonic(), _LEAST_SECONDS),
        cwd=_ROOT,
        env=os.environ | environment,
    )
    print(done.stdout, file=sys.stderr)
    done.check_returncode()
    return done.stdout


def _summary(part: dict[str, Any]) -> str:
    return f"{part['status']} in {part['seconds']} s {part['problem']}".rstrip()


def _describe(bar: dict[str, Any]) -> str:
    if bar["is_met"] is None:
        return f"not measured: {bar['bar']}"
    side = "at most" if "at most" in bar else "at least"
    met = "met" if bar["is_met"] else "NOT MET"
    return f"{met}: {bar['bar']} is {bar['measured']:.2f}, {side} {bar[side]}"
