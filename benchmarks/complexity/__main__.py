"""Measures how the time of layers grows with their sizes: `python -m benchmarks.complexity`.

The layers are those of Vaswani et al. 2017, table 1: attention, recurrent and convolutional. Measured: one
forward pass of one layer over one sentence of n positions, in fp32, as the processor time of one thread on
one core. Three series are measured: n grows at d = 256, d grows at n = 1024, and the kernel k or the
neighbourhood r grows at n = 2048 and d = 256. In the other series, k = 3 and r = 65. Heads are 64 wide. The
paper's table counts attention alone, so attention is timed without its four projections, and again as the
whole layer with them. Multiply-adds are counted in the same layers; if the count follows the paper's order
and the time does not, then the machine causes the difference. Exponents are slopes of the logarithms: over
all sizes, and between the two largest. The number of layers that connect the ends of a sentence of 65
positions is found from gradients, with k = 3 and r = 17.

In every round, each layer is timed once at each size, in a new random order and after one call that is not
timed. The report has medians over rounds. Not measured: training, batches of several sentences (which help a
recurrent layer most), and GPUs. The last line on standard output is one JSON object.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from benchmarks.complexity.layers import LAYER_TYPES, LayerType, count_multiply_adds, layers_to_cross
from benchmarks.complexity.report import save_plot, table
from benchmarks.flags import positive
from benchmarks.hardware import describe_hardware
from benchmarks.report import command, publish

_LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
_WIDTHS_OF_THE_MODEL = (128, 256, 512, 1024)
_KERNELS = (3, 5, 9, 17, 33)
_NEIGHBOURHOODS = (17, 33, 65, 129, 257)
_CROSSED_LENGTH = 65
_LEAST_SECONDS = 0.02  # calls are repeated and timed together for at least this time


@dataclass
class Case:
    """A layer at one size, with the seconds measured in each round.

    Attributes:
        axis: Name of the size that grows in this series: n, d, k or r.
        size: Value of that size.
    """

    kind: LayerType
    axis: str
    size: int
    n: int
    d: int
    width: int
    seconds: list[float] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, and print one JSON object as the last line."""
    parser = command("complexity", __doc__, "--plot docs/complexity.png --out X.json")
    rounds = "timed rounds; medians are reported (default: %(default)s)"
    parser.add_argument("--rounds", type=positive, default=9, help=rounds)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot time by size into this file")
    options = parser.parse_args(arguments)
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cases = list(all_cases())
    measure(cases, options.rounds, Console(stderr=True))
    report = {
        "benchmark": "complexity",
        "hardware": describe_hardware(),
        "rounds": options.rounds,
        "layers": [summarise(kind, cases) for kind in LAYER_TYPES],
    }
    sys.stderr.write(table(report) + "\n")
    if options.plot:
        save_plot(report, options.plot)
    publish(report, options.out)
    return 0


def all_cases() -> Iterator[Case]:
    """Yields every layer type at every size."""
    for kind in LAYER_TYPES:
        width = kind.width or 0
        for n in _LENGTHS:
            yield Case(kind, "n", n, n, 256, width)
        for d in _WIDTHS_OF_THE_MODEL:
            yield Case(kind, "d", d, 1024, d, width)
        for axis, widths in (("k", _KERNELS), ("r", _NEIGHBOURHOODS)):
            if axis in kind.orders:
                for wider in widths:
                    yield Case(kind, axis, wider, 2048, 256, wider)


def measure(cases: Sequence[Case], num_rounds: int, console: Console) -> None:
    """Time every case once per round."""
    shuffler = random.Random(0)
    for _ in track(range(num_rounds), "rounds", console=console):
        for case in shuffler.sample(cases, len(cases)):
            case.seconds.append(_seconds_of_a_call(case))


@torch.inference_mode()
def _seconds_of_a_call(case: Case) -> float:
    layer, x = case.kind.build(case.d, case.width), torch.randn(1, case.n, case.d)
    layer(x)
    num_calls, started = 0, time.process_time()  # excludes other processes on the core
    while (elapsed := time.process_time() - started) < _LEAST_SECONDS or num_calls == 0:
        layer(x)
        num_calls += 1
    return elapsed / num_calls


def summarise(kind: LayerType, cases: Sequence[Case]) -> dict[str, Any]:
    """Returns a row of the report: the paper's orders, the counted operations, and the measured times."""
    growth = {}
    for axis in dict.fromkeys(case.axis for case in cases if case.kind is kind):
        own = [case for case in cases if case.kind is kind and case.axis == axis]
        sizes = [case.size for case in own]
        seconds = [statistics.median(case.seconds) for case in own]
        counts = [count_multiply_adds(kind.build(case.d, case.width), case.n, case.d) for case in own]
        growth[axis] = {
            "sizes": sizes,
            "seconds": seconds,
            "multiply_adds": counts,
            "order": kind.orders.get(axis),
            "counted_exponent": exponent(sizes, counts),
            "measured_exponent": exponent(sizes, seconds),
            "measured_exponent_at_the_end": exponent(sizes[-2:], seconds[-2:]),
        }
    return {
        "name": kind.name,
        "operations": kind.operations,
        "sequential": kind.sequential,
        "path": kind.path,
        "layers_to_cross_65_positions": layers_to_cross(kind, _CROSSED_LENGTH, min(kind.width or 0, 17)),
        "growth": growth,
    }


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Returns the exponent a of values ~ sizes^a, by least squares of the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


if __name__ == "__main__":
    sys.exit(main())
