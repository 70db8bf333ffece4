import pytest

from benchmarks.load.mix import Job, Mode
from benchmarks.scale.model import Call
from benchmarks.scale.validate import _Counted, predicted_seconds
from benchmarks.serving import Histogram
from tests.benchmarks.scale.test_cluster import TIMES
from tests.benchmarks.scale.test_model import run


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("num_tokens", [1, 2, 9])
def test_predicted_seconds_are_those_of_the_model(mode, num_tokens):
    jobs = [Job((5,) * 11, num_tokens, mode, seed=0), Job((5,) * 4, num_tokens, mode, seed=0)]
    replica = run([Call.of(job, number) for number, job in enumerate(jobs)], 4, TIMES)  # one after the other
    num_first = 2 if mode is Mode.BEAM else 2 * num_tokens  # turns of one row
    num_turns = 2 * num_tokens
    buckets = [(1.0, num_first), (3.0, num_first), (4.0, num_turns), (float("inf"), num_turns)]
    work = [_Counted(0.0, Histogram(buckets), num_encodes=2)]
    assert predicted_seconds(TIMES, jobs, work) == pytest.approx(replica.work_seconds)


def test_a_bucket_stands_for_all_its_numbers_of_rows():
    work = [_Counted(0.0, Histogram([(1.0, 0), (4.0, 10), (float("inf"), 10)]), num_encodes=0)]
    assert predicted_seconds(TIMES, [], work) == pytest.approx(10 * TIMES.turn_seconds(3))


def test_what_was_counted_is_counted_since_before():
    before = _Counted(1.0, Histogram([(1.0, 3), (2.0, 5)]), 2)
    after = _Counted(4.0, Histogram([(1.0, 4), (2.0, 9)]), 7)
    assert after.since(before) == _Counted(3.0, Histogram([(1.0, 1), (2.0, 4)]), 5)
