"""The command `python -m export RUN BUNDLE`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

# ONNX Runtime reports every session to its maker unless this is set before it is imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from seq2seq_serve.bundle.names import Precision

_INTERRUPTED = 130  # shells report 128 plus the signal's number, here SIGINT's

_EXAMPLE = """example:
  python -m export runs/demo bundles/demo --precision fp32,int8
"""


def main(arguments: list[str] | None = None) -> int:
    """Export a run and return the exit code: 0 done, 1 failed, 2 usage, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m export",
        description="Turn a training run into a bundle that `python -m server` serves.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, help="folder of a finished `python -m training train`")
    parser.add_argument("bundle", type=Path, help="folder to create")
    parser.add_argument(
        "--precision",
        type=_precisions,
        default=_precisions("fp32,int8"),
        metavar="LIST",
        help="fp32 and int8 (for the CPU), fp16 and bf16 (for CUDA), with commas (default: fp32,int8)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing bundle")
    options = parser.parse_args(arguments)
    with _recorded_interrupts() as interrupts:
        try:
            _export(options, interrupts)
        except BaseException as error:
            if interrupts:  # torch's exporter may turn KeyboardInterrupt into another exception
                print("error: interrupted; no bundle was written", file=sys.stderr)
                return _INTERRUPTED
            if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
                print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
            elif isinstance(error, OSError | ValueError):
                print(f"error: {error}", file=sys.stderr)
            else:
                raise
            return 1
    print(options.bundle)
    return 0


@contextmanager
def _recorded_interrupts() -> Iterator[list[int]]:
    """Record every Ctrl-C in a list, because torch sometimes swallows the KeyboardInterrupt it raises."""
    interrupts: list[int] = []
    handler, hook = signal.getsignal(signal.SIGINT), sys.unraisablehook

    def record(signal_number: int, _frame: FrameType | None) -> None:
        interrupts.append(signal_number)
        raise KeyboardInterrupt

    def ignore_interrupts(unraisable: sys.UnraisableHookArgs) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            hook(unraisable)

    signal.signal(signal.SIGINT, record)
    sys.unraisablehook = ignore_interrupts
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, handler)
        sys.unraisablehook = hook


def _export(options: argparse.Namespace, interrupts: list[int]) -> None:
    # torch takes seconds to import; importing it here keeps --help fast. Ctrl-C is blocked during the import,
    # because an interrupted import of torch prints a traceback.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    from rich.console import Console

    from seq2seq_serve.export.exporter import export_bundle
    from seq2seq_serve.training.run import load_run

    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    console = Console(stderr=True)
    with console.status("reading the run") as status:

        def report(line: str) -> None:
            if interrupts:  # torch's exporter has swallowed the KeyboardInterrupt
                raise KeyboardInterrupt
            console.print(line)
            status.update(line)

        trained = load_run(options.run)
        export_bundle(trained, options.bundle, options.precision, overwrite=options.overwrite, report=report)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # too late: the bundle is written


def _precisions(text: str) -> tuple[Precision, ...]:
    try:
        return tuple(dict.fromkeys(Precision(name.strip()) for name in text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(Precision)}") from error


if __name__ == "__main__":
    sys.exit(main())
