from collections import Counter

import pytest

from benchmarks.load.mix import Job, Mode
from benchmarks.scale.model import Call
from benchmarks.scale.validate import _Counted, predicted_seconds
from tests.benchmarks.scale.test_cluster import TIMES
from tests.benchmarks.scale.test_model import run


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("num_tokens", [1, 2, 9])
def test_predicted_seconds_are_those_of_the_model(mode, num_tokens):
    jobs = [Job((5,) * 11, num_tokens, mode, seed=0), Job((5,) * 4, num_tokens, mode, seed=0)]
    replica = run([Call.of(job, number) for number, job in enumerate(jobs)], 4, TIMES)  # one after the other
    later = 4 if mode is Mode.BEAM else 1  # rows of the turns after a request's first
    steps = Counter({1: 2})
    steps[later] += 2 * (num_tokens - 1)
    work = [_Counted(0.0, 1, steps), _Counted(0.0, 1, Counter())]
    assert predicted_seconds(TIMES, jobs, work) == pytest.approx(replica.work_seconds)


def test_what_was_counted_is_counted_since_before():
    before = _Counted(1.0, 2, Counter({1: 3, 2: 5}))
    after = _Counted(4.0, 7, Counter({1: 3, 2: 9, 8: 1}))
    assert after.since(before) == _Counted(3.0, 5, Counter({2: 4, 8: 1}))
