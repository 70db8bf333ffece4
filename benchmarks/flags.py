"""Types of command-line flags that several benchmarks have."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """An integer of at least 1; of anything else argparse tells the user what it is."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)
