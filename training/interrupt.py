"""Ctrl-C and SIGTERM: training notices them at the end of a step, and leaves a checkpoint."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_log = logging.getLogger(__name__)


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM (`signal_number`) stopped the run at a step, whose checkpoint was written."""

    def __init__(self, step: int, signal_number: int) -> None:
        super().__init__(f"interrupted at step {step}")
        self.step = step
        self.signal_number = signal_number


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Turn SIGTERM into a KeyboardInterrupt with the signal's number, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signal_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal_number)

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def caught_interrupt() -> Iterator[Callable[[], int | None]]:
    """Hold back the first Ctrl-C or SIGTERM; a second one ends the process at once.

    The context is a function that returns the number of the signal that came, or None. Outside the main
    thread nothing is held back, because Python delivers signals only there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    received: list[int] = []

    def receive(signal_number: int, _frame: FrameType | None) -> None:
        received.append(signal_number)
        restore()
        _log.info("interrupted: writing a checkpoint of this step (interrupt again to end at once)")

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in previous:
            signal.signal(number, receive)
        yield lambda: received[0] if received else None
    finally:
        restore()
