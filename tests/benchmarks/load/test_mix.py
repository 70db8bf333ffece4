import math
from itertools import islice, pairwise

import pytest

from benchmarks.load.mix import MIX, Job, Mode, Outcome, draw_jobs, poisson_arrivals, throughput


def job(num_tokens: int = 4) -> Job:
    return Job((5, 6, 2), num_tokens, Mode.GREEDY, seed=1)


def test_a_seed_makes_the_same_requests_for_every_contender():
    jobs = draw_jobs(2_000, MIX, seed=3)
    assert jobs == draw_jobs(2_000, MIX, seed=3)
    assert jobs != draw_jobs(2_000, MIX, seed=4)
    assert {len(one.source_ids) for one in jobs} == set(range(10, 41))
    assert {one.num_tokens for one in jobs} == set(range(4, 65))
    for mode, share in MIX.items():
        assert sum(one.mode is mode for one in jobs) / len(jobs) == pytest.approx(share, abs=0.05)


def test_arrivals_are_those_of_a_poisson_process():
    times = list(islice(poisson_arrivals(50.0, seed=1), 20_000))
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.05)
    # The standard deviation of an exponential distribution is its mean.
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert deviation == pytest.approx(mean, rel=0.05)


def test_only_a_full_loop_counts_for_throughput():
    # Two at once: one answer of 10 tokens a second in the middle, and slow ones at both ends.
    ends = [7.0, 9.0, 10.0, 11.0, 12.0, 13.0, 20.0, 30.0]
    outcomes = [Outcome(job(), arrival=0.0, end=end, num_tokens=10) for end in ends]
    found = throughput(list(reversed(outcomes)), in_flight=2)
    assert found.requests_per_second == pytest.approx(1.0)
    assert found.tokens_per_second == pytest.approx(10.0)


def test_a_failed_request_spoils_a_throughput():
    outcomes = [Outcome(job(), arrival=0.0, end=1.0, code="INTERNAL") for _ in range(8)]
    with pytest.raises(RuntimeError, match="8 of 8 requests failed, the first with INTERNAL"):
        throughput(outcomes, in_flight=2)
