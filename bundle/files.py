"""Reads small files that may be anything, keeps new names of files, and gives memory to read files into."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP)  # a folder, on file systems such as SMB


def read_small_file(path: Path, max_bytes: int) -> bytes:
    """Returns the content of a regular file, or of one that a link leads to.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not a regular file, or has more than `max_bytes`.
    """

    def opened(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)  # opening a pipe would wait for its writer

    with open(path, "rb", opener=opened) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise ValueError(f"{path.name} is not a regular file")
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"{path.name} has more than {max_bytes} bytes, the limit")
    return content


def read_toml(path: Path | str) -> dict[str, Any]:
    """Returns the content of a TOML file; raises ValueError in one line, which names the file."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk, where that is possible, so that a renamed file keeps its own.

    Raises:
        OSError: The disk fails.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


def new_memory(num_bytes: int, descriptor: int | None = None) -> memoryview:
    """Returns memory of zeros, which the system gets back as soon as its last user is gone.

    Args:
        num_bytes: Its size.
        descriptor: An empty file in memory (`memfd_create`), which other processes can map; None for this
            process alone.
    """
    if descriptor is not None:
        os.ftruncate(descriptor, max(num_bytes, 1))
        return memoryview(mmap.mmap(descriptor, max(num_bytes, 1)))[:num_bytes]
    content = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # the first use of each page takes its time
        with contextlib.suppress(OSError):  # of a kernel without them
            content.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(content)[:num_bytes]


def give_back(memory: memoryview, begin: int, end: int) -> None:
    """Give bytes of `new_memory` that nobody reads any more to the system, as whole pages, where it can.

    Args:
        memory: All of it.
        begin: The number of the first byte.
        end: The number behind the last one.
    """
    begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if begin >= end or not isinstance(memory.obj, mmap.mmap) or not hasattr(mmap, "MADV_REMOVE"):
        return
    for advice in (mmap.MADV_REMOVE, mmap.MADV_DONTNEED):  # of shared memory, of that of this process alone
        with contextlib.suppress(OSError):
            memory.obj.madvise(advice, begin, end - begin)
            return
