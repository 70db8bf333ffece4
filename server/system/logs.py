"""The format of the server's log lines, and the thread that writes them; `server.__main__` configures both.

A reader of the log that is slow or gone must not stop the event loop or an engine: they hand their lines
over, and lines that do not fit into the queue are dropped and counted.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import sys
import time
from logging.handlers import QueueHandler, QueueListener
from typing import Any

_MAX_LINES = 10_000  # that wait to be written
_FLUSH_SECONDS = 1.0
_PLAIN = re.compile(r'[^\s"=]+')
_IN_MESSAGE = ("request_id", "method", "code")  # the fields that a line about a call begins with


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _TextFormatter(logging.Formatter):
    """Writes a record as `TIME LEVEL MESSAGE NAME=VALUE …`.

    Callers choose some of the text, and cannot make it look like a record or field of the server: values with
    spaces, quotation marks or = are quoted, other lines of a record are indented, and characters that cannot
    be printed are escaped.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record, with its traceback on lines below it."""
        return "\n  ".join(map(_printable, super().format(record).split("\n")))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Returns the line without its traceback; fields that the message does not have are at its end."""
        fields: dict[str, object] = getattr(record, "fields", {})
        rest = (f"{name}={_quoted(str(value))}" for name, value in fields.items() if name not in _IN_MESSAGE)
        return " ".join((super().formatMessage(record), *rest))


def _quoted(value: str) -> str:
    return value if _PLAIN.fullmatch(value) else json.dumps(value, ensure_ascii=False)


def _printable(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in line)


def configure_logging(level: str, log_format: str) -> None:
    """Send all log lines to stderr, as text or as one JSON object per line.

    A line may have `fields`, a mapping in `extra`: keys of the object, or text after the message.
    """
    handler: logging.Handler
    try:
        handler = LogWriter(sys.stderr.fileno())
    except (AttributeError, OSError):  # not a file: in a test, or without a standard error
        handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        formatter = _TextFormatter("%(asctime)sZ %(levelname)-7s %(message)s", "%Y-%m-%dT%H:%M:%S")
        formatter.converter = time.gmtime
        handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("grpc").setLevel(logging.INFO)  # at debug level it logs every event loop


class LogWriter(QueueHandler):
    """Hands lines to a thread that writes them to a file descriptor; never waits for it.

    Owned by the root logger. `emit` is thread-safe, and formats a line on the calling thread.

    Args:
        descriptor: Not of a buffered stream: the end of the process would wait for the stream's lock.

    Attributes:
        num_dropped: Lines that did not fit into the queue, or could not be written.
    """

    def __init__(self, descriptor: int) -> None:
        self._lines: queue.Queue[bytes] = queue.Queue(_MAX_LINES)
        super().__init__(self._lines)
        self.num_dropped = 0
        _LineListener(self, descriptor).start()

    def prepare(self, record: logging.LogRecord) -> bytes:
        return self.format(record).encode(errors="backslashreplace") + b"\n"

    def enqueue(self, record: Any) -> None:
        try:
            super().enqueue(record)
        except queue.Full:
            self.num_dropped += 1

    def flush(self) -> None:
        """Wait until all queued lines are written, or for a second; `logging.shutdown` calls it."""
        end = time.monotonic() + _FLUSH_SECONDS
        with self._lines.all_tasks_done:
            while self._lines.unfinished_tasks and (left := end - time.monotonic()) > 0:
                self._lines.all_tasks_done.wait(left)


class _LineListener(QueueListener):
    """Writes the lines itself: `logging.shutdown` would wait for the lock of a handler that is blocked."""

    def __init__(self, writer: LogWriter, descriptor: int) -> None:
        super().__init__(writer.queue)
        self._writer, self._descriptor = writer, descriptor

    def handle(self, record: Any) -> None:
        line: bytes = record
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError:  # nobody reads any more
            self._writer.num_dropped += 1


def num_dropped_lines() -> int:
    """Returns the number of lines that were not written."""
    return sum(getattr(handler, "num_dropped", 0) for handler in logging.getLogger().handlers)
