"""The project's own operators for ONNX Runtime on a CPU: an optional library in C++.

An installation compiles it if there is a C++ compiler. Without it ONNX Runtime runs the operators'
definitions in its own operators, which every graph contains (`export.graphs.functions`), and a CPU needs up
to twice the time for a small model.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)


@functools.cache
def library() -> Path | None:
    """Returns the compiled library; None if it was not compiled."""
    return next(Path(__file__).resolve().parent.glob("_operators*.so"), None)


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
