"""The project's own operators for ONNX Runtime on a CPU: an optional library in C++.

An installation compiles it if there is a C++ compiler. Every graph also contains definitions of these
operators in ONNX Runtime's own ones (`export.graphs.functions`), which run where the library is missing.
"""

from __future__ import annotations

import functools
import logging
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)


@functools.cache
def library() -> Path | None:
    """Returns the library that was compiled for this Python; None if there is none."""
    folder = Path(__file__).resolve().parent
    paths = (folder / f"_operators{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next(filter(Path.is_file, paths), None)


def register(options: Any) -> bool:
    """Add the operators to the `SessionOptions` of ONNX Runtime; returns whether that succeeded.

    A library that cannot be loaded here is logged once, and not used.
    """
    path = library()
    if path is None:
        return False
    try:
        options.register_custom_ops_library(str(path))
    except Exception as error:  # ONNX Runtime's errors do not have a common class
        _warn(path, " ".join(str(error).split()))
        return False
    return True


@functools.cache
def _warn(path: Path, problem: str) -> None:
    _log.warning("graphs run without the operators of %s, which cannot be loaded: %s", path, problem)
