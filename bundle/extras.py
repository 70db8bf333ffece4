"""The packages of a command: one line says how to install a missing one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs_extra(extra: str, *, is_command: bool = True) -> Iterator[None]:
    """Exit with one line in place of a traceback if a package of an extra of `pyproject.toml` is missing.

    A module that is imported, and is not the command that runs, raises the error as Python does.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not is_command or package in ("", "seq2seq_serve"):
            raise
        sys.exit(
            f"error: {package} is missing: in a clone of seq2seq-serve, pip install -e '.[{extra},cpu]' "
            "(or gpu in place of cpu)"
        )
