"""Checks and measures everything that needs a CUDA device, in two unattended commands.

    python -m benchmarks.gpu_check design --out design.json
    python -m benchmarks.gpu_check speed --out speed.json

`design` first measures the alternatives of the design: attention kernels for sources of new shapes, and steps
with and without XQA and captured graphs. Then it checks correctness: the device of every operator,
log-probabilities and tokens compared with those of the CPU and of torch, and the tests marked `gpu`. `speed`
measures requests (also with transformers and CTranslate2, if they are installed), the device's memory over
10,000 requests, training, and the demo, which it trains, exports, serves and scores. Each command takes at
most eight minutes. When a part ends, the command prints its result on standard error and rewrites the file of
`--out`. The last line on standard output is one JSON object.

Both commands use the current interpreter, install nothing and need no network. This module imports only the
standard library: it first checks all requirements, and reports everything that is missing at once. `wheels`
prints the packages that a machine with torch usually lacks, without onnxruntime-gpu itself. `--device cpu`
runs the parts that a CPU supports, at tiny sizes; it tests the check itself, and its times are meaningless.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_CUDA = "CUDAExecutionProvider"
_PIP_NAMES = {  # by import name
    "torch": "torch",
    "numpy": "numpy",
    "tokenizers": "tokenizers",
    "sacrebleu": "sacrebleu",
    "rich": "rich",
    "matplotlib": "matplotlib",
    "tensorboard": "tensorboard",
    "onnx": "onnx",
    "onnx_ir": "onnx-ir",
    "onnxscript": "onnxscript",
    "onnxruntime": "onnxruntime-gpu",
    "grpc": "grpcio",
    "google.protobuf": "protobuf",
    "prometheus_client": "prometheus-client",
    "typing_extensions": "typing-extensions",
    "pytest": "pytest",
}
_SELDOM_THERE = {  # usually missing on a machine that was set up for torch
    "pydantic": "pydantic",
    "pydantic_core": "pydantic-core",
    "annotated_types": "annotated-types",
    "typing_inspection": "typing-inspection",
    "sentencex": "sentencex",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "grpc_status": "grpcio-status",
    "google.rpc": "googleapis-common-protos",
}
# Together they import everything that the parts use.
_OURS = (
    "benchmarks.gpu_check.run",
    "benchmarks.demo",
    "seq2seq_serve.server.__main__",
    "seq2seq_serve.training.commands",
    "seq2seq_serve.export.__main__",
)
_CREATE_SESSION = """
import sys
import onnxruntime
from seq2seq_serve.bundle.cuda_libraries import load_cuda_libraries
searched = load_cuda_libraries(None)
print(searched, file=sys.stderr)
print(onnxruntime.InferenceSession(sys.argv[1], providers=[sys.argv[2]]).get_providers()[0])
"""


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns 0 if every part passed, 1 if one failed, 2 if a requirement is missing."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        allow_abbrev=False,
        description="Check and measure everything that needs a CUDA device.",
        epilog="examples:\n"
        "  python -m benchmarks.gpu_check design --out benchmarks/results/2026-12-01-gpu-design-h200.json\n"
        "  python -m benchmarks.gpu_check speed --out benchmarks/results/2026-12-01-gpu-speed-h200.json\n"
        "  python -m benchmarks.gpu_check wheels > wheels.txt",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "command",
        choices=("design", "speed", "wheels"),
        help="design: kernels, captured graphs, parity, tokens, tests; speed: requests, memory, training, "
        "demo; wheels: print the packages to copy to a machine without network, besides torch "
        "and onnxruntime-gpu with its CUDA packages",
    )
    parser.add_argument(
        "--python-version",
        default="3.12",
        metavar="VERSION",
        help="wheels: Python version of the target machine, which is x86-64 (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file, after each part")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu runs tiny sizes, to test the check itself (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    if options.command == "wheels":
        wheels = [_pinned(name) for name in _SELDOM_THERE.values()]
        print(*wheels, sep="\n")
        print(f"download them with:\n  {_download(wheels, options.python_version)}", file=sys.stderr)
        return 0
    problem = missing(options.device)
    if problem:
        print(f"gpu_check: {problem}", file=sys.stderr)
        return 2
    from benchmarks.gpu_check.run import run  # imports packages that may be missing

    return run(options.command, options.device, options.out)


def missing(device: str) -> str:
    """Returns a message with all missing requirements and how to get them; empty if nothing is missing."""
    absent = {name: pip for name, pip in (_PIP_NAMES | _SELDOM_THERE).items() if not _is_there(name)}
    problems = [f"the package {name} is not installed (pip calls it {pip})" for name, pip in absent.items()]
    if device == "cuda":
        problems += [problem for problem in (_torch_problem(), _onnxruntime_problem()) if problem]
    problems += _import_problems(absent)
    if not problems:
        return ""
    lines = ["this machine lacks what the check needs:", *problems]
    if absent:
        version = ".".join(map(str, sys.version_info[:2]))
        wheels = [_pinned(name) for name in absent.values()]
        lines += ["copy the wheels of:", *wheels, "download them with:", _download(wheels, version)]
    return "\n  ".join(lines)


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def _torch_problem() -> str:
    if not _is_there("torch"):
        return ""
    import torch

    return "" if torch.cuda.is_available() else "torch finds no CUDA device"


def _onnxruntime_problem() -> str:
    """Returns the reason why ONNX Runtime cannot run a graph on the device; empty if it can."""
    if not _is_there("onnxruntime"):
        return ""
    import onnxruntime

    if _CUDA not in onnxruntime.get_available_providers():
        return (
            f"onnxruntime {onnxruntime.__version__} does not have {_CUDA}: uninstall it, and install "
            "onnxruntime-gpu[cuda,cudnn] instead"
        )
    # In a process without torch, like the server: torch would load the CUDA libraries.
    graph = _ROOT / "server" / "runner" / "weightless" / "greedy.onnx"
    command = [sys.executable, "-c", _CREATE_SESSION, str(graph), _CUDA]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=_ROOT)
    if done.stdout.strip() == _CUDA:
        return ""
    log = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return f"onnxruntime cannot create a session on CUDA, exit code {done.returncode}: {'; '.join(log)}"


def _import_problems(absent: dict[str, str]) -> list[str]:
    """Returns errors of importing our own modules, without absent packages; a package may be too old."""
    problems = {}
    for module in _OURS:
        try:
            importlib.import_module(module)
        except Exception as error:
            name = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
            if not any(f"{name}.".startswith(f"{package}.") for package in absent):
                problems[f"{type(error).__name__}: {error}"] = module
    return [f"{module} cannot be imported: {problem}" for problem, module in problems.items()]


def _pinned(name: str) -> str:
    """Returns a requirement with a fixed version, so that pip finds one wheel for it.

    The versions are those of the server's container image. For gRPC's packages it is the oldest version that
    the project accepts, because their generated code rejects an older grpcio.
    """
    oldest = re.search(rf'"{name}>=([\d.]+)', (_ROOT / "pyproject.toml").read_text())
    if name.startswith("grpcio-") and oldest:
        return f"{name}=={oldest[1]}"
    locked = (_ROOT / "deploy" / "requirements-gpu.txt").read_text()
    version = re.search(rf"^{name}==(\S+)", locked, re.MULTILINE)
    return f"{name}=={version[1]}" if version else name


def _download(wheels: list[str], python: str) -> str:
    platforms = " ".join(f"--platform manylinux{tag}_x86_64" for tag in ("_2_28", "_2_17", "2014"))
    return (
        f"python3 -m pip download --no-deps --only-binary=:all: --implementation cp {platforms} "
        f"--python-version {python} --dest wheels {' '.join(wheels)}"
    )


if __name__ == "__main__":
    sys.exit(main())
