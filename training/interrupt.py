"""Ctrl-C and SIGTERM, noted until a step is whole."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_log = logging.getLogger(__name__)


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM stopped the run, and a checkpoint was left.

    Args:
        step: Where.
        signal_number: By which of the two.
    """

    def __init__(self, step: int, signal_number: int) -> None:
        super().__init__(f"interrupted at step {step}")
        self.step = step
        self.signal_number = signal_number


@contextmanager
def caught_interrupt() -> Iterator[Callable[[], int | None]]:
    """The first Ctrl-C or SIGTERM is only noted, and the second ends at once; gives the question which came.

    Outside the main thread nothing is caught, since Python delivers signals only there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    noted: list[int] = []

    def note(signal_number: int, _frame: FrameType | None) -> None:
        noted.append(signal_number)
        restore()
        _log.info("interrupted: leaving a checkpoint of this step (once more ends at once)")

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in previous:
            signal.signal(number, note)
        yield lambda: noted[0] if noted else None
    finally:
        restore()
