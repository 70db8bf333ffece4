"""Checks and measures everything that needs a CUDA device, in one unattended command of eight minutes.

    python -m benchmarks.gpu_check prepare                      # here: bundles and packages, in .gpu
    python -m benchmarks.gpu_check --out gpu.json               # there
    python -m benchmarks.gpu_check --parts device,tokens --out gpu.json

The parts run in the order of what they are worth, each in a process of its own with a time limit, so that one
that hangs or crashes does not hide the next. When a part ends, its findings are printed on standard error and
the file of `--out` is rewritten. The last line on standard output is one JSON object.

`prepare` needs the whole project. The check itself needs neither a network nor an export: the bundles were
exported before, and random weights are computed on the spot. `--device cpu` runs all parts at tiny sizes; it
tests the check itself, and its times are meaningless.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_EXAMPLES = "prepare\n--out benchmarks/results/2026-12-01-gpu-h200.json"


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns 0 if every part passed, 1 if one failed, 2 if something is missing."""
    try:
        # They import packages that may be missing.
        from benchmarks.gpu_check import prepare
        from benchmarks.gpu_check.place import SCALES
        from benchmarks.gpu_check.run import PARTS, run
        from benchmarks.report import command
    except ImportError as error:
        print(f"gpu_check: {error}; `prepare` packs what machines seldom have", file=sys.stderr)
        return 2
    parser = command("gpu_check", __doc__, _EXAMPLES)
    add = parser.add_argument
    add(
        "command",
        nargs="?",
        choices=("check", "prepare"),
        default="check",
        help="check (default): run the parts; prepare: export the bundles and pack the packages that a "
        "machine with torch usually lacks",
    )
    add("--parts", help=f"comma-separated names of the parts to check (default: {','.join(PARTS)})")
    add(
        "--device",
        choices=tuple(SCALES),
        default="cuda",
        help="cpu runs tiny sizes, to test the check itself (default: %(default)s)",
    )
    folder = "folder of the prepared bundles (default: %(default)s)"
    add("--folder", type=Path, default=Path(".gpu"), help=folder)
    add("--seconds", type=float, default=480, help="start no part after this time (default: %(default)s)")
    add(
        "--python-version",
        default="3.12",
        metavar="VERSION",
        help="prepare: Python of the machine with the GPU, an x86-64 Linux (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    if options.command == "prepare":
        try:
            prepare.prepare(options.folder, SCALES[options.device])
            if options.device == "cuda":
                prepare.pack_packages(options.folder, options.python_version)
        except subprocess.CalledProcessError as error:
            print(f"gpu_check: {error}", file=sys.stderr)
            return 1
        return 0
    names = options.parts.split(",") if options.parts else list(PARTS)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"unknown parts {unknown}; there are {', '.join(PARTS)}")
    if not (options.folder / prepare.BUNDLES).is_dir():
        print(f"gpu_check: there are no bundles in {options.folder}: run `prepare` first", file=sys.stderr)
        return 2
    return run(options.device, options.folder, names, options.seconds, options.out)


if __name__ == "__main__":
    sys.exit(main())
