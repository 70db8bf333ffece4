"""Records how each call ended, or each request of a call: in the metrics, the access log, and spans."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from seq2seq_serve.server.engine.request import Request
from seq2seq_serve.server.engine.result import FinishReason, Result
from seq2seq_serve.server.service.tracing import Tracing, trace_id_of
from seq2seq_serve.server.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from seq2seq_serve.server.service.calls import Call

_OUR_FAULT = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
_MILLISECONDS = 1000.0

_log = logging.getLogger(__name__)


@dataclass
class Work:
    """The work of the engine for a call so far. Owned by the call.

    Attributes:
        mode: Of the last request: greedy, beam, sampling or score; empty before the first result.
        source_tokens: Positions of memory of all requests.
        target_tokens: Tokens that all hypotheses generated.
        queue_seconds: The longest time from arrival to admission.
        encode_seconds: The longest encode call.
        decode_seconds: The longest time after that.
        first_token_seconds: From arrival to the first token of the first request.
        finish_reason: Of the first request whose target did not end by itself, otherwise `eos`.
    """

    mode: str = ""
    source_tokens: int = 0
    target_tokens: int = 0
    queue_seconds: float = 0.0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    first_token_seconds: float = 0.0
    finish_reason: str = ""

    def add(self, request: Request, result: Result) -> None:
        """Adds the end of one of the call's requests."""
        timings = result.timings
        if not self.mode:
            self.first_token_seconds = timings.first_token_seconds
        self.mode = request.mode
        self.source_tokens += result.num_source_tokens
        self.target_tokens += result.num_target_tokens
        self.queue_seconds = max(self.queue_seconds, timings.queue_seconds)
        self.encode_seconds = max(self.encode_seconds, timings.encode_seconds)
        decode_seconds = timings.total_seconds - timings.queue_seconds - timings.encode_seconds
        self.decode_seconds = max(self.decode_seconds, decode_seconds)
        if self.finish_reason in ("", FinishReason.EOS.value):
            self.finish_reason = result.finish_reason.value


class CallRecorder:
    """Owned by the app; used on the event loop only.

    The access log has one line for each call at the level INFO. Above a number of lines in one second, only
    slow calls and those that fail by the server's fault are logged; the next line counts the others.

    Args:
        metrics: Counts every call.
        tracing: Makes the spans of every call; None makes none.
        max_lines: The most lines in one second of other calls; 0 logs none of these.
        slow_seconds: A call that takes longer is slow.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        metrics: Metrics,
        tracing: Tracing | None = None,
        *,
        max_lines: int = 0,
        slow_seconds: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._tracing = tracing
        self._max_lines = max_lines
        self._slow_seconds = slow_seconds
        self._clock = clock
        self._second = 0  # in which lines are counted
        self._num_lines = 0
        self._num_left_out = 0

    def record(self, call: Call, code: grpc.StatusCode) -> None:
        """Records a call that ended; probes are not recorded."""
        if call.is_probe:
            return
        work = call.work
        self._metrics.record_rpc(model_name=call.model_name, method=call.method, code=code.name)
        if call.caller.token is not None:
            self._metrics.record_caller(
                call.caller.token.name, code.name, work.source_tokens, work.target_tokens
            )
        seconds = self._clock() - call.arrival
        trace_id = "" if self._tracing is None else self._tracing.record(call, code, seconds)
        if _log.isEnabledFor(logging.INFO):
            self._log_line(call, code, seconds, trace_id)

    def _log_line(self, call: Call, code: grpc.StatusCode, seconds: float, trace_id: str) -> None:
        is_slow = seconds >= self._slow_seconds
        if not (is_slow or code in _OUR_FAULT or self._has_room()):
            self._num_left_out += 1
            return
        fields = _fields(call, code, seconds) | {
            "trace_id": trace_id or trace_id_of(call.metadata),
            "slow": is_slow,
            "left_out": self._num_left_out,
        }
        self._num_left_out = 0
        shown = {name: value for name, value in fields.items() if value not in ("", False, 0)}
        _log.info("%s %s %s", call.request_id, call.method, code.name, extra={"fields": shown})

    def _has_room(self) -> bool:
        """Whether one more line may be written in this second; if so, counts it."""
        second = int(self._clock())
        if second != self._second:
            self._second, self._num_lines = second, 0
        self._num_lines += 1
        return self._num_lines <= self._max_lines


def _fields(call: Call, code: grpc.StatusCode, seconds: float) -> dict[str, Any]:
    work = call.work
    return call.names | {
        "code": code.name,
        "model": call.model_name,
        "caller": call.caller.name,
        "mode": work.mode,
        "source_tokens": work.source_tokens,
        "target_tokens": work.target_tokens,
        "finish_reason": work.finish_reason,
        "queue_ms": _milliseconds(work.queue_seconds),
        "encode_ms": _milliseconds(work.encode_seconds),
        "decode_ms": _milliseconds(work.decode_seconds),
        "total_ms": _milliseconds(seconds),
    }


def _milliseconds(seconds: float) -> float:
    return round(seconds * _MILLISECONDS, 3)
