"""The limit of this process's file descriptors, with a reserve for the metrics port."""

from __future__ import annotations

import errno
import logging
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_NUM_RESERVED = 32
_MAX_LIMIT = 2**20  # Linux's own limit, for an infinite hard limit
_NEARLY_ALL, _FEW = 0.9, 0.7  # parts of the limit: above the first a warning, below the second it is rearmed

_log = logging.getLogger(__name__)


class Descriptors:
    """Raises the process's limit, and keeps a reserve below it for probes.

    The kernel refuses to open a descriptor whose number would be the soft limit or more. The soft limit stays
    a little below the hard limit, so that callers' connections cannot use all descriptors. It is raised while
    the metrics port accepts a connection or reads files.

    Owned by the app. Invariant: the soft limit is raised while `reserved` blocks run, on any thread.
    """

    def __init__(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._hard = hard
        self._most = _MAX_LIMIT if hard == resource.RLIM_INFINITY else hard
        self._lock = threading.Lock()
        self._num_blocks = 0
        self._is_warned = False
        self.limit = self._most - min(_NUM_RESERVED, self._most // 8)
        try:
            self._set_soft_limit(self.limit)
        except (OSError, ValueError) as error:
            self._most = self.limit = soft
            _log.warning("the limit of %d open files and sockets cannot be raised: %s", soft, error)

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Allows the block to open descriptors of the reserve."""
        self._enter(+1)
        try:
            yield
        finally:
            self._enter(-1)

    def check(self) -> None:
        """Log once when nearly all are in use; its cost does not depend on their number."""
        try:
            num_open = self._num_open()
        except OSError as error:
            if error.errno != errno.ENFILE:
                raise
            if not self._is_warned:
                self._is_warned = True
                _log.warning("the whole machine has no free file descriptor (its limit is fs.file-max)")
            return
        if num_open >= _NEARLY_ALL * self.limit and not self._is_warned:
            self._is_warned = True
            _log.warning(
                "at least %d of %d files and sockets are open: new connections will wait until others close; "
                "find callers that keep too many with `ss -tn`, or raise the limit with `ulimit -n`",
                num_open,
                self.limit,
            )
        elif num_open <= _FEW * self.limit:
            self._is_warned = False

    def _num_open(self) -> int:
        """Returns a lower bound of the number of open ones: the kernel assigns the lowest free number."""
        try:
            lowest = os.open(os.devnull, os.O_RDONLY)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            return self.limit
        os.close(lowest)
        return lowest

    def _enter(self, change: int) -> None:
        with self._lock:
            was_raised = self._num_blocks > 0
            self._num_blocks += change
            is_raised = self._num_blocks > 0
            if is_raised != was_raised and self._most > self.limit:
                self._set_soft_limit(self._most if is_raised else self.limit)

    def _set_soft_limit(self, limit: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, self._hard))
