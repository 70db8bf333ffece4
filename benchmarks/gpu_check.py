"""Everything that needs a CUDA device, in one command: `python -m benchmarks.gpu_check --out results.json`.

Runs the tests that are marked `gpu`; then the whole way on the device: trains the demo (bf16 autocast),
exports fp32, int8 and fp16 (fp16's proof runs on the device), serves fp16 on CUDA and scores the held-out
test set through it. Takes the interpreter that it is started with and installs nothing: it needs torch with
CUDA and `onnxruntime-gpu`. The last line on standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import onnxruntime
import torch

from benchmarks.hardware import describe_hardware
from bundle.manifest import load_bundle


def main() -> int:
    """Run the check; 0 all passed, 1 something failed or there is no device."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description="Test, train, export, serve and score on a CUDA device.",
        epilog="example:\n  python -m benchmarks.gpu_check --out benchmarks/results/2026-12-01-gpu-h200.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")
    options = parser.parse_args()
    if problem := missing():
        print(f"gpu_check: {problem}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as name:
        try:
            report = measure(Path(name))
        except subprocess.CalledProcessError as error:
            print(f"gpu_check: {' '.join(error.cmd)} exited with {error.returncode}", file=sys.stderr)
            return 1
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))
    return 0


def missing() -> str | None:
    """What this check lacks here, or None."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return "this onnxruntime has no CUDA provider; install onnxruntime-gpu instead"
    return None


def measure(folder: Path) -> dict[str, Any]:
    """Run each command; its seconds, the proofs, and the demo's own report."""
    run, bundle = str(folder / "run"), str(folder / "bundle")
    seconds: dict[str, float] = {}
    command("tests", seconds, "pytest", "-m", "gpu")
    command("training", seconds, "training", "train", "demo", "--out", run, "--device", "cuda")
    command("export", seconds, "export", run, bundle, "--precision", "fp32,int8,fp16")
    demo = command("demo", seconds, "benchmarks.demo", bundle, "--run", run)
    variants = load_bundle(Path(bundle)).manifest.variants
    return {
        "benchmark": "gpu_check",
        "hardware": describe_hardware() | {"gpu": torch.cuda.get_device_name()},
        "seconds": seconds,
        "worst_log_probability_difference": {
            precision.value: variant.parity.max_log_probability_difference
            for precision, variant in variants.items()
        },
        "demo": json.loads(demo.splitlines()[-1]),
    }


def command(label: str, seconds: dict[str, float], *arguments: str) -> str:
    """Run a module of this interpreter; what it printed as its result.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", *arguments], stdout=subprocess.PIPE, encoding="utf-8", check=False
    )
    seconds[label] = round(time.perf_counter() - started, 1)
    print(done.stdout, file=sys.stderr)
    done.check_returncode()
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
