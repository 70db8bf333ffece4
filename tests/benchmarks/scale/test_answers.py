import io
import json

import pytest
from rich.console import Console

from benchmarks.load.mix import Job, Mode, Outcome
from benchmarks.scale.__main__ import render_answers
from benchmarks.scale.answers import Question, answer_all, capacity, summarize
from benchmarks.scale.plot import save_plot
from benchmarks.scale.simulation import Policy
from tests.benchmarks.scale.test_simulation import TIMES

SLOW = TIMES.scaled(20.0)  # few calls a second, so that long times are simulated quickly


def make_question(**options) -> Question:
    settings = {"num_slots": 8, "latency_seconds": 12.0, "wait_seconds": 4.0, "num_calls": 40} | options
    return Question(SLOW, **settings)


def test_an_engine_that_is_too_slow_for_the_objective_needs_no_number_of_servers():
    found = make_question(latency_seconds=0.01).best_rate(1, 4, Policy.ROUND_ROBIN)
    assert (found["rate"], found["servers"]) == (0.0, None)


def test_a_looser_objective_is_met_at_a_higher_rate():
    found = [
        make_question(latency_seconds=limit).best_rate(1, 8, Policy.ROUND_ROBIN) for limit in (6.0, 20.0)
    ]
    assert 0 < found[0]["rate"] < found[1]["rate"] < capacity(SLOW, 8)
    assert found[0]["servers"] > found[1]["servers"]
    assert all(0 < each["slots_in_use"] < 1 for each in found)


def test_a_summary_counts_the_calls_of_its_window():
    beam = Job((5,), 3, Mode.BEAM, seed=0)
    outcomes = [
        Outcome(beam, arrival, end=arrival + 3, code=code, queue_seconds=1.0)
        for arrival, code in ((0.0, "OK"), (1.0, "OK"), (2.0, "Overloaded"), (3.0, "OK"), (4.0, "OK"))
    ]
    assert summarize(outcomes, 1.0, 4.0) == {
        "count": 3,
        "refused": pytest.approx(1 / 3),
        "wait_p99": 1.0,
        "latency_p99": 3.0,
        "held_seconds": 8.0,  # 4 slots for 2 seconds
    }
    assert summarize([])["refused"] == 0


def test_every_question_has_an_answer_a_table_and_a_panel(tmp_path):
    report = {"question": {"latency_seconds": 12.0}, "times_of": "a CPU"}
    for name, figures in answer_all(make_question(), is_quick=True):
        report.setdefault(name, []).append(figures)
    report = json.loads(json.dumps(report))
    console = Console(file=io.StringIO(), width=300)
    for table in render_answers(report):
        console.print(table)
    for title in ("by_slots", "by_size", "slow", "one_lost", "rise"):
        assert title in console.file.getvalue()
    save_plot(report, tmp_path / "scale.png")
    assert (tmp_path / "scale.png").stat().st_size > 10_000
    # What must hold whatever the times.
    by_load = [row["latency_p99_during"] for row in report["one_lost"]]
    assert by_load == sorted(by_load)
    capacities = [row["capacity"] for row in report["by_slots"]]
    assert capacities == sorted(capacities)
