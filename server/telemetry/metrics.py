"""All metrics of the server; no other module names one. It knows the engine's records, not the engine.

Names, labels and finish reasons follow vLLM's, so that a dashboard can be adapted by the prefix.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from seq2seq_serve.server.system.logs import num_dropped_lines
from seq2seq_serve.server.telemetry.record import CallRecord
from seq2seq_serve.server.telemetry.statistics import Statistics

if TYPE_CHECKING:
    from seq2seq_serve.server.models.served import ServedModel

_MODEL = "model_name"
# The name of each sum of a model in `Statistics`, then that of its metric, its help and its labels
_HISTOGRAMS: tuple[tuple[str, ...], ...] = (
    (
        "total",
        "e2e_request_latency_seconds",
        "From arrival to the end, of every accepted request, however it ended.",
        "mode",
    ),
    ("source_length", "request_prompt_tokens", "Source tokens of an accepted request."),
    (
        "target_length",
        "request_generation_tokens",
        "Target tokens of an accepted request, of all its hypotheses.",
        "mode",
    ),
    ("queue", "request_queue_time_seconds", "From arrival to admission."),
    ("encode", "encode_time_seconds", "One encode call, of all requests that were admitted together."),
    ("first_token", "time_to_first_token_seconds", "From arrival to the first target token."),
    ("inter_token", "inter_token_latency_seconds", "Between two tokens of a request."),
    ("step", "decode_step_seconds", "One decoding step of all running rows."),
    ("lag", "live_lag_seconds", "From the end of a word of a live stream until its text is stable."),
    ("step_rows", "step_batch_size", "Rows of a decoding step."),
)
_COUNTERS: tuple[tuple[str, ...], ...] = (
    ("source_tokens", "prompt_tokens", "Source tokens of accepted requests, counted when one ends."),
    ("target_tokens", "generation_tokens", "Target tokens generated, counted when a request ends."),
    ("draft_tokens", "spec_decode_num_draft_tokens", "Tokens drafted, counted when a request ends."),
    (
        "accepted_tokens",
        "spec_decode_num_accepted_tokens",
        "Drafted tokens that the model selected, too, counted when a request ends.",
    ),
    (
        "ends",
        "request_success",
        "Accepted requests that ended, by how: stop, length, abort.",
        "finished_reason",
        "mode",
    ),
    (
        "num_bounded",
        "bounded_targets",
        "Targets that ended at the length bound of the model's bundle; most of them repeat themselves.",
    ),
    ("wasted", "wasted_tokens", "Target tokens of requests that were cancelled or expired.", "reason"),
    (
        "num_core_restarts",
        "core_restarts",
        "Starts of cores that had ended by themselves, or hung; a start that failed counts, too.",
    ),
    (
        "num_adapter_loads",
        "adapter_loads",
        "Adapters that were loaded, versions in place of others included.",
    ),
    ("num_adapter_evictions", "adapter_evictions", "Adapters that left their places for others."),
    ("live_sound_seconds", "live_sound_seconds", "Seconds of sound of live streams."),
    ("num_live_decodings", "live_decodings", "Decodings of the open segments of live streams."),
    (
        "live_decode_seconds",
        "live_decode_seconds",
        "Time of these, waiting included; over the seconds of sound it is the real-time factor.",
    ),
    ("moved_bytes", "cache_moved_bytes", "Cache and memory copied to close holes and to fork hypotheses."),
)
_INFO = ("version", "precision", "provider")


class Metrics:
    """All metrics of one server, in a registry of their own.

    Owned by the app. The event loop writes, the HTTP thread reads; prometheus-client locks each value.
    """

    def __init__(self) -> None:
        # A global setting of the library: otherwise every series gets a second one with its creation time.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=self.registry)
        self._statistics: dict[str, Statistics] = {}
        self._models: dict[str, ServedModel | None] = {}  # None where a model is not served any more
        self.registry.register(_Collected(self._statistics, self._models))
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
        self._live_streams = Gauge(
            "seq2seq_live_streams", "Live streams that sound comes from.", registry=self.registry
        )

    def show_open_calls(self, num_open: Callable[[], int]) -> None:
        """Show the number of open calls, which is asked for at every scrape, on the HTTP thread."""
        self._open_calls.set_function(num_open)

    def show_live_streams(self, num_open: Callable[[], int]) -> None:
        """Show the number of live streams; as `show_open_calls`."""
        self._live_streams.set_function(num_open)

    def statistics_of(self, name: str) -> Statistics:
        """Returns the sums of a model, of all its versions."""
        return self._statistics.setdefault(name, Statistics())

    def show_model(self, model: ServedModel) -> None:
        """Show a model from now on, in place of its predecessor; values without an event are zero."""
        if model.base is None:  # an adapter's requests are in the sums of its base
            self.statistics_of(model.name).begin_version()
        self._models[model.name] = model

    def hide_model(self, model: ServedModel) -> None:
        """Remove a model's gauges; its counters and histograms stay.

        Of an adapter, one of many that come and go, the calls count as those of its base from then on.
        """
        if model.base is None:
            self._models[model.name] = None
        else:
            self._models.pop(model.name, None)
            [family] = self._requests.collect()
            for sample in family.samples:
                if sample.labels[_MODEL] == model.name:
                    labels = sample.labels | {_MODEL: model.base.name}
                    self._requests.labels(**labels).inc(sample.value)
            self._requests.remove_by_labels({_MODEL: model.name})

    def record_call(self, record: CallRecord) -> None:
        """Count a call that ended; the callers' own texts never become labels.

        A call of an adapter that has left meanwhile is counted as one of its base.
        """
        model = record.model
        if model not in self._models:
            model = model.rpartition("/")[0] or model
        self._requests.labels(model, record.method, record.code).inc()
        if record.caller.has_token:
            name = record.caller.name
            self._caller_requests.labels(name, record.code).inc()
            self._caller_tokens.labels(name, "source").inc(record.work.source_tokens)
            self._caller_tokens.labels(name, "target").inc(record.work.target_tokens)


class _Collected(Collector):
    """The metrics of models, which are read where they are counted, at each scrape, on the HTTP thread.

    Args:
        statistics: The sums of models.
        models: The models that were served, and those that are.
    """

    def __init__(
        self, statistics: Mapping[str, Statistics], models: Mapping[str, ServedModel | None]
    ) -> None:
        self._statistics = statistics
        self._models = models

    def collect(self) -> Iterator[Metric]:
        text = "Log lines that were dropped, because standard error was not read in time"
        yield CounterMetricFamily("seq2seq_log_lines_dropped", text, value=num_dropped_lines())
        models = dict(self._models)
        sums = {name: its for name, its in dict(self._statistics).items() if name in models}
        for field, name, text, *labels in _HISTOGRAMS:
            histogram = HistogramMetricFamily(f"seq2seq_{name}", text, labels=(_MODEL, *labels))
            for values, one in _series(sums, field):
                bounds = (*map(floatToGoString, one.bounds), "+Inf")
                histogram.add_metric(
                    values, list(zip(bounds, accumulate(one.counts), strict=True)), one.total
                )
            yield histogram
        for field, name, text, *labels in _COUNTERS:
            counter = CounterMetricFamily(f"seq2seq_{name}", text, labels=(_MODEL, *labels))
            for values, value in _series(sums, field):
                counter.add_metric(values, value)
            yield counter
        served = [model for model in models.values() if model is not None]
        info = GaugeMetricFamily("seq2seq_model_info", "A served model; always 1.", labels=(_MODEL, *_INFO))
        for it in served:
            info.add_metric((it.name, it.version, it.sizing.precision, it.sizing.provider), 1)
        yield info
        for name, text, read in _gauges():
            gauge = GaugeMetricFamily(f"seq2seq_{name}", text, labels=(_MODEL,))
            for it in served:
                if it.base is None:  # an adapter has the engine of its base
                    gauge.add_metric((it.name,), read(it))
            yield gauge


def _series(sums: Mapping[str, Statistics], field: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the values of a field of models, by the values of the labels."""
    for model, its in sums.items():
        found = getattr(its, field)
        for values, value in found.items() if isinstance(found, dict) else [((), found)]:
            yield (model, *values), value


def _gauges() -> tuple[tuple[str, str, Callable[[ServedModel], float]], ...]:
    """Returns the names of the metrics of a served model's load, their help, and how they are read."""
    return (
        ("num_requests_running", "Requests being decoded.", lambda it: it.engine.load().num_running),
        ("num_requests_waiting", "Requests waiting for a slot.", lambda it: it.engine.load().num_waiting),
        ("slots_in_use", "Slots that running requests hold.", lambda it: it.engine.load().num_slots_in_use),
        (
            "slots_wanted",
            "Slots that running and waiting requests need.",
            lambda it: it.engine.num_slots_wanted(),
        ),
        ("slots", "Sequences that can be decoded at once.", lambda it: it.engine.num_slots),
        (
            "kv_cache_usage_ratio",
            "Target positions of running rows over those of all slots.",
            lambda it: it.engine.load().num_cached / (it.engine.num_slots * it.max_target_length),
        ),
        (
            "cache_bytes",
            "Size of the cache and memory of all slots.",
            lambda it: it.engine.num_slots * it.sizing.slot_bytes,
        ),
        (
            "engine_heartbeat_timestamp_seconds",
            "Unix time of the engine's last sign of life.",
            lambda it: time.time() - it.engine.silent_seconds(),
        ),
    )
