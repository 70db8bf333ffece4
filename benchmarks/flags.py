"""Types of the command-line flags that several benchmarks share."""

from __future__ import annotations

import argparse
import math
import os


def positive(text: str) -> int:
    """Parse an integer of at least 1; argparse reports any other text to the user."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def seconds(text: str) -> float:
    """Parse a time above 0; argparse reports any other text to the user."""
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return float(text)


def cores(text: str) -> list[int]:
    """Parse numbers of CPUs that this process may use; argparse reports any other text to the user."""
    try:
        numbers = sorted({int(number) for number in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of CPU numbers, such as 0,1") from None
    missing = set(numbers) - os.sched_getaffinity(0)
    if missing:
        raise argparse.ArgumentTypeError(f"this process may not use CPU {min(missing)}")
    return numbers
