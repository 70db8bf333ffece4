"""Spans of calls for OpenTelemetry, and the ids of traces that callers send (W3C Trace Context).

A call's spans are made when it has ended, because the engine measures its phases anyway. So a server without
tracing does nothing for it, and one with tracing does nothing while it decodes.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import grpc

from seq2seq_serve import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from seq2seq_serve.server.service.calls import Call
    from seq2seq_serve.server.service.status import Metadata

_TRACE_PARENT = "traceparent"
_PARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_VERSION = "00"  # which has nothing after the flags
_SERVICE_NAME, _UNNAMED = "seq2seq-serve", "unknown_service"
_CALLERS_FAULT = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.CANCELLED,
)


def trace_id_of(metadata: Metadata) -> str:
    """Returns the id of the trace that a call belongs to; empty if its metadata has none."""
    given = dict(metadata).get(_TRACE_PARENT, "")
    match = _PARENT.fullmatch(given) if isinstance(given, str) else None
    if match is None or (match[1] == _VERSION and match[3]):
        return ""
    return match[2]


class Tracing:
    """Makes a span of each call, with the spans `queue`, `encode` and `decode` inside.

    Owned by the app. OpenTelemetry's own variables apply, such as OTEL_EXPORTER_OTLP_ENDPOINT,
    OTEL_SERVICE_NAME and OTEL_TRACES_SAMPLER.

    Args:
        exporter: Sends the spans, on a thread of its own; by default over OTLP, by gRPC.

    Raises:
        ModuleNotFoundError: The packages of the extra `tracing` are missing.
    """

    def __init__(self, exporter: SpanExporter | None = None) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if exporter is None:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter()
        resource = Resource.create({SERVICE_VERSION: __version__})
        if str(resource.attributes[SERVICE_NAME]).startswith(_UNNAMED):  # by no variable of the environment
            resource = resource.merge(Resource({SERVICE_NAME: _SERVICE_NAME}))
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(_SERVICE_NAME, __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._trace = trace

    def record(self, call: Call, code: grpc.StatusCode, seconds: float) -> str:
        """Makes the spans of a call that has just ended; returns the id of their trace."""
        end = time.time_ns()
        begin = end - _nanoseconds(seconds)
        span = self._tracer.start_span(
            f"{call.service}/{call.method}",
            self._propagator.extract(dict(call.metadata)),
            self._trace.SpanKind.SERVER,
            _attributes(call, code),
            start_time=begin,
        )
        inner = self._trace.set_span_in_context(span)
        work, at = call.work, begin
        phases = {
            "queue": work.queue_seconds,
            "encode": work.encode_seconds,
            "decode": work.decode_seconds,
        }
        for name, duration in phases.items() if work.mode else ():
            part = self._tracer.start_span(name, inner, start_time=at)
            at = min(end, at + _nanoseconds(duration))
            if name == "decode" and work.first_token_seconds:
                part.add_event("first token", timestamp=begin + _nanoseconds(work.first_token_seconds))
            part.end(at)
        if code is not grpc.StatusCode.OK and code not in _CALLERS_FAULT:
            span.set_status(self._trace.StatusCode.ERROR)
        span.end(end)
        return self._trace.format_trace_id(span.get_span_context().trace_id)

    def stop(self) -> None:
        """Sends the spans that are left. Blocks while the collector takes them, some seconds at most."""
        self._provider.shutdown()


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _attributes(call: Call, code: grpc.StatusCode) -> dict[str, Any]:
    """Returns the attributes of a call, by OpenTelemetry's names where it has some."""
    work = call.work
    given = {
        "rpc.service": call.service,
        "rpc.method": call.method,
        "rpc.grpc.status_code": code.value[0],
        "seq2seq.request_id": call.request_id,
        "seq2seq.model": call.model_name,
        "seq2seq.mode": work.mode,
        "seq2seq.source_tokens": work.source_tokens,
        "seq2seq.target_tokens": work.target_tokens,
        "seq2seq.finish_reason": work.finish_reason,
    }
    return {name: value for name, value in given.items() if value != ""}
