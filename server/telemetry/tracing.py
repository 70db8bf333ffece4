"""Spans of calls for OpenTelemetry.

A call's spans are made when it has ended, because the engine measures its phases anyway. So a server without
tracing does nothing for it, and one with tracing does nothing while it decodes.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from seq2seq_serve import __version__
from seq2seq_serve.server.telemetry.record import CallRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_SERVICE_NAME, _UNNAMED = "seq2seq-serve", "unknown_service"
_NOT_OUR_FAULT = (
    "OK",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
    "CANCELLED",
)


class Tracing:
    """Makes a span of each call, with the spans `queue`, `encode` and `decode` inside.

    Owned by the app; used on the event loop only. OpenTelemetry's own variables apply, such as
    OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_SERVICE_NAME and OTEL_TRACES_SAMPLER.

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
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if exporter is None:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter()

        class RecordIds(RandomIdGenerator):
            """Gives the first span of a trace the id that is in the call's record."""

            trace_id = 0

            def generate_trace_id(self) -> int:
                return self.trace_id

        resource = Resource.create({SERVICE_VERSION: __version__})
        if str(resource.attributes[SERVICE_NAME]).startswith(_UNNAMED):  # by no variable of the environment
            resource = resource.merge(Resource({SERVICE_NAME: _SERVICE_NAME}))
        self._ids = RecordIds()
        self._provider = TracerProvider(resource=resource, id_generator=self._ids)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(_SERVICE_NAME, __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._trace = trace

    def record(self, record: CallRecord) -> None:
        """Makes the spans of a call that has just ended."""
        self._ids.trace_id = int(record.trace_id, 16)
        end = time.time_ns()
        begin = end - _nanoseconds(record.seconds)
        span = self._tracer.start_span(
            f"{record.service}/{record.method}",
            self._propagator.extract(dict(record.metadata)),
            self._trace.SpanKind.SERVER,
            _attributes(record),
            start_time=begin,
        )
        inner = self._trace.set_span_in_context(span)
        work, at = record.work, begin
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
        if record.code not in _NOT_OUR_FAULT:
            span.set_status(self._trace.StatusCode.ERROR)
        span.end(end)

    def stop(self) -> None:
        """Sends the spans that are left. Blocks while the collector takes them, some seconds at most."""
        self._provider.shutdown()


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _attributes(record: CallRecord) -> dict[str, str | int]:
    """Returns the attributes of a call, by OpenTelemetry's names where it has some."""
    work = record.work
    given: dict[str, str | int] = {
        "rpc.service": record.service,
        "rpc.method": record.method,
        "rpc.grpc.status_code": record.code_number,
        "seq2seq.request_id": record.request_id,
        "seq2seq.model": record.model,
        "seq2seq.mode": work.mode,
        "seq2seq.source_tokens": work.source_tokens,
        "seq2seq.target_tokens": work.target_tokens,
        "seq2seq.finish_reason": work.finish_reason,
    }
    return {name: value for name, value in given.items() if value != ""}
