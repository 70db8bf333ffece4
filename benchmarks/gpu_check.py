"""Everything that needs a CUDA device, in one command: `python -m benchmarks.gpu_check --out results.json`.

Part by part, whatever became of the parts before: exports a random `base` model in fp16 and bf16, and in fp32
for the CPU; shows that every operator runs on the device; compares log-probabilities with the CPU's and with
torch's, and tokens with the oracle's; measures steps with and without captured graphs beside transformers'
`generate` and CTranslate2, where these are installed; looks at the device's memory over 10,000 requests; runs
the tests that are marked `gpu`; trains, exports, serves and scores the demo on the device; measures how fast
`base` trains, and its model FLOPs utilisation.

Takes the interpreter that it is started with, installs nothing and needs no network: it needs torch with CUDA
and `onnxruntime-gpu`. `--device cpu` runs the same parts at tiny sizes on the CPU, which shows that the
check itself works, and nothing of speed. The last line on standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from rich.console import Console

from benchmarks import gpu_parts, gpu_speed
from benchmarks.gpu_place import CPU_SCALE, CUDA_SCALE, Place, random_model
from benchmarks.hardware import describe_hardware
from bundle.names import Precision

_BUDGET_SECONDS = 460.0  # no part begins after that, and no command outlasts it: the whole takes 8 minutes
_LEAST_SECONDS = 5.0

_Part = Callable[[], dict[str, Any]]


def main(arguments: list[str] | None = None) -> int:
    """Run the check; 0 every part passed, 1 one failed or there is no device."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        allow_abbrev=False,
        description="Export, compare, measure, test, train, serve and score on a CUDA device.",
        epilog="example:\n  python -m benchmarks.gpu_check --out benchmarks/results/2026-12-01-gpu-h200.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu runs tiny sizes, to try the check itself (default %(default)s)",
    )
    options = parser.parse_args(arguments)
    problem = missing() if options.device == "cuda" else None
    if problem:
        print(f"gpu_check: {problem}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as name:
        report = measure(Path(name), options.device, Console(stderr=True))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))
    return int(any(part["status"] != "passed" for part in report["parts"].values()))


def missing() -> str | None:
    """What this check lacks here, or None."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return "this onnxruntime has no CUDA provider; install onnxruntime-gpu instead"
    return None


def measure(folder: Path, device: str, console: Console) -> dict[str, Any]:
    """Run every part, one after another."""
    deadline = time.monotonic() + _BUDGET_SECONDS
    scale = CUDA_SCALE if device == "cuda" else CPU_SCALE
    place = Place(scale, folder, random_model(scale.model))
    report: dict[str, Any] = {"benchmark": "gpu_check", "device": device, "hardware": describe_hardware()}
    if device == "cuda":
        report["hardware"]["gpu"] = torch.cuda.get_device_name()
    parts = report["parts"] = {}
    for name, part in _parts(place, deadline).items():
        parts[name] = _run(part, deadline)
        console.print(f"{name}: {_summary(parts[name])}", markup=False, highlight=False, soft_wrap=True)
    found = parts["speed"]["found"]
    report["bars"] = gpu_speed.bars(place, found) if found else []
    for bar in report["bars"] if device == "cuda" else []:
        console.print(_describe(bar), markup=False, highlight=False, soft_wrap=True)
    return report


def _parts(place: Place, deadline: float) -> dict[str, _Part]:
    """The most telling ones first, should time run out."""
    precisions = dict.fromkeys((*place.scale.precisions, Precision.FP32))
    parts: dict[str, _Part] = {
        f"export {precision}": partial(gpu_parts.export, place, precision) for precision in precisions
    }
    parts |= {
        "placement": partial(gpu_parts.placement, place),
        "parity": partial(gpu_parts.parity, place),
        "tokens": partial(gpu_parts.tokens, place),
        "speed": partial(gpu_speed.speed, place),
        "memory": partial(gpu_parts.memory, place),
    }
    if place.scale.device == "cuda":
        parts |= {
            "tests": partial(_tests, deadline),
            "demo": partial(_demo, place.folder, deadline),
            "training": partial(_training, deadline),
        }
    return parts


def _run(part: _Part, deadline: float) -> dict[str, Any]:
    """What became of a part: nothing that it does ends the check."""
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
    """Trains the demo on the device, exports it, and scores its test set through the server."""
    run, bundle = str(folder / "run"), str(folder / "demo")
    _command(deadline, "training", "train", "demo", "--out", run, "--device", "cuda")
    _command(deadline, "export", run, bundle, "--precision", "fp32,int8,fp16,bf16")
    demo = _command(deadline, "benchmarks.demo", bundle, "--run", run)
    found: dict[str, Any] = json.loads(demo.splitlines()[-1])
    return found


def _training(deadline: float) -> dict[str, Any]:
    """Tokens a second of `base` beside a plain loop, and the model FLOPs utilisation."""
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
    return {"summary": _command(deadline, "pytest", "-q", "-m", "gpu").splitlines()[-1]}


def _command(deadline: float, *arguments: str) -> str:
    """Run a module of this interpreter; what it printed as its result.

    Raises:
        subprocess.SubprocessError: It failed, or the time is over.
    """
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=False,
        timeout=max(deadline - time.monotonic(), _LEAST_SECONDS),
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


if __name__ == "__main__":
    sys.exit(main())
