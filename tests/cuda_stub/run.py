"""Runs Python on the CUDA stub: `python -m tests.cuda_stub.run LOG -m server BUNDLE --provider require`.

Everything after LOG goes to the interpreter, which then has onnxruntime-gpu and finds one H100.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.cuda_stub.build import FOLDER, LIBRARIES, SITE, CannotBuildError, build
from tests.cuda_stub.log import Log, read_log
from tests.cuda_stub.stand_ins import RUNTIME

_ROOT = FOLDER.parent
_SECONDS = 120.0  # a program of the tests takes ten


@dataclass(frozen=True)
class Finished:
    """A process that ended with 0.

    Attributes:
        log: What it asked of CUDA.
    """

    stdout: str
    stderr: str
    log: Log


@dataclass(frozen=True)
class Stub:
    """A built CUDA stub.

    Attributes:
        folder: As `tests.cuda_stub.build` made it.
    """

    folder: Path

    def environment(self, log: Path, failing_captures: str = "") -> dict[str, str]:
        """Environment variables of a process that runs on the stub, this process's own included.

        Args:
            log: The file that the log is appended to.
            failing_captures: "launch:2" makes the first two captures fail at their first kernel; any event of
                the log may stand there.
        """
        libraries = str(self.folder / LIBRARIES)
        return os.environ | {
            "CUDA_STUB_LOG": str(log),
            "CUDA_STUB_FAIL_CAPTURE": failing_captures or os.environ.get("CUDA_STUB_FAIL_CAPTURE", ""),
            # A real runtime that is installed, too, must not be found first.
            "LD_PRELOAD": f"{libraries}/{RUNTIME}",
            "LD_LIBRARY_PATH": _joined(libraries, "LD_LIBRARY_PATH"),
            "PYTHONPATH": _joined(str(self.folder / SITE), "PYTHONPATH"),
        }

    def run(self, log: Path, *arguments: str, failing_captures: str = "") -> Finished:
        """Run this interpreter with arguments in the project's root, and read the log that it leaves.

        Raises:
            RuntimeError: It did not exit with 0; the message has what it printed.
        """
        log.write_text("")
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=_ROOT,
            env=self.environment(log, failing_captures),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{arguments} exited with {done.returncode}\n{done.stdout}\n{done.stderr}")
        return Finished(done.stdout, done.stderr, read_log(log.read_text()))


def _joined(folder: str, variable: str) -> str:
    return ":".join(filter(None, (folder, os.environ.get(variable))))


def main(arguments: list[str]) -> None:
    """Become the interpreter on the stub; exits with 1 where there is no stub, with 2 without arguments."""
    if len(arguments) < 2 or arguments[0].startswith("-") or arguments[0].endswith(".py"):
        print("usage: python -m tests.cuda_stub.run LOG PYTHON-ARGUMENTS...", file=sys.stderr)
        sys.exit(2)
    try:
        build()
    except CannotBuildError as error:
        print(f"the CUDA stub cannot be built: {error}", file=sys.stderr)
        sys.exit(1)
    log = Path(arguments[0]).resolve()
    log.write_text("")
    os.execve(sys.executable, [sys.executable, *arguments[1:]], Stub(FOLDER).environment(log))


if __name__ == "__main__":
    main(sys.argv[1:])
