"""The format of the server's log lines; `server.__main__` configures it once."""

from __future__ import annotations

import json
import logging
import sys
import time

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
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Returns the line without its traceback; fields that the message does not have are at its end."""
        fields: dict[str, object] = getattr(record, "fields", {})
        rest = (f"{name}={value}" for name, value in fields.items() if name not in _IN_MESSAGE)
        return " ".join((super().formatMessage(record), *rest))


def configure_logging(level: str, log_format: str) -> None:
    """Send all log lines to stderr, as text or as one JSON object per line.

    A line may have `fields`, a mapping in `extra`: keys of the object, or text after the message.
    """
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        formatter = _TextFormatter("%(asctime)sZ %(levelname)-7s %(message)s", "%Y-%m-%dT%H:%M:%S")
        formatter.converter = time.gmtime
        handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("grpc").setLevel(logging.INFO)  # at debug level it logs every event loop
