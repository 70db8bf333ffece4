"""Describes the environment of a measurement: hardware, versions, commit, command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("torch", "onnxruntime", "onnxruntime-gpu", "ctranslate2", "transformers", "grpcio", "tokenizers")


def describe_hardware() -> dict[str, object]:
    """Returns the environment's description for the head of a result file."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _commit(),
        "command": _command(),
        "cpu": _cpu_name(),
        "cpus_usable": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in _PACKAGES if _version(package)},
    }


def _command() -> str:
    """Returns the command line, with absolute paths shortened to their last names."""
    module = sys.modules["__main__"].__spec__
    name = module.name.removesuffix(".__main__") if module else ""
    words = ["python", "-m", name, *sys.argv[1:]] if module else sys.orig_argv
    return shlex.join(Path(word).name if Path(word).is_absolute() else word for word in words)


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
