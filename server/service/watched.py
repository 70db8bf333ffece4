"""Files that are read again when they change."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from seq2seq_serve.bundle.files import read_small_file

_Content = TypeVar("_Content")

_MAX_BYTES = 2**20  # of a file

_log = logging.getLogger(__name__)


class Watched(Generic[_Content]):
    """The content of some files; a change that cannot be read leaves it as it was.

    Owned by the object that uses the content. `content` is read on any thread; `refresh` reads files, and is
    called outside of event loops.

    Args:
        name: The content's name in the log, a plural such as "the tokens".
        paths: The files: regular ones, of at most 1 MiB each.
        parse: Makes the content of the files' bytes, or raises OSError or ValueError.

    Raises:
        OSError: A file cannot be read, or `parse` raises it.
        ValueError: A file is not a regular one, is too large, or `parse` raises it.
    """

    def __init__(self, name: str, paths: Sequence[Path], parse: Callable[[list[bytes]], _Content]) -> None:
        self._name, self._paths, self._parse = name, paths, parse
        self._lock = threading.Lock()
        self._stamps = [_stamp(path) for path in paths]
        self.content = self._read()

    def refresh(self) -> bool:
        """Reads changed files. Returns whether `content` is new."""
        with self._lock:
            stamps = [_stamp(path) for path in self._paths]
            if stamps == self._stamps:
                return False
            self._stamps = stamps  # before the reading, so that files that cannot be used are logged once
            try:
                self.content = self._read()
            except (OSError, ValueError) as error:
                _log.warning("%s are unchanged: %s", self._name, error)
                return False
        _log.info("%s were read again from %s", self._name, ", ".join(map(str, self._paths)))
        return True

    def _read(self) -> _Content:
        return self._parse([read_small_file(path, _MAX_BYTES) for path in self._paths])


def _stamp(path: Path) -> tuple[int, int]:
    """Returns a value that changes with the file; a missing file has one, too."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_ino
