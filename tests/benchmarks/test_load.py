"""The load benchmark at its smallest size, and the arithmetic of ideal and of simulated servers."""

import json
import subprocess
import sys

import pytest

from benchmarks.load.ideal import replay
from benchmarks.load.mix import Job, Mode
from benchmarks.scale.model import EngineTimes, Group, simulate

TIMES = EngineTimes(((1, 0.01), (2, 0.03)), encode_seconds=0.1, token_seconds=0.001)
CALLS = [(0.0, Job((5, 6, 2), 4, Mode.GREEDY, seed=0)), (0.01, Job((5, 2), 2, Mode.GREEDY, seed=0))]
# An encode call of 3 tokens and a step; one of 2 and a step of two rows, whose second one ends after another
ENDS = [0.113 + 0.132 + 0.03 + 0.01, 0.113 + 0.132 + 0.03]


def test_two_calls_take_the_times_of_their_turns_with_an_ideal_scheduler_and_with_the_servers_own():
    ideal, busy_seconds = replay(TIMES, [1.0], CALLS, most_encoded=64)
    assert [outcome.end for outcome in ideal] == pytest.approx(ENDS)
    assert busy_seconds == pytest.approx(ENDS[0])
    assert [outcome.end for outcome in simulate(Group(TIMES, num_slots=4), CALLS)] == pytest.approx(ENDS)


def test_a_server_is_measured_beside_the_engine_and_an_ideal_scheduler():
    command = [sys.executable, "-m", "benchmarks.load", "--preset", "demo", "--rounds", "1", "--seconds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout.splitlines()[-1])
    [header] = [line for line in done.stderr.splitlines() if line.startswith("| share of the capacity")]
    assert header.count(", ms: p50, p99") == 5
    assert report["closed_loops"]["greedy"]["stream"]["to_engine"] > 0
    for row in report["sweep"]:
        assert row["failed"] == row["ended_early"] == 0
        assert row["first_token_p99_to_ideal"] > 0
