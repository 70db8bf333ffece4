"""The server with steps of a given time, and its own flags: `python -m reliability.paced 0.02 bundles/demo`.

The engine's thread sleeps for the rest of each step, as it waits for a device. So several servers on one
small machine are limited by their slots, and not by the cores that they share.
"""

from __future__ import annotations

import sys
import time

from seq2seq_serve.server.__main__ import main
from seq2seq_serve.server.engine.plan import Selected
from seq2seq_serve.server.engine.state import Sequence
from seq2seq_serve.server.runner import sizing
from seq2seq_serve.server.runner.runner import OnnxRunner


def pace(seconds: float) -> None:
    """Make every step of this process take at least this time; engines stay in it."""
    sizing._SMALL_BYTES = 0
    step = OnnxRunner.step

    def paced(runner: OnnxRunner, rows: tuple[Sequence, ...], num_steps: int = 1) -> Selected:
        end = time.monotonic() + seconds * num_steps
        selected = step(runner, rows, num_steps)
        time.sleep(max(0.0, end - time.monotonic()))
        return selected

    OnnxRunner.step = paced  # type: ignore[method-assign]


if __name__ == "__main__":
    pace(float(sys.argv[1]))
    main(sys.argv[2:])
