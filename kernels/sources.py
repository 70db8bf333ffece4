"""The C++ sources and their digest, which a compiled library contains; it imports nothing of ours.

`setup.py` hands the digest to the compiler, and `kernels` compares it, so that no library is used that is
older than the sources beside it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path


def source_files(folder: Path) -> list[Path]:
    """Returns the paths of all C++ sources in a folder, sorted."""
    return sorted(path for path in folder.iterdir() if path.suffix in (".cpp", ".h"))


def digest_of_sources(folder: Path) -> str:
    """Returns the SHA-256 of all C++ sources in a folder; empty without any."""
    paths = source_files(folder)
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest() if paths else ""
