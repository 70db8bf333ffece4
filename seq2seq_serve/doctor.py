"""Describes this machine, this installation, and what a bundle needs: `seq2seq doctor BUNDLE`.

It imports the parts whose packages are installed, and says which are missing.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from seq2seq_serve import __version__

# Whose versions matter to errors: those of the client, the server, training and export.
_PACKAGES = (
    ("grpcio", "protobuf"),
    ("numpy", "tokenizers", "pydantic", "pillow", "starlette", "onnxruntime", "onnxruntime-gpu"),
    ("torch", "onnx", "onnxscript", "transformers"),
)
_SETTINGS = "SEQ2SEQ_"  # how the names of variables begin that change what runs
_ALSO_SHOWN = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
_SMI = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
_SMI_SECONDS = 20.0
_LABEL, _WIDTH = 10, 100  # characters of a line's label, and of a line


def report(bundle: Path | None) -> int:
    """Prints the description, and returns the exit code: 1 if the bundle cannot be served here."""
    parts = [_versions(), _machine(), _kernels(), _cuda()]
    for label, text in (row for part in parts for row in part):
        _print(label, text)
    if bundle is None:
        return 0
    try:
        for label, text in _bundle(bundle):
            _print(label, text)
    except ModuleNotFoundError as error:
        _print("bundle", _missing(error))
        return 1
    except (OSError, ValueError) as error:
        _print("bundle", str(error))
        return 1
    return 0


def _versions() -> Iterator[tuple[str, str]]:
    yield "version", f"seq2seq-serve {__version__} in {Path(__file__).parent}"
    yield "python", f"{platform.python_version()} ({sys.executable}), {platform.platform()}"
    missing = []
    for group in _PACKAGES:
        found = {name: _version(name) for name in group}
        yield "packages", ", ".join(f"{name} {its}" for name, its in found.items() if its) or "–"
        missing += [name for name, its in found.items() if not its]
    yield "", f"not installed: {', '.join(missing)}"
    given = [name for name in sorted(os.environ) if name.startswith(_SETTINGS) or name in _ALSO_SHOWN]
    if given:
        yield "settings", ", ".join(f"{name}={os.environ[name]}" for name in given)


def _machine() -> Iterator[tuple[str, str]]:
    from seq2seq_serve.server.system.machine import usable_cpus, usable_memory

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield "processor", f"{_processor()}; {usable_cpus()} of {os.cpu_count()} CPUs for this process"
    yield "memory", f"{total / 2**30:.1f} GiB, of which models may have {usable_memory() / 2**30:.1f} GiB"


def _kernels() -> Iterator[tuple[str, str]]:
    try:
        import onnxruntime as ort

        from seq2seq_serve import kernels
    except ModuleNotFoundError as error:
        yield "operators", _missing(error)
        return
    for name, label in (("_operators", "for a CPU"), ("_cuda_operators", "for CUDA")):
        is_cuda = name != "_operators"
        try:
            problem = kernels.add(ort.SessionOptions(), is_cuda=is_cuda)
        except ValueError as error:
            problem = str(error)
        if problem:
            text = f"not used, and models can be several times slower: {problem}"
        else:
            text = "compiled and loaded" + ("" if is_cuda else f" (int8, int4: {kernels.instructions()})")
        yield "operators", f"{label}: {text}"


def _cuda() -> Iterator[tuple[str, str]]:
    yield "GPU", _gpus()
    try:
        from seq2seq_serve.server.runner.device import cuda_problem
    except ModuleNotFoundError as error:
        yield "CUDA", _missing(error)
        return
    yield "CUDA", cuda_problem(None) or "works"


def _bundle(path: Path) -> Iterator[tuple[str, str]]:
    from seq2seq_serve.bundle.manifest import load_bundle
    from seq2seq_serve.server.config import RunnerConfig
    from seq2seq_serve.server.runner.device import CPU, describe_device
    from seq2seq_serve.server.runner.sizing import size_up

    bundle = load_bundle(path)
    manifest = bundle.manifest
    sources = ", ".join(f"{name} ({form})" for name, form in manifest.sources.items())
    sizes = ", ".join(f"{name} {size}" for name, size in manifest.sizes.items())
    yield "bundle", f"{path}: {manifest.kind}, version {bundle.version}, format {manifest.format_version}"
    yield "", f"{sizes}; takes {sources} up to {manifest.max_source_length}"
    if manifest.drafts_only:
        yield "use", f"only drafts for another model, as its --draft: {manifest.kept_tokens}"
    num_usable = 0
    for precision in manifest.variants:
        try:
            sizing = size_up(bundle, RunnerConfig(precision=precision), is_draft=manifest.drafts_only)
        except ValueError as error:
            yield precision, f"does not run here: {error}"
            continue
        num_usable += 1
        bound = "at most" if sizing.provider == CPU else "on the GPU at least"
        yield (
            precision,
            f"runs on {describe_device(sizing.provider, precision, None)}: {sizing.num_slots} slots of "
            f"{sizing.slot_bytes / 2**20:.1f} MiB, weights of {sizing.weight_bytes / 2**20:.0f} MiB, "
            f"together {bound} {sizing.total_bytes / 2**20:.0f} MiB",
        )
    if not num_usable:
        raise ValueError(f"{path} has no graphs that run here")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _missing(error: ModuleNotFoundError) -> str:
    return f"not known: {error.name} is not installed (pip install 'seq2seq-serve[server,cpu]', or gpu)"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpus() -> str:
    if shutil.which(_SMI[0]) is None:
        return "none: there is no nvidia-smi, which comes with NVIDIA's driver"
    try:
        done = subprocess.run(_SMI, capture_output=True, text=True, timeout=_SMI_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not known: nvidia-smi failed ({error})"
    found = done.stdout.strip().splitlines()
    return "; ".join(found) or f"none: nvidia-smi ended with {done.returncode}: {done.stderr.strip()[:200]}"


def _print(label: str, text: str) -> None:
    indent = " " * _LABEL
    wrapped = textwrap.wrap(text, _WIDTH - _LABEL, break_long_words=False, break_on_hyphens=False)
    for number, line in enumerate(wrapped):
        sys.stdout.write((indent if number else label.ljust(_LABEL)) + line + "\n")
