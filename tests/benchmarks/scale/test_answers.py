import io
import json

import pytest
from rich.console import Console
from rich.progress import Progress

from benchmarks.scale.__main__ import _RENDER
from benchmarks.scale.answers import Answers, Plan, Servers, _size_for
from benchmarks.scale.plot import save_plot
from tests.benchmarks.scale.test_cluster import TIMES


@pytest.mark.parametrize(
    ("rate", "size"),
    [
        (8, 1),
        (10, 1),
        (11, 2),  # two take 12 each
        (30, 3),
        (60, 5),  # as one of four takes 13, five are enough
        (13_001, 1001),
    ],
)
def test_the_number_of_replicas_follows_the_largest_simulated_one(rate, size):
    assert _size_for(rate, {1: 10.0, 2: 12.0, 4: 13.0}) == size


def test_an_engine_that_is_too_slow_for_the_objective_is_an_error():
    plan = Plan(num_calls=100, sizes=(1,), slots=(4,), full_scale_seconds=0.0)
    answers = Answers(TIMES.scaled(100.0), Servers(), plan, Progress(console=Console(file=io.StringIO())))
    assert answers.by_slots() == [{"slots": 4, "capacity": pytest.approx(0.4, rel=0.5), "rate": 0.0}]
    with pytest.raises(RuntimeError, match="1 servers of 32 slots do not meet the objective at any rate"):
        answers.by_size()


def test_a_looser_objective_is_met_at_a_higher_rate():
    plan = Plan(num_calls=400, sizes=(1,), slots=(16,), full_scale_seconds=0.0)
    rates = []
    for latency_seconds in (0.5, 2.0):
        servers = Servers(num_slots=16, latency_seconds=latency_seconds, wait_seconds=latency_seconds)
        answers = Answers(TIMES.scaled(2.0), servers, plan, Progress(console=Console(file=io.StringIO())))
        rates.append(answers.by_slots()[0]["rate"])
    assert 0 < 1.2 * rates[0] < rates[1]


@pytest.mark.slow
def test_every_question_has_an_answer_a_table_and_a_panel(tmp_path):  # half a minute of simulations
    plan = Plan(num_calls=100, sizes=(1, 2), slots=(8, 16), full_scale_seconds=0.0)
    report = Answers(TIMES.scaled(4.0), Servers(), plan, Progress(console=Console(file=io.StringIO()))).all()
    report["hardware"] = {"cpu": "a CPU", "commit": "abc"}
    assert json.loads(json.dumps(report)) == json.loads(json.dumps(report))
    console = Console(file=io.StringIO(), width=300)
    for table in _RENDER["answers"](report):
        console.print(table)
    text = console.file.getvalue()
    for title in (
        "slots",
        "replicas by calls/s",
        "p99 latency, ms",
        "a sudden rise",
        "a slow rise",
        "one lost",
    ):
        assert title in text
    save_plot(report, tmp_path / "scale.png")
    assert (tmp_path / "scale.png").stat().st_size > 10_000
    # What must hold whatever the times: more slots do more, and nobody is refused at a load that is met.
    capacities = [row["capacity"] for row in report["by_slots"]]
    assert capacities == sorted(capacities)
    by_load = [row["latency_p99_during"] for row in report["one_lost"] if row["size"] == 3]
    assert by_load == sorted(by_load)
