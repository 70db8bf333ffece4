"""Shortens errors of other libraries to one line."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, or the name of its class if the text is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
