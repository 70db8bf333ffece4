"""How errors of other libraries are told in one line."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text; the name of its class if it has no text."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
