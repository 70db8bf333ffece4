import pytest

from benchmarks.load.figures import _ratio_at


@pytest.mark.parametrize(
    ("p99", "ratio"),
    [
        (0.9, 1.0),  # they are as fast at our own rate, or faster
        (0.6, 1.0),
        (0.5, 1.25),
        (0.4, 1.5),
        (0.3, 2.6),
        (0.1, 3.0),  # never: at least the last ratio
    ],
)
def test_the_rate_at_the_same_latency_lies_between_those_measured(p99, ratio):
    # At 2.0 they were slower again than at 1.5: that is noise.
    theirs = {1.0: 0.6, 1.5: 0.4, 2.0: 0.45, 3.0: 0.2}
    assert _ratio_at(p99, theirs) == pytest.approx(ratio)
