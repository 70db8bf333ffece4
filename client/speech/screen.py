"""Draws text that still changes at the end of a terminal, below lines that do not change any more."""

from __future__ import annotations

import os
import shutil
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

_DIM, _NORMAL = "\x1b[2m", "\x1b[22m"


class Screen:
    """Owns the end of a terminal from its first call on.

    Args:
        stream: The terminal.
        size: Returns its columns and lines.
    """

    def __init__(
        self, stream: TextIO, size: Callable[[], os.terminal_size] = shutil.get_terminal_size
    ) -> None:
        self._stream = stream
        self._size = size
        self._num_rows = 0  # that are drawn; the cursor is at the end of the last one

    def write(self, text: str) -> None:
        """Writes whole lines that stay, in place of the drawn text."""
        lines = "".join(f"{_printable(line)}\n" for line in text.splitlines())
        self._stream.write(self._clearing() + lines)
        self._stream.flush()
        self._num_rows = 0

    def draw(self, certain: Sequence[str], stable: str, unstable: str) -> None:
        """Draws text in place of the one before.

        Args:
            certain: Lines that are complete, and wait to be written.
            stable: The present line, as far as it does not change.
            unstable: Its end, which is drawn dim.
        """
        columns, lines = self._size()
        rows = [row for line in certain for row in _rows(_printable(line), columns)]
        stable = _printable(stable.lstrip())
        text = stable + _printable(unstable if stable else unstable.lstrip())
        place = 0
        for row in _rows(text, columns):
            num_stable = min(max(len(stable) - place, 0), len(row))
            dim = f"{_DIM}{row[num_stable:]}{_NORMAL}" if num_stable < len(row) else ""
            rows.append(row[:num_stable] + dim)
            place += len(row)
        rows = rows[-max(lines - 1, 1) :]  # above the first line nothing can be cleared
        self._stream.write(self._clearing() + "\r\n".join(rows))
        self._stream.flush()
        self._num_rows = len(rows)

    def _clearing(self) -> str:
        if not self._num_rows:
            return ""
        up = f"\x1b[{self._num_rows - 1}A" if self._num_rows > 1 else ""
        return f"\r{up}\x1b[J"


def _rows(text: str, columns: int) -> Iterator[str]:
    """Yields the rows of a terminal that a line takes, which joined are the line; none for an empty line.

    A row ends after a space where there is one. It is narrower than the terminal, whose cursor would
    otherwise be in a place that depends on the terminal.
    """
    most = max(columns - 1, 2)
    first, width, last_space = 0, 0, 0
    for place, character in enumerate(text):
        width += width_of(character)
        if width > most:
            end = last_space if last_space > first else place
            yield text[first:end]
            first = end
            width = sum(map(width_of, text[first : place + 1]))
        if character == " ":
            last_space = place + 1
    if first < len(text):
        yield text[first:]


def width_of(character: str) -> int:
    """Returns the columns that a character takes: two of East Asian scripts, none of marks on others."""
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


def _printable(text: str) -> str:
    """Returns text with spaces in place of control characters, which a terminal would obey."""
    return "".join(" " if unicodedata.category(character) == "Cc" else character for character in text)
