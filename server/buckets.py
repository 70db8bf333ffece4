"""The numbers of rows that steps are warmed up with, and where steps are captured, run with."""

from __future__ import annotations

from bisect import bisect_left

_FIRST_BETWEEN = 16  # from here on there is a bucket between two powers of two


def buckets_up_to(num_slots: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, 32, 48, 64, 96, … and `num_slots` itself, ascending.

    A step in the smallest bucket that holds it computes at most twice its rows, from 16 rows on one and a
    half times.
    """
    sizes = {num_slots}
    power = 1
    while power < num_slots:
        between = power * 3 // 2 if power >= _FIRST_BETWEEN else power
        sizes |= {size for size in (power, between) if size < num_slots}
        power *= 2
    return tuple(sorted(sizes))


def bucket_of(num_rows: int, buckets: tuple[int, ...]) -> int:
    """The smallest of the ascending `buckets` that holds so many rows."""
    return buckets[bisect_left(buckets, num_rows)]
