"""The command `python -m export RUN BUNDLE`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console

# ONNX Runtime reports every session to its maker unless this is set before it is imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from bundle.names import Precision
from export.exporter import export_bundle
from training.run import load_run

_EXAMPLE = """example:
  python -m export runs/demo bundles/demo --precision fp32,int8
"""


def main(arguments: list[str] | None = None) -> int:
    """Export a run; 0 done, 1 failed, 2 usage."""
    parser = argparse.ArgumentParser(
        prog="python -m export",
        description="Turn a training run into a bundle that `python -m server` serves.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="folder of a finished `python -m training train`")
    parser.add_argument("bundle", type=Path, help="folder to make")
    parser.add_argument(
        "--precision",
        type=_precisions,
        default=_precisions("fp32,int8"),
        metavar="LIST",
        help="of fp32, int8 (both for CPU) and fp16 (for CUDA), with commas (default: fp32,int8)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a bundle that is there already")
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    try:
        trained = load_run(options.run)
        with console.status("reading the run") as status:

            def report(line: str) -> None:
                console.print(line)
                status.update(line)

            export_bundle(
                trained, options.bundle, options.precision, overwrite=options.overwrite, report=report
            )
    except (OSError, ValueError) as error:
        print(f"export: {error}", file=sys.stderr)
        return 1
    print(options.bundle)
    return 0


def _precisions(text: str) -> tuple[Precision, ...]:
    try:
        return tuple(dict.fromkeys(Precision(name.strip()) for name in text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(Precision)}") from error


if __name__ == "__main__":
    sys.exit(main())
