"""Time of attention, recurrent and convolutional layers as they grow: `python -m benchmarks.complexity`.

Measured: one forward pass of one layer over one sentence of n positions, fp32, in the processor time of one
thread on one core, of every layer type of Vaswani et al. 2017, table 1: with growing n at d = 256, with
growing d at n = 1024, and with a growing kernel k or neighbourhood r at n = 2048 and d = 256; else k = 3 and
r = 65. Heads are 64 wide. The paper's table counts attention itself, so it is timed without its four
projections, and once more as the whole layer with them. Multiply-adds are counted in the same layers, so that
a difference between the order and the time is known to be the machine's and not the layer's. Exponents are
slopes of the logarithms: over all sizes, and between the two largest. How many layers connect the ends of a
sentence of 65 positions is found by gradients, with k = 3 and r = 17.

Layers and sizes take turns in every round, in an order that is shuffled anew; a call before each is not
timed; medians over rounds are told. Not measured: training, batches of several sentences, which help a
recurrent layer most, and GPUs. The last line on standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
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

from benchmarks.complexity_layers import LAYER_TYPES, LayerType, count_multiply_adds, layers_to_cross
from benchmarks.complexity_report import save_plot, table
from benchmarks.flags import positive
from benchmarks.hardware import describe_hardware

_LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
_WIDTHS_OF_THE_MODEL = (128, 256, 512, 1024)
_KERNELS = (3, 5, 9, 17, 33)
_NEIGHBOURHOODS = (17, 33, 65, 129, 257)
_CROSSED_LENGTH = 65
_LEAST_SECONDS = 0.02  # of the calls that are timed together


@dataclass
class Case:
    """A layer at one size, and the seconds that each round measured.

    Attributes:
        axis: What grows among this case and its like: n, d, k or r.
        size: The value of it.
    """

    kind: LayerType
    axis: str
    size: int
    n: int
    d: int
    width: int
    seconds: list[float] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, and end with one JSON object."""
    options = _parser().parse_args(arguments)
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
    for line in table(report):
        sys.stderr.write(line + "\n")
    if options.plot:
        save_plot(report, options.plot)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    print(json.dumps(report, ensure_ascii=False))
    return 0


def all_cases() -> Iterator[Case]:
    """Every layer type at every size."""
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
    """Time every case once a round."""
    shuffler = random.Random(0)
    for _ in track(range(num_rounds), "rounds", console=console):
        for case in shuffler.sample(cases, len(cases)):
            case.seconds.append(_seconds_of_a_call(case))


@torch.inference_mode()
def _seconds_of_a_call(case: Case) -> float:
    layer, x = case.kind.build(case.d, case.width), torch.randn(1, case.n, case.d)
    layer(x)
    num_calls, started = 0, time.process_time()  # what else runs on the core does not count
    while (elapsed := time.process_time() - started) < _LEAST_SECONDS or num_calls == 0:
        layer(x)
        num_calls += 1
    return elapsed / num_calls


def summarise(kind: LayerType, cases: Sequence[Case]) -> dict[str, Any]:
    """A row of the report: what the paper's table says, and what was counted and measured."""
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
    """The a of values ~ sizes^a: least squares of the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.complexity",
        allow_abbrev=False,
        description="Time layers as they grow.",
        epilog="example: python -m benchmarks.complexity --plot docs/complexity.png --out X.json",
    )
    parser.add_argument(
        "--rounds", type=positive, default=9, help="medians are over these (default %(default)s)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw time by size into it")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON object there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
