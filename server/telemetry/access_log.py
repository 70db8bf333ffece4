"""The access log: a line for each call that ended, or for each request of a call."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from seq2seq_serve.server.telemetry.record import CallRecord

_OUR_FAULT = ("INTERNAL", "UNKNOWN")
_MILLISECONDS = 1000.0

_log = logging.getLogger(__name__)


class AccessLog:
    """Writes a line for each call at the level INFO.

    Owned by the app; used on the event loop only. Above a number of lines in one second, only slow calls and
    those that fail by the server's fault are logged; the next line counts the others.

    Args:
        max_lines: The most lines in one second of other calls; 0 logs none of these.
        slow_seconds: A call that takes longer is slow.
        clock: Monotonic seconds.
    """

    def __init__(
        self, max_lines: int, slow_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_lines = max_lines
        self._slow_seconds = slow_seconds
        self._clock = clock
        self._second = 0  # in which lines are counted
        self._num_lines = 0
        self._num_left_out = 0

    def record(self, record: CallRecord) -> None:
        """Writes the line of a call that ended."""
        if not _log.isEnabledFor(logging.INFO):
            return
        is_slow = record.seconds >= self._slow_seconds and not record.lasts
        if not (is_slow or record.code in _OUR_FAULT or self._has_room()):
            self._num_left_out += 1
            return
        work = record.work
        fields = {
            "request_id": record.request_id,
            "service": record.service,
            "method": record.method,
            "code": record.code,
            "model": record.model,
            "caller": record.caller.name,
            "mode": work.mode,
            "source_tokens": work.source_tokens,
            "target_tokens": work.target_tokens,
            "finish_reason": work.finish_reason,
            "queue_ms": _milliseconds(work.queue_seconds),
            "encode_ms": _milliseconds(work.encode_seconds),
            "decode_ms": _milliseconds(work.decode_seconds),
            "total_ms": _milliseconds(record.seconds),
            "trace_id": record.trace_id,
            "slow": is_slow,
            "left_out": self._num_left_out,
        }
        self._num_left_out = 0
        shown = {name: value for name, value in fields.items() if value not in ("", False, 0)}
        _log.info("%s %s %s", record.request_id, record.method, record.code, extra={"fields": shown})

    def _has_room(self) -> bool:
        """Whether one more line may be written in this second; if so, counts it."""
        second = int(self._clock())
        if second != self._second:
            self._second, self._num_lines = second, 0
        self._num_lines += 1
        return self._num_lines <= self._max_lines


def _milliseconds(seconds: float) -> float:
    return round(seconds * _MILLISECONDS, 3)
