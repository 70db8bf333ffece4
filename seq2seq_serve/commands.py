"""Helpers of the five commands: their names, `--version`, and one line for a missing package."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from seq2seq_serve import __version__

_INSTALLED = {
    "client": "seq2seq",
    "training": "seq2seq-train",
    "export": "seq2seq-export",
    "server": "seq2seq-server",
    "bulk": "seq2seq-bulk",
}
_VERSION = f"seq2seq-serve {__version__}"
_MOST_SIMILAR = 3  # flags that an error names
_LEAST_SIMILAR = 0.8
_CLONE = Path(__file__).resolve().parent.parent / "pyproject.toml"


class Parser(argparse.ArgumentParser):
    """Reports wrong usage in one line, and how to see the usage, in place of the whole usage.

    Attributes:
        place: What the arguments were read from, if it was a file.
    """

    place = ""

    def error(self, message: str) -> NoReturn:
        """Exits with code 2."""
        self.exit(2, f"error: {self.place}{message}\n{self.prog} --help shows the usage\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses as argparse does, and names a flag of similar spelling beside one that does not exist."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser = getattr(options, "parser", self)  # that of the subcommand
            parser.error(f"unrecognized arguments: {' '.join(unknown)}{parser.similar_flag(unknown)}")
        return options

    def flags(self) -> list[str]:
        """Returns the long flags, in the order of the usage."""
        return ["--help", *re.findall(r"--[a-z][\w-]*", self.format_usage())]

    def switches(self, *left_out: str) -> dict[str, bool]:
        """Returns all long flags but some, and whether each is a switch."""
        found = re.findall(r"(--[a-z][\w-]*)( \||\]|)", self.format_usage())
        return {flag: bool(end) for flag, end in found if flag not in left_out}

    def similar_flag(self, unknown: Sequence[str]) -> str:
        """Returns a hint at the flags that the first unknown one may stand for; empty if there is none."""
        given = next((argument.partition("=")[0] for argument in unknown if argument.startswith("--")), "")
        flags = self.flags() if given else []
        begun = [flag for flag in flags if flag.startswith(given)]
        beginnings = {flag[: len(given)]: flag for flag in reversed(flags)}  # one may be mistyped, too
        similar = (
            begun[:_MOST_SIMILAR]
            or get_close_matches(given, flags, n=1, cutoff=_LEAST_SIMILAR)
            or [beginnings[one] for one in get_close_matches(given, beginnings, n=1, cutoff=_LEAST_SIMILAR)]
        )
        return f" (meant: {', '.join(similar)}?)" if similar else ""


def program(package: str) -> str:
    """Returns the name under which a package's command runs: `seq2seq-server`, or `python -m server`."""
    called = Path(sys.argv[0]).stem
    return called if called == _INSTALLED[package] else f"python -m {package}"


def runs_as(package: str) -> bool:
    """Whether this process is a package's command, also while the package is still being imported."""
    return Path(sys.argv[0]).stem == _INSTALLED[package] or ("-m", package) in pairwise(sys.orig_argv)


def add_version(parser: argparse.ArgumentParser) -> None:
    """Adds the flag `--version`."""
    parser.add_argument("--version", action="version", version=_VERSION)


def write_any_text() -> None:
    """Makes stdout and stderr take texts in any alphabet, whatever the locale is, and names of any bytes."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def port_number(text: str) -> int:
    """Returns the port in a flag's text; argparse reports the error."""
    if not (text.isascii() and text.isdigit() and int(text) < 2**16):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)


def install_command(extras: str) -> str:
    """Returns the command that installs these extras of `pyproject.toml`, in a clone or elsewhere."""
    return f"pip install -e '.[{extras}]'" if _CLONE.is_file() else f"pip install 'seq2seq-serve[{extras}]'"


@contextmanager
def needs_extra(extras: str, module: str = "__main__") -> Iterator[None]:
    """Exits with one line in place of a traceback if a package of these extras is missing.

    Args:
        extras: The extras, separated by commas.
        module: The module that imports. If it is not the command that runs, it raises
            the error as Python does.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        is_command = module == "__main__" or Path(sys.argv[0]).stem in _INSTALLED.values()
        if not is_command or package in ("", "seq2seq_serve"):
            raise
        if sys.argv[1:] == ["--version"]:
            print(_VERSION)  # noqa: T201
            sys.exit()
        choice = " (or gpu in place of cpu)" if extras.endswith(",cpu") else ""
        sys.exit(f"error: {package} is missing: {install_command(extras)}{choice}")
