"""Types of the command-line flags that several benchmarks share."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """Parse an integer of at least 1; argparse reports any other text to the user."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)
