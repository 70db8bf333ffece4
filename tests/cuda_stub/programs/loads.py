"""Steps a runner in one thread while each of two others loads and closes runners: `BUNDLE NUM_LOADS`.

Prints the number of steps during the loads. A step or a load that fails ends the process with 1.
"""

import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tests.cuda_stub.programs.common import SOURCES, make_runner, mark, requests_for, rows_for


def step_until(stopping: threading.Event, is_stepping: Future[None], bundle: Path) -> int:
    """A runner has to be warmed up on the thread that steps."""
    try:
        runner = make_runner(bundle)
        runner.warm_up()
        assert runner.captures_steps
        requests = requests_for(SOURCES)
        runner.encode(0, requests)
        rows = rows_for(runner, requests)
    finally:
        is_stepping.set_result(None)
    num_steps = 0
    while not stopping.is_set():
        runner.step(rows)
        num_steps += 1
    return num_steps


def load(bundle: Path, num_loads: int) -> None:
    for _ in range(num_loads):
        runner = make_runner(bundle)
        runner.warm_up()
        assert runner.captures_steps
        runner.close()


def main(bundle: Path, num_loads: int) -> None:
    stopping, is_stepping = threading.Event(), Future[None]()
    with ThreadPoolExecutor(3) as pool:
        steps = pool.submit(step_until, stopping, is_stepping, bundle)
        is_stepping.result()
        mark("loads")
        loads = [pool.submit(load, bundle, num_loads) for _ in range(2)]
        try:
            for one in loads:
                one.result()
        finally:
            stopping.set()
        print(steps.result())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
