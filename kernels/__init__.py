"""The project's own operators for ONNX Runtime on a CPU, a library in C++ that is optional.

An installation compiles it if the machine has a C++ compiler. Without it, ONNX Runtime runs the operators'
definitions in standard operators, which every graph has.
"""

from __future__ import annotations

import functools
from pathlib import Path


@functools.cache
def library() -> Path | None:
    """Returns the compiled library; None if it was not compiled."""
    return next(Path(__file__).resolve().parent.glob("_operators*.so"), None)
