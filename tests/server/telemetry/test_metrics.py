import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from seq2seq_serve.server.engine.result import FinishReason, Load, Result, Timings, Turn, Update
from seq2seq_serve.server.errors import Cancelled, DeadlineExceeded, EngineFailed
from seq2seq_serve.server.telemetry.metrics import Metrics
from seq2seq_serve.server.telemetry.record import Caller
from tests.server.fakes import make_request, record_of, sample_value

GUIDE = Path(__file__).parents[3] / "docs" / "operations.md"


@dataclass
class _Model:
    name: str
    version: str = "v1"
    precision: str = "int8"
    provider: str = "cpu"
    num_slots: int = 8
    slot_bytes: int = 128
    max_target_length: int = 5
    base: None = None

    @property
    def engine(self) -> "_Model":
        return self

    @property
    def sizing(self) -> "_Model":
        return self

    def silent_seconds(self) -> float:
        return 20.0

    def load(self) -> Load:
        return Load(num_waiting=5, num_running=2, num_slots_in_use=3, num_cached=10)

    def num_slots_wanted(self) -> int:
        return 9


def metrics_of(name: str = "echo") -> Metrics:
    metrics = Metrics()
    metrics.show_model(_Model(name))
    return metrics


def result(reason: FinishReason, num_target_tokens: int, error: Exception | None = None) -> Result:
    timings = Timings(0.1, 0.01, 0.2, total_seconds=0.5, draft_tokens=9, accepted_tokens=4)
    return Result(reason, (), num_target_tokens, 7, timings, error=error)  # type: ignore[arg-type]


def turn_of(*results: Result) -> Turn:
    return Turn(tuple(Update(make_request((5, 2)), {}, each) for each in results))


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return sample_value(metrics, name, {"model_name": "echo"} | labels)


def test_the_metrics_are_those_of_the_operations_guide():
    rows = [line.split("|")[1] for line in GUIDE.read_text().splitlines() if line.startswith("| `seq2seq_")]
    metrics = metrics_of()
    metrics.record_call(record_of(caller=Caller("shop", has_token=True)))
    families = list(text_string_to_metric_families(generate_latest(metrics.registry).decode()))
    names = {f"{one.name}_total" if one.type == "counter" else one.name for one in families}
    assert {name for name in names if not name.startswith("process_")} == set(
        re.findall(r"`(seq2seq_\w+)`", " ".join(rows))
    )


