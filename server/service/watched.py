"""Files that are read again when they change."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

_Content = TypeVar("_Content")

_log = logging.getLogger(__name__)


class Watched(Generic[_Content]):
    """The content of some files; a change that cannot be read leaves it as it was.

    Owned by the object that reads the content; used on any thread.

    Args:
        name: The content's name in the log, a plural such as "the tokens".
        paths: The files.
        read: Returns their content, or raises OSError or ValueError.
    """

    def __init__(self, name: str, paths: Sequence[Path], read: Callable[[], _Content]) -> None:
        self._name, self._paths, self._read = name, paths, read
        self._lock = threading.Lock()
        self._stamps = [_stamp(path) for path in paths]
        self.content = read()

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
                _log.warning("%s stay as they were: %s", self._name, error)
                return False
        _log.info("%s were read again from %s", self._name, ", ".join(map(str, self._paths)))
        return True


def _stamp(path: Path) -> tuple[int, int]:
    """Returns a value that changes with the file; a missing file has one, too."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_ino
