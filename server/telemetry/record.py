"""The record of a call, which the log, the metrics and the spans are made from."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from seq2seq_serve.server.engine.request import Request
from seq2seq_serve.server.engine.result import FinishReason, Result

Metadata = Iterable[tuple[str, str | bytes]]

PREDICT, ADMIN = "predict", "admin"  # the roles of callers

# Of the W3C's Trace Context.
_TRACE_PARENT = "traceparent"
_PARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_VERSION = "00"  # which has nothing after the flags


@dataclass(frozen=True)
class Caller:
    """The sender of a call.

    Attributes:
        name: The name of its token, or its address where the server has no tokens. Callers share the queue
            fairly by their names.
        roles: What it may do.
        has_token: Whether its token is known.
        models: The names of the models that it may use, and `NAME/*` for all adapters of one, in the order of
            the access file; None for all.
    """

    name: str
    roles: frozenset[str] = frozenset()
    has_token: bool = False
    models: tuple[str, ...] | None = None

    def may_use(self, model: str) -> bool:
        """Whether it may use, and see, the model of a name."""
        if self.models is None or model in self.models:
            return True
        base, slash, _ = model.rpartition("/")
        return bool(slash) and f"{base}/*" in self.models


@dataclass
class Work:
    """The work of the engine for a call so far. Owned by the call.

    Attributes:
        mode: Of the first request: greedy, beam, sampling or score; empty before the first result.
        source_tokens: Positions of memory of all sources.
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

    def add(self, request: Request, result: Result, *, is_repeated: bool = False) -> None:
        """Adds the end of one of the call's requests.

        Args:
            request: The request.
            result: How it ended.
            is_repeated: Whether a request of the call with the same source was added before.
        """
        timings = result.timings
        if not self.mode:
            self.mode, self.first_token_seconds = request.mode, timings.first_token_seconds
        if not is_repeated:
            self.source_tokens += result.num_source_tokens
        self.target_tokens += result.num_target_tokens
        self.queue_seconds = max(self.queue_seconds, timings.queue_seconds)
        self.encode_seconds = max(self.encode_seconds, timings.encode_seconds)
        decode_seconds = timings.total_seconds - timings.queue_seconds - timings.encode_seconds
        self.decode_seconds = max(self.decode_seconds, decode_seconds)
        if self.finish_reason in ("", FinishReason.EOS.value):
            self.finish_reason = result.finish_reason.value


@dataclass(kw_only=True)
class CallRecord:
    """A call, or one of the requests that a call brought; complete at its end.

    Attributes:
        request_id: The id that the caller sent, or a new one.
        caller: The sender.
        arrival: When it came, by `time.monotonic()`.
        deadline: When the caller stops waiting; None for never.
        service: The full name of the service.
        method: The name of the RPC.
        metadata: The metadata that the caller sent.
        model: The name of the served model; empty if none was found.
        work: The work of the engine for it.
        code: The name of the status in gRPC.
        code_number: The number of the status in gRPC.
        seconds: From arrival to the end.
        trace_id: The id of the trace (W3C Trace Context) that it belongs to; empty without one.
        lasts: Whether it is open for as long as its caller wants, which is not slow.
    """

    request_id: str
    caller: Caller
    arrival: float = field(default_factory=time.monotonic)
    deadline: float | None = None
    service: str = ""
    method: str = ""
    metadata: Metadata = ()
    model: str = ""
    work: Work = field(default_factory=Work)
    code: str = ""
    code_number: int = 0
    seconds: float = 0.0
    trace_id: str = ""
    lasts: bool = False


def trace_id_of(metadata: Metadata) -> str:
    """Returns the id of the trace that a call belongs to; empty if its metadata has none."""
    given = dict(metadata).get(_TRACE_PARENT, "")
    match = _PARENT.fullmatch(given) if isinstance(given, str) else None
    if match is None or (match[1] == _VERSION and match[3]):
        return ""
    return match[2]
