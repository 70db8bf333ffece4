"""Shows the progress of a command on one line of a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

_INTERVAL_SECONDS = 0.2
_CLEAR = "\r\x1b[K"


class Progress:
    """Rewrites a progress line in place, and writes messages above it. Owned by the command.

    Args:
        stream: Gets the progress line and the messages.
        is_shown: Whether to write the progress line: `stream` must be a terminal that shows nothing else.
        num_lines: Lines to translate; None if the number is unknown.
        num_skipped: Lines that an earlier command has translated.

    Attributes:
        num_skipped: As given.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        is_shown: bool,
        num_lines: int | None,
        num_skipped: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._is_shown = is_shown
        self._num_lines = num_lines
        self.num_skipped = num_skipped
        self._clock = clock
        self._started = self._shown = clock()
        self._line = ""

    def write(self, message: str) -> None:
        """Writes a message above the progress line. `logging` calls this method like that of a stream."""
        self._stream.write((_CLEAR if self._line else "") + message + self._line)

    def flush(self) -> None:
        """Flushes the stream."""
        self._stream.flush()

    def show(self, num_done: int, num_failed: int) -> None:
        """Rewrites the progress line, at most five times a second."""
        if self._is_shown and self._clock() - self._shown >= _INTERVAL_SECONDS:
            self._shown = self._clock()
            self._line = self._text(num_done, num_failed)
            self.write("")
            self.flush()

    def close(self, num_done: int, num_failed: int) -> None:
        """Writes the final numbers and ends the line."""
        if self._is_shown:
            self._line = self._text(num_done, num_failed) + "\n"
            self.write("")
            self.flush()
            self._line = ""

    def _text(self, num_done: int, num_failed: int) -> str:
        rate = (num_done - self.num_skipped) / max(self._clock() - self._started, 1e-9)
        done = str(num_done) if self._num_lines is None else f"{num_done} of {self._num_lines}"
        text = f"{done} lines, {rate:.0f} a second" + (f", {num_failed} failed" if num_failed else "")
        if self._num_lines is not None and num_done < self._num_lines and rate:
            text += f", {_hours((self._num_lines - num_done) / rate)} left"
        return text


class SoundProgress:
    """Rewrites the progress of a sound in place. Owned by the command.

    Args:
        stream: Gets the progress line.
        is_shown: Whether to write it: `stream` must be a terminal that shows nothing else.
        total_seconds: The length of the sound; None if it is unknown.
        total_bytes: The size of the file, for a sound of unknown length; None if it is unknown, too.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        is_shown: bool,
        total_seconds: float | None,
        total_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._is_shown = is_shown
        self._total_seconds, self._total_bytes = total_seconds, total_bytes
        self._clock = clock
        self._started = self._shown = clock()
        self._seconds, self._num_bytes = 0.0, 0

    def show(self, seconds: float, num_bytes: int) -> None:
        """Rewrites the line, at most five times a second.

        Args:
            seconds: Of sound, which the server has received.
            num_bytes: That were sent.
        """
        self._seconds, self._num_bytes = seconds, num_bytes
        if self._is_shown and self._clock() - self._shown >= _INTERVAL_SECONDS:
            self._shown = self._clock()
            self._write("")

    def close(self) -> None:
        """Writes the final numbers and ends the line."""
        if self._is_shown:
            self._write("\n")

    def _write(self, end: str) -> None:
        passed = max(self._clock() - self._started, 1e-9)
        text, share = _hours(self._seconds), 0.0
        if self._total_seconds:
            text += f" of {_hours(self._total_seconds)}"
            share = self._seconds / self._total_seconds
        elif self._total_bytes:
            share = self._num_bytes / self._total_bytes
            text += f", {self._num_bytes / 2**20:.0f} of {self._total_bytes / 2**20:.0f} MiB"
        text += f", {self._seconds / passed:.0f} times as fast as speech"
        if 0 < share < 1:
            text += f", {_hours(passed / share * (1 - share))} left"
        self._stream.write(_CLEAR + text + end)
        self._stream.flush()


def _hours(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