def test_a_fresh_model_shows_its_size_and_zeros(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    metrics = metrics_of()
    assert value(metrics, "seq2seq_slots") == 8
    assert value(metrics, "seq2seq_cache_bytes") == 1024
    assert value(metrics, "seq2seq_engine_heartbeat_timestamp_seconds") == 980.0
    assert value(metrics, "seq2seq_num_requests_running") == 2
    assert value(metrics, "seq2seq_num_requests_waiting") == 5
    assert value(metrics, "seq2seq_slots_in_use") == 3
    assert value(metrics, "seq2seq_slots_wanted") == 9
    assert value(metrics, "seq2seq_kv_cache_usage_ratio") == 0.25
    assert value(metrics, "seq2seq_model_info", version="v1", precision="int8", provider="cpu") == 1
    assert value(metrics, "seq2seq_generation_tokens_total") == 0
    for reason in ("stop", "length", "abort"):
        assert value(metrics, "seq2seq_request_success_total", finished_reason=reason) == 0
    for reason in ("cancelled", "deadline"):
        assert value(metrics, "seq2seq_wasted_tokens_total", reason=reason) == 0


def test_a_turn_is_added_to_the_histograms_and_counters():
    metrics = metrics_of()
    metrics.statistics_of("echo").record_turn(
        Turn(
            num_rows=3,
            step_seconds=0.002,
            encode_seconds=0.004,
            queue_seconds=(0.001, 0.003),
            first_token_seconds=(0.01, 0.02),
            inter_token_seconds={0.005: 2, 0.1: 1},
            moved_bytes=640,
        ),
    )
    assert value(metrics, "seq2seq_decode_step_seconds_sum") == pytest.approx(0.002)
    assert value(metrics, "seq2seq_step_batch_size_sum") == 3
    assert value(metrics, "seq2seq_encode_time_seconds_count") == 1
    assert value(metrics, "seq2seq_request_queue_time_seconds_sum") == pytest.approx(0.004)
    assert value(metrics, "seq2seq_time_to_first_token_seconds_count") == 2
    name = "seq2seq_inter_token_latency_seconds"
    assert value(metrics, f"{name}_count") == 3
    assert value(metrics, f"{name}_sum") == pytest.approx(0.11)
    # A value that equals a bound is in its bucket.
    assert [value(metrics, f"{name}_bucket", le=le) for le in ("0.004", "0.006", "0.075", "0.1")] == [
        0,
        2,
        2,
        3,
    ]
    assert value(metrics, "seq2seq_cache_moved_bytes_total") == 640


def test_a_turn_without_a_step_is_not_a_step_of_zero_rows():
    metrics = metrics_of()
    metrics.statistics_of("echo").record_turn(Turn())
    assert value(metrics, "seq2seq_decode_step_seconds_count") == 0
    assert value(metrics, "seq2seq_step_batch_size_count") == 0
    assert value(metrics, "seq2seq_encode_time_seconds_count") == 0


def test_every_end_is_counted_by_its_reason_and_waste_by_its_cause():
    metrics = metrics_of()
    ends = (
        result(FinishReason.EOS, 5),
        result(FinishReason.LENGTH, 4),
        result(FinishReason.CANCELLED, 3, Cancelled("gone")),
        result(FinishReason.DEADLINE, 2, DeadlineExceeded("late")),
        result(FinishReason.FAILED, 1, EngineFailed("broken")),
    )
    metrics.statistics_of("echo").record_turn(turn_of(*ends))
    success = "seq2seq_request_success_total"
    assert value(metrics, success, finished_reason="stop") == 1
    assert value(metrics, success, finished_reason="length") == 1
    assert value(metrics, success, finished_reason="abort") == 3
    assert value(metrics, "seq2seq_wasted_tokens_total", reason="cancelled") == 3
    assert value(metrics, "seq2seq_wasted_tokens_total", reason="deadline") == 2
    assert value(metrics, "seq2seq_spec_decode_num_draft_tokens_total") == 5 * 9
    assert value(metrics, "seq2seq_spec_decode_num_accepted_tokens_total") == 5 * 4
    assert value(metrics, "seq2seq_generation_tokens_total") == 15
    assert value(metrics, "seq2seq_prompt_tokens_total") == 35
    assert value(metrics, "seq2seq_e2e_request_latency_seconds_count") == 5


def test_a_model_that_is_not_served_any_more_keeps_its_sums_and_loses_its_state():
    metrics = metrics_of()
    metrics.statistics_of("loading")
    metrics.statistics_of("echo").record_turn(Turn(moved_bytes=5))
    metrics.hide_model(_Model("echo"))
    metrics.statistics_of("echo").record_turn(Turn(moved_bytes=2))  # of its last callers
    assert value(metrics, "seq2seq_cache_moved_bytes_total") == 7
    for name in ("seq2seq_slots", "seq2seq_model_info", "seq2seq_num_requests_running"):
        assert f"{name}{{" not in generate_latest(metrics.registry).decode()
    metrics.show_model(_Model("echo", version="v2"))
    assert value(metrics, "seq2seq_cache_moved_bytes_total") == 7
    assert value(metrics, "seq2seq_model_info", version="v2") == 1
    assert value(metrics, "seq2seq_slots", model_name="loading") is None
    assert value(metrics, "seq2seq_core_restarts_total", model_name="loading") is None


def test_a_version_has_durations_of_its_own():
    its = metrics_of().statistics_of("echo")
    ends = (result(FinishReason.EOS, 5), result(FinishReason.FAILED, 1, EngineFailed("broken")))
    step = Turn(num_rows=3, num_steps=2, step_seconds=0.25, encode_seconds=0.5, queue_seconds=(0.25, 0.5))
    for turn in (turn_of(*ends), step, Turn(num_rows=2, step_seconds=1.0), Turn(num_refused=4)):
        its.record_turn(turn)
    durations = {
        "success": (1, 0.5),
        "fail": (5, 0.5),
        "queue": (2, 0.75),
        "compute_input": (1, 0.5),
        "compute_infer": (3, 1.5),
        2: (1, 1.0),
        3: (2, 0.5),
    }
    assert its.of_version() == durations
    assert its.last_request > 0
    its.begin_version()
    assert its.last_request == 0
    assert its.of_version() == dict.fromkeys(durations, (0, 0.0))
    its.record_turn(step)
    assert its.of_version() == dict.fromkeys(durations, (0, 0.0)) | {
        "queue": (2, 0.75),
        "compute_input": (1, 0.5),
        "compute_infer": (2, 0.5),
        3: (2, 0.5),
    }
