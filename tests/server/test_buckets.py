"""The numbers of rows that steps are run with."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.buckets import bucket_of, buckets_up_to


@pytest.mark.parametrize(
    ("num_slots", "expected"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (16, (1, 2, 4, 8, 16)),
        (25, (1, 2, 4, 8, 16, 24, 25)),
        (128, (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)),
        (250, (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 250)),
    ],
)
def test_buckets_are_powers_of_two_then_also_those_between_and_the_number_of_slots(num_slots, expected):
    assert buckets_up_to(num_slots) == expected


@given(st.integers(1, 5000), st.data())
def test_every_number_of_rows_has_a_bucket_that_is_not_much_larger(num_slots, data):
    num_rows = data.draw(st.integers(1, num_slots))
    bucket = bucket_of(num_rows, buckets_up_to(num_slots))
    assert num_rows <= bucket <= num_slots
    assert bucket < (2 if num_rows < 16 else 1.5) * num_rows or bucket == num_rows
