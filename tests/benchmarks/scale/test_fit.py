import dataclasses

import numpy as np
import pytest

from benchmarks.scale.fit import _COLUMNS, fit
from benchmarks.scale.times import EngineTimes

TIMES = EngineTimes(1e-3, 2e-4, 5e-4, 3e-4, 1e-6, 2e-3, 1.5e-4)


def draw_turns(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    chance = np.random.default_rng(seed)
    greedy, sampling, beams = (chance.integers(0, most, count) for most in (30, 5, 17))
    encodes = chance.random(count) < 0.3
    tokens = encodes * chance.integers(10, 130, count)
    positions = (greedy + sampling + beams) * chance.integers(10, 100, count)
    turns = np.stack([np.ones(count), greedy, sampling, beams, positions, encodes, tokens], axis=1)
    return turns, turns @ np.array([getattr(TIMES, name) for name in _COLUMNS])


def test_the_terms_are_found_again_despite_noise_and_interruptions():
    chance = np.random.default_rng(0)
    measured = []
    for seed in range(3):
        turns, seconds = draw_turns(800, seed)
        seconds = seconds * chance.normal(1.0, 0.05, len(seconds))
        seconds[::50] += 0.3  # something else had the core
        measured.append((turns, seconds))
    found = fit(measured)
    assert dataclasses.asdict(found.times) == pytest.approx(dataclasses.asdict(TIMES), rel=0.1)
    assert found.num_turns == 2400
    assert found.explained > 0.95


def test_a_term_is_never_negative():
    turns, seconds = draw_turns(200, 0)
    column = _COLUMNS.index("position_seconds")
    found = fit([(turns, seconds - 2e-6 * turns[:, column])]).times
    assert found.position_seconds == 0
    assert min(dataclasses.asdict(found).values()) == 0


def test_what_never_ran_has_no_time():
    turns, seconds = draw_turns(200, 0)
    turns[:, _COLUMNS.index("beam_row_seconds")] = 0
    assert fit([(turns, seconds)]).times.beam_row_seconds == 0


def test_scaled_times_take_longer_and_medians_leave_out_the_outlier():
    assert TIMES.scaled(2.0).turn_seconds == 2e-3
    found = EngineTimes.median([TIMES, TIMES.scaled(1.1), TIMES.scaled(9.0)])
    assert dataclasses.asdict(found) == pytest.approx(dataclasses.asdict(TIMES.scaled(1.1)))
