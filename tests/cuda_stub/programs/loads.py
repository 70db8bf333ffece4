"""Steps a runner in one thread while another thread loads and closes others: `BUNDLE NUM_LOADS`.

Prints the number of steps during the loads. A step or a load that fails ends the process with 1.
"""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cuda_stub.programs.common import SOURCES, make_runner, mark, requests_for, rows_for


def step_until(stopping: threading.Event, is_stepping: threading.Event, bundle: Path) -> int:
    """A runner has to be warmed up on the thread that steps."""
    runner = make_runner(bundle)
    runner.warm_up()
    requests = requests_for(SOURCES)
    runner.encode(0, requests)
    rows = rows_for(runner, requests)
    num_steps = 0
    while not stopping.is_set():
        runner.step(rows)
        num_steps += 1
        is_stepping.set()
    assert runner.captures_steps
    return num_steps


def main(bundle: Path, num_loads: int) -> None:
    stopping, is_stepping = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        steps = pool.submit(step_until, stopping, is_stepping, bundle)
        steps.add_done_callback(lambda _: is_stepping.set())
        is_stepping.wait()
        try:
            for i in range(num_loads):
                mark(f"load {i}")
                runner = make_runner(bundle)
                runner.warm_up()
                assert runner.captures_steps
                runner.close()
        finally:
            stopping.set()
        print(steps.result())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
