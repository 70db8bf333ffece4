"""All metrics of the server; no other module names one. It knows the engine's records, not the engine.

Names, labels and finish reasons follow vLLM's, so that a dashboard can be adapted by the prefix. The bounds
are finer at the low end, because a step of a small model takes a millisecond.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from seq2seq_serve.server.engine.result import FinishReason, Turn
from seq2seq_serve.server.system.logs import num_dropped_lines
from seq2seq_serve.server.telemetry.record import CallRecord

if TYPE_CHECKING:
    from seq2seq_serve.server.models.served import ServedModel

_Metric = TypeVar("_Metric", Counter, "_CountedHistogram")

_MODEL = "model_name"

# Seconds of a whole request: up to the two minutes that a patient caller waits.
LATENCY_BOUNDS = (
    *(0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075),
    *(0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075, 0.08),
    *(0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 0.8),
    *(1.0, 1.5, 2.0, 2.5, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 80.0, 120.0),
)
# Seconds of one step, and between two tokens of a sequence.
STEP_BOUNDS = (
    *(0.0002, 0.0003, 0.0004, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008),
    *(0.01, 0.015, 0.02, 0.025, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5),
)
# Rows of a step.
BATCH_BOUNDS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512, 1024)

# Tokens of a source or a target.
LENGTH_BOUNDS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)

_MODES = ("greedy", "beam", "sampling", "score")
_SUCCESS_REASONS = ("stop", "length", "abort")
_FINISHED = {FinishReason.EOS: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
_WASTED_REASONS = {FinishReason.CANCELLED: "cancelled", FinishReason.DEADLINE: "deadline"}


class Metrics:
    """All metrics of one server, in a registry of their own.

    Owned by the app. The event loop writes, the HTTP thread reads; prometheus-client locks each value.
    """

    def __init__(self) -> None:
        # A global setting of the library: otherwise every series gets a second one with its creation time.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(_DroppedLines())
        self._all_series: list[tuple[Callable[..., object], tuple[str, ...]]] = []
        self._infos: dict[str, tuple[str, ...]] = {}
        self._gauges: list[Gauge] = []  # one value per model
        self._requests = Counter(
            "seq2seq_requests",
            "Calls that ended, by how; without probes.",
            (_MODEL, "method", "code"),
            registry=self.registry,
        )
        self._caller_requests = Counter(
            "seq2seq_caller_requests",
            "Calls by the name of the caller's token, and by how they ended.",
            ("caller", "code"),
            registry=self.registry,
        )
        self._caller_tokens = Counter(
            "seq2seq_caller_tokens",
            "Source and target tokens of these calls.",
            ("caller", "side"),
            registry=self.registry,
        )
        self._open_calls = Gauge(
            "seq2seq_open_calls", "Calls that have not ended yet, without probes.", registry=self.registry
        )
        self._info = Gauge(
            "seq2seq_model_info",
            "A served model; always 1.",
            (_MODEL, "version", "precision", "provider"),
            registry=self.registry,
        )
        self._e2e = self._histogram(
            "seq2seq_e2e_request_latency_seconds",
            "From arrival to the end, of every accepted request, however it ended.",
            LATENCY_BOUNDS,
            mode=_MODES,
        )
        self._source_length = self._histogram(
            "seq2seq_request_prompt_tokens", "Source tokens of an accepted request.", LENGTH_BOUNDS
        )
        self._target_length = self._histogram(
            "seq2seq_request_generation_tokens",
            "Target tokens of an accepted request, of all its hypotheses.",
            LENGTH_BOUNDS,
            mode=_MODES,
        )
        self._queue = self._histogram(
            "seq2seq_request_queue_time_seconds", "From arrival to admission.", LATENCY_BOUNDS
        )
        self._encode = self._histogram(
            "seq2seq_encode_time_seconds",
            "One encode call, of all requests that were admitted together.",
            LATENCY_BOUNDS,
        )
        self._first_token = self._histogram(
            "seq2seq_time_to_first_token_seconds", "From arrival to the first target token.", LATENCY_BOUNDS
        )
        self._inter_token = self._histogram(
            "seq2seq_inter_token_latency_seconds", "Between two tokens of a request.", STEP_BOUNDS
        )
        self._step = self._histogram(
            "seq2seq_decode_step_seconds", "One decoding step of all running rows.", STEP_BOUNDS
        )
        self._batch_size = self._histogram(
            "seq2seq_step_batch_size", "Rows of a decoding step.", BATCH_BOUNDS
        )
        self._prompt_tokens = self._counter(
            "seq2seq_prompt_tokens", "Source tokens of accepted requests, counted when one ends."
        )
        self._generation_tokens = self._counter(
            "seq2seq_generation_tokens", "Target tokens generated, counted when a request ends."
        )
        self._draft_tokens = self._counter(
            "seq2seq_spec_decode_num_draft_tokens", "Tokens drafted, counted when a request ends."
        )
        self._accepted_tokens = self._counter(
            "seq2seq_spec_decode_num_accepted_tokens",
            "Drafted tokens that the model selected, too, counted when a request ends.",
        )
        self._success = self._counter(
            "seq2seq_request_success",
            "Accepted requests that ended, by how: stop, length, abort.",
            finished_reason=_SUCCESS_REASONS,
            mode=_MODES,
        )
        self._bounded = self._counter(
            "seq2seq_bounded_targets",
            "Targets that ended at the length bound of the model's bundle; most of them repeat themselves.",
        )
        self._wasted = self._counter(
            "seq2seq_wasted_tokens",
            "Target tokens of requests that were cancelled or expired.",
            reason=tuple(_WASTED_REASONS.values()),
        )
        self._restarts = self._counter(
            "seq2seq_core_restarts",
            "Starts of cores that had ended by themselves, or hung; a start that failed counts, too.",
        )
        self._moved = self._counter(
            "seq2seq_cache_moved_bytes", "Cache and memory copied to close holes and to fork hypotheses."
        )
        self._running = self._gauge("seq2seq_num_requests_running", "Requests being decoded.")
        self._waiting = self._gauge("seq2seq_num_requests_waiting", "Requests waiting for a slot.")
        self._slots_in_use = self._gauge("seq2seq_slots_in_use", "Slots that running requests hold.")
        self._slots_wanted = self._gauge(
            "seq2seq_slots_wanted", "Slots that running and waiting requests need."
        )
        self._slots = self._gauge("seq2seq_slots", "Sequences that can be decoded at once.")
        self._cache_usage = self._gauge(
            "seq2seq_kv_cache_usage_ratio", "Target positions of running rows over those of all slots."
        )
        self._cache_bytes = self._gauge("seq2seq_cache_bytes", "Size of the cache and memory of all slots.")
        self._heartbeat = self._gauge(
            "seq2seq_engine_heartbeat_timestamp_seconds", "Unix time of the engine's last sign of life."
        )

    def _histogram(
        self, name: str, text: str, bounds: tuple[float, ...], **labels: tuple[str, ...]
    ) -> Callable[..., _CountedHistogram]:
        metric = _CountedHistogram(name, text, (_MODEL, *labels), buckets=bounds, registry=self.registry)
        return self._series_of(metric.labels, labels)

    def _counter(self, name: str, text: str, **labels: tuple[str, ...]) -> Callable[..., Counter]:
        metric = Counter(name, text, (_MODEL, *labels), registry=self.registry)
        return self._series_of(metric.labels, labels)

    def _series_of(
        self, look_up: Callable[..., _Metric], labels: Mapping[str, tuple[str, ...]]
    ) -> Callable[..., _Metric]:
        """Returns a function from a model and the values of further labels to their time series.

        It remembers them: a metric looks them up under a lock, and a turn of a core needs a dozen.
        """
        series = cache(look_up)
        self._all_series += [(series, values) for values in product(*labels.values())]
        return series

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(name, text, (_MODEL,), registry=self.registry)
        self._gauges.append(gauge)
        return gauge

    def show_open_calls(self, num_open: Callable[[], int]) -> None:
        """Show the number of open calls, which is asked for at every scrape, on the HTTP thread."""
        self._open_calls.set_function(num_open)

    def show_model(self, model: ServedModel) -> None:
        """Show a model from now on, in place of its predecessor; values without an event are zero."""
        name, engine = model.name, model.engine
        num_positions = engine.num_slots * model.max_target_length
        self._hide_info(name)
        self._infos[name] = (name, model.version, model.sizing.precision, model.sizing.provider)
        self._info.labels(*self._infos[name]).set(1)
        self._slots.labels(name).set(engine.num_slots)
        self._cache_bytes.labels(name).set(engine.num_slots * model.sizing.slot_bytes)
        for gauge, read in (
            (self._heartbeat, lambda: time.time() - engine.silent_seconds()),
            (self._running, lambda: engine.load().num_running),
            (self._waiting, lambda: engine.load().num_waiting),
            (self._slots_in_use, lambda: engine.load().num_slots_in_use),
            (self._slots_wanted, engine.num_slots_wanted),
            (self._cache_usage, lambda: engine.load().num_cached / num_positions),
        ):
            gauge.labels(name).set_function(read)
        for series, values in self._all_series:
            series(name, *values)

    def hide_model(self, model: ServedModel) -> None:
        """Remove a model's gauges; its counters and histograms stay."""
        self._hide_info(model.name)
        for gauge in self._gauges:
            gauge.remove(model.name)

    def _hide_info(self, name: str) -> None:
        if name in self._infos:
            self._info.remove(*self._infos.pop(name))

    def record_call(self, record: CallRecord) -> None:
        """Count a call that ended; the callers' own texts never become labels."""
        self._requests.labels(record.model, record.method, record.code).inc()
        if record.caller.has_token:
            name = record.caller.name
            self._caller_requests.labels(name, record.code).inc()
            self._caller_tokens.labels(name, "source").inc(record.work.source_tokens)
            self._caller_tokens.labels(name, "target").inc(record.work.target_tokens)

    def record_turn(self, name: str, turn: Turn) -> None:
        """Count one turn of one of a model's engines."""
        if turn.num_rows:
            for _ in range(turn.num_steps):
                self._step(name).observe(turn.step_seconds)
                self._batch_size(name).observe(turn.num_rows)
        if turn.queue_seconds:
            self._encode(name).observe(turn.encode_seconds)
        for seconds in turn.queue_seconds:
            self._queue(name).observe(seconds)
        for seconds in turn.first_token_seconds:
            self._first_token(name).observe(seconds)
        for seconds, count in turn.inter_token_seconds.items():
            self._inter_token(name).observe_several(seconds, count)
        self._moved(name).inc(turn.moved_bytes)
        self._restarts(name).inc(turn.num_core_restarts)
        for update in turn.updates:
            result, mode = update.result, update.request.mode
            if result is None:
                continue
            reason = result.finish_reason
            self._e2e(name, mode).observe(result.timings.total_seconds)
            self._source_length(name).observe(result.num_source_tokens)
            self._target_length(name, mode).observe(result.num_target_tokens)
            self._prompt_tokens(name).inc(result.num_source_tokens)
            self._generation_tokens(name).inc(result.num_target_tokens)
            self._draft_tokens(name).inc(result.timings.draft_tokens)
            self._accepted_tokens(name).inc(result.timings.accepted_tokens)
            self._success(name, _FINISHED.get(reason, "abort"), mode).inc()
            self._bounded(name).inc(result.num_bounded)
            if reason in _WASTED_REASONS:
                self._wasted(name, _WASTED_REASONS[reason]).inc(result.num_target_tokens)


class _CountedHistogram(Histogram):
    """A histogram that takes equal values together: a turn may have hundreds of them each millisecond."""

    def observe_several(self, value: float, count: int) -> None:
        """Observe a value `count` times."""
        self._sum.inc(value * count)
        self._buckets[bisect_left(self._upper_bounds, value)].inc(count)


class _DroppedLines(Collector):
    """The lines of this process's log that nobody read in time."""

    def collect(self) -> Iterator[CounterMetricFamily]:
        text = "Log lines that were dropped, because standard error was not read in time"
        yield CounterMetricFamily("seq2seq_log_lines_dropped", text, value=num_dropped_lines())
