"""Everything that needs a CUDA device, in two commands that run by themselves.

    python -m benchmarks.gpu_check design --out design.json
    python -m benchmarks.gpu_check speed --out speed.json

`design` begins with what decides the design: attention kernels for sources of new shapes, and steps with
and without XQA and captured graphs. Then it checks correctness: every operator's place,
log-probabilities and tokens beside those of the CPU and of torch, and the tests that are marked `gpu`.
`speed` measures requests beside transformers and CTranslate2, where these are installed, the device's
memory over 10,000 requests, training, and the demo, which it trains, exports, serves and scores. Each
command takes at most eight minutes, prints each part's result on standard error as soon as the part ends,
and then writes the file of `--out` anew. The last line on standard output is one JSON object.

Both take the interpreter that they are started with, install nothing and need no network. This module imports
only the standard library: it looks first for all that the check needs, and reports everything that is missing
at once. `wheels` prints the packages that a machine with torch seldom has, besides onnxruntime-gpu itself.
`--device cpu` runs the parts that a CPU can run, at tiny sizes; it tries the check itself and shows nothing
of speed.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_CUDA = "CUDAExecutionProvider"
_PIP_NAMES = {  # by what they are imported as
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
_SELDOM_THERE = {  # on a machine that is made for torch
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
_OURS = ("benchmarks.gpu_run", "benchmarks.demo", "server.__main__", "training.commands", "export.__main__")
_CREATE_SESSION = """
import sys
import onnxruntime
from server.libraries import load_cuda_libraries
searched = load_cuda_libraries(None)
print(searched, file=sys.stderr)
print(onnxruntime.InferenceSession(sys.argv[1], providers=[sys.argv[2]]).get_providers()[0])
"""
_PYTHON = "3.12"  # of the machine that wheels are prepared for


def main(arguments: list[str] | None = None) -> int:
    """Run a command; 0 every part passed, 1 one failed, 2 the machine lacks something."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        allow_abbrev=False,
        description="Check on a CUDA device what no other machine can show.",
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
        "demo; wheels: print the packages to carry to a machine without network",
    )
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file, after each part")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu runs tiny sizes, to try the check itself (default %(default)s)",
    )
    options = parser.parse_args(arguments)
    if options.command == "wheels":
        wheels = [_pinned(name) for name in _SELDOM_THERE.values()]
        print(*wheels, sep="\n")
        print(f"download them with:\n  {_download(wheels, _PYTHON)}", file=sys.stderr)
        return 0
    problem = missing(options.device)
    if problem:
        print(f"gpu_check: {problem}", file=sys.stderr)
        return 2
    from benchmarks.gpu_run import run  # it imports what may be missing

    return run(options.command, options.device, options.out)


def missing(device: str) -> str:
    """One message that lists all that this machine lacks and how to carry it; empty if that is nothing."""
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
        lines += ["carry the wheels of:", *wheels, "download them with:", _download(wheels, version)]
    return "\n  ".join(lines)


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the package that it is part of
        return False


def _torch_problem() -> str:
    if not _is_there("torch"):
        return ""
    import torch

    return "" if torch.cuda.is_available() else "torch finds no CUDA device"


def _onnxruntime_problem() -> str:
    """The reason why ONNX Runtime cannot run a graph on the device; empty where it can."""
    if not _is_there("onnxruntime"):
        return ""
    import onnxruntime

    if _CUDA not in onnxruntime.get_available_providers():
        return f"onnxruntime {onnxruntime.__version__} has no {_CUDA}; install onnxruntime-gpu instead"
    # In a process without torch, like the server's: torch would load the libraries of CUDA.
    graph = _ROOT / "server" / "weightless" / "greedy.onnx"
    command = [sys.executable, "-c", _CREATE_SESSION, str(graph), _CUDA]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=_ROOT)
    if done.stdout.strip() == _CUDA:
        return ""
    log = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return f"onnxruntime cannot create a session on CUDA, exit code {done.returncode}: {'; '.join(log)}"


def _import_problems(absent: dict[str, str]) -> list[str]:
    """The errors of importing our own modules, but for absent packages: a package may be too old."""
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
    """A requirement that pip finds one wheel for.

    The versions are those of the image of the server. Only gRPC's packages are the oldest that the project
    takes: their generated code refuses any older grpcio.
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
