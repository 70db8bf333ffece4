import numpy as np
import pytest

from benchmarks.scale.fit import COLUMNS, SIGNED, TERMS, fit
from benchmarks.scale.model import EngineTimes

# A kernel for blocks of rows: a sixth row costs a block.
CURVE = ((1, 2e-3), (5, 2.1e-3), (6, 3.4e-3), (10, 4e-3), (32, 1e-2))
TIMES = EngineTimes(
    CURVE,
    sampling_row_seconds=3e-4,
    beam_row_seconds=-5e-5,
    position_seconds=1e-6,
    encode_seconds=2e-3,
    token_seconds=1.5e-4,
)


def draw_turns(count: int, seed: int, most_rows: int = 32) -> tuple[np.ndarray, np.ndarray]:
    chance = np.random.default_rng(seed)
    rows = chance.integers(1, most_rows + 1, count)
    sampling = chance.binomial(rows, 0.1)
    beams = chance.binomial(rows - sampling, 0.4)
    encodes = chance.random(count) < 0.3
    tokens = encodes * chance.integers(10, 130, count)
    positions = rows * chance.integers(10, 100, count)
    turns = np.stack([rows, sampling, beams, positions, encodes, tokens], axis=1)
    seconds = turns[:, 1:] @ np.array([getattr(TIMES, name) for name in TERMS])
    return turns, seconds + [TIMES.turn_seconds(int(each)) for each in rows]


def test_the_terms_are_found_again_despite_noise_and_interruptions():
    chance = np.random.default_rng(0)
    measured = []
    for seed in range(5):
        turns, seconds = draw_turns(800, seed)
        seconds = seconds * chance.normal(1.0, 0.05, len(seconds))
        seconds[::50] += 0.3  # something else had the core
        measured.append((turns, seconds))
    found = fit(measured)
    for num_rows in (1, 3, 5, 6, 8, 10, 12, 24, 32):
        expected = TIMES.turn_seconds(num_rows)
        assert found["times"].turn_seconds(num_rows) == pytest.approx(expected, rel=0.05), num_rows
    for name in TERMS:
        bound = 3e-5 if name in SIGNED else 0.0
        assert getattr(found["times"], name) == pytest.approx(getattr(TIMES, name), rel=0.15, abs=bound), name
    assert found["num_turns"] == 4000
    assert found["explained"] > 0.95


def test_a_term_is_never_negative_except_what_a_mode_saves():
    turns, seconds = draw_turns(2000, 0)
    found = fit([(turns, seconds - 2e-6 * turns[:, COLUMNS.index("position_seconds")])])["times"]
    assert found.position_seconds == 0
    assert found.beam_row_seconds < 0
    assert min(found.encode_seconds, found.token_seconds) > 0


def test_rows_that_were_not_measured_continue_the_curve():
    found = fit([draw_turns(2000, 0, most_rows=10)])["times"]
    assert max(rows for rows, _ in found.rows_seconds) == 10
    assert found.turn_seconds(12) == pytest.approx(4.3e-3, rel=0.03)


def test_the_curve_is_straight_between_and_beyond_its_points():
    times = EngineTimes(((2, 1.0), (4, 2.0), (8, 2.0)))
    assert [times.turn_seconds(rows) for rows in (1, 2, 3, 4, 6, 8, 100)] == [0.5, 1.0, 1.5, 2, 2, 2, 2]
    assert EngineTimes(((5, 3.0),)).turn_seconds(1) == 3.0
