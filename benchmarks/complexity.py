"""Measures how the time of layers grows with their sizes: `python -m benchmarks.complexity`.

The layers are those of Vaswani et al. 2017, table 1 (arXiv:1706.03762): one forward pass over a sentence of
n positions in fp32, as the processor time of one thread; medians over rounds. Heads are 64 wide. The paper
counts attention alone, so it is timed without its projections, and again as the whole layer. Exponents are
slopes of the logarithms. If multiply-adds, counted in the same layers, follow the paper's order and the time
does not, the machine causes the difference. How many layers connect the ends of 65 positions is found from
gradients, with k = 3 and r = 17. Not measured: training, batches (which help a recurrent layer most), GPUs.

Shapes: B batch rows, H heads, K d_head, n positions, d width of the model, r positions of a neighbourhood.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.flags import positive
from benchmarks.hardware import describe_hardware
from benchmarks.report import command, markdown, publish
from seq2seq_serve.training.models.attention import MultiHeadAttention

D_HEAD = 64
_SERIES: dict[str, Sequence[int]] = {
    "n": (256, 512, 1024, 2048, 4096, 8192),  # at d = 256
    "d": (128, 256, 512, 1024),  # at n = 1024
    "k": (3, 5, 9, 17, 33),  # at n = 2048 and d = 256, as the next
    "r": (17, 33, 65, 129, 257),
}
_TITLES = ("positions n, at d = 256", "width of the model d, at n = 1024", "k or r, at n = 2048, d = 256")
_HEAD = ("layer", "operations", "sequential", "path", "layers", "n", "d", "k or r", "ms at n = 1024, d = 256")
_LEAST_SECONDS = 0.02  # calls are repeated and timed together for at least this time

Layer = Callable[[Tensor], Tensor]  # from (1, n, d) to (1, n, d)
Case = tuple[Callable[[int, int], Layer], int, int, int]  # what creates a layer; values of n, d, and k or r


class LayerType(NamedTuple):
    """A row of the paper's table."""

    name: str
    operations: str  # orders of all, of those one after the other, and of the longest path
    sequential: str
    path: str
    axis: str  # k or r, on which it depends, too
    width: int  # its value while another size grows
    build: Callable[[int, int], Layer]  # creates a layer of a given d and width

    def case(self, axis: str, size: int) -> Case:
        """Returns the layer at one size of a series."""
        if axis == "n":
            return self.build, size, 256, self.width
        return (self.build, 1024, size, self.width) if axis == "d" else (self.build, 2048, 256, size)


def restricted_attention(query: Tensor, key: Tensor, value: Tensor, r: int) -> Tensor:
    """Computes attention of each position to the r (odd) positions around it; all shapes are (B, H, n, K).

    Queries are processed in blocks of r; the neighbourhoods of a block span 2r - 1 positions, a window of the
    keys. So 2r - 1 scores are computed for each position, of which at most r are used: O(r n d).
    """
    B, H, n, K = query.shape
    side, num_blocks = r // 2, -(-n // r)
    excess = num_blocks * r - n
    blocks = functional.pad(query, (0, 0, 0, excess)).view(B * H, num_blocks, r, K)
    keys, values = (
        functional.pad(x, (0, 0, side, side + excess)).flatten(0, 1).unfold(1, 2 * r - 1, r).mT
        for x in (key, value)
    )  # (B * H, blocks, 2r - 1, K)
    asks, asked = torch.arange(r)[:, None], torch.arange(2 * r - 1)  # places in a block and in its window
    place = torch.arange(num_blocks)[:, None] * r + asked - side
    is_inside = (place >= 0) & (place < n)  # (blocks, 2r - 1)
    mask = (((asked - side - asks).abs() <= side) & is_inside[:, None])[None]  # (1, blocks, r, 2r - 1)
    context = functional.scaled_dot_product_attention(blocks, keys, values, attn_mask=mask)
    return context.view(B, H, num_blocks * r, K)[:, :, :n]


def _by_heads(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Layer:
    def layer(x: Tensor) -> Tensor:
        heads = x.view(*x.shape[:2], -1, min(D_HEAD, x.shape[2])).transpose(1, 2)  # (1, H, n, K)
        return attend(heads, heads, heads).transpose(1, 2).flatten(2)

    return layer


def _with_projections(d: int, _: int) -> Layer:
    attention = MultiHeadAttention(d, max(d // D_HEAD, 1))
    attention.is_fused = True  # like attention in the other rows
    return lambda x: attention(x, x, None)[0]


def _recurrent(d: int, _: int) -> Layer:
    module = nn.GRU(d, d, batch_first=True)
    return lambda x: module(x)[0]


def _convolution(d: int, width: int) -> Layer:
    module = nn.Conv1d(d, d, width, padding=width // 2)
    return lambda x: module(x.mT).mT


def _restricted(_: int, width: int) -> Layer:
    return _by_heads(partial(restricted_attention, r=width))


_attention = _by_heads(functional.scaled_dot_product_attention)
LAYER_TYPES = (
    LayerType("self-attention", "n²·d", "1", "1", "", 0, lambda *_: _attention),
    LayerType("with its projections", "n²·d + n·d²", "1", "1", "", 0, _with_projections),
    LayerType("recurrent (GRU)", "n·d²", "n", "n", "", 0, _recurrent),
    LayerType("convolutional", "k·n·d²", "1", "n/k, dilated log_k n", "k", 3, _convolution),
    LayerType("restricted self-attention", "r·n·d", "1", "n/r", "r", 65, _restricted),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, and print one JSON object as the last line."""
    parser = command("complexity", __doc__, "--plot docs/complexity.png --out X.json")
    parser.add_argument("--rounds", type=positive, default=9, help="timed rounds (default: 9)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot time by size into this file")
    options = parser.parse_args(arguments)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    axes = [(kind, axis) for kind in LAYER_TYPES for axis in ("n", "d", *kind.axis)]
    series = {(kind, axis): [kind.case(axis, size) for size in _SERIES[axis]] for kind, axis in axes}
    seconds: dict[Case, list[float]] = {case: [] for cases in series.values() for case in cases}
    shuffler = random.Random(0)
    for _ in track(range(options.rounds), "rounds", console=Console(stderr=True)):
        for case in shuffler.sample(list(seconds), len(seconds)):
            seconds[case].append(seconds_of_a_call(*case))
    layers = []
    for kind in LAYER_TYPES:
        layer: dict[str, Any] = dict(zip(("name", "operations", "sequential", "path"), kind, strict=False))
        layer["layers_to_cross_65_positions"] = layers_to_cross(kind, 65, min(kind.width, 17))
        layer["growth"] = {
            axis: growth(_SERIES[axis], [statistics.median(seconds[case]) for case in cases], cases)
            for (of_kind, axis), cases in series.items()
            if of_kind is kind
        }
        layers.append(layer)
    hardware = describe_hardware()
    sys.stderr.write(markdown(_HEAD, map(_row, layers), num_left=4) + "\n")
    if options.plot:
        title = f"one layer, one sentence, one core of {hardware['cpu']}, {hardware['commit']}"
        save_plot(layers, title, options.plot)
    report = {"benchmark": "complexity", "hardware": hardware, "rounds": options.rounds, "layers": layers}
    publish(report, options.out)
    return 0


@torch.inference_mode()
def seconds_of_a_call(build: Callable[[int, int], Layer], n: int, d: int, width: int) -> float:
    """Returns processor time, which excludes other processes on the core."""
    layer, x, num_calls = build(d, width), torch.randn(1, n, d), 0
    layer(x)
    started = time.process_time()
    while (elapsed := time.process_time() - started) < _LEAST_SECONDS or num_calls == 0:
        layer(x)
        num_calls += 1
    return elapsed / num_calls


def growth(sizes: Sequence[int], seconds: Sequence[float], cases: Sequence[Case]) -> dict[str, Any]:
    """Returns times, multiply-adds (of matrix products and convolutions) and exponents of a series."""
    counts = []
    for build, n, d, width in cases:
        with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            build(d, width)(torch.randn(1, n, d))
        counts.append(int(counter.get_total_flops()) // 2)
    return {
        "sizes": sizes,
        "seconds": seconds,
        "multiply_adds": counts,
        "counted_exponent": exponent(sizes, counts),
        "measured_exponent": exponent(sizes, seconds),
        "measured_exponent_at_the_end": exponent(sizes[-2:], seconds[-2:]),
    }


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Returns the exponent a of values ~ sizes^a, by least squares of the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def layers_to_cross(kind: LayerType, n: int, width: int, d: int = 8) -> int:
    """Returns the number of layers after which the last of n positions depends on the first one."""
    # In float64 the smallest gradients do not underflow to zero.
    x = first = torch.randn(1, n, d, dtype=torch.float64, requires_grad=True)
    default, num_layers, depends = torch.get_default_dtype(), 0, False
    torch.set_default_dtype(torch.float64)
    while not depends:
        x, num_layers = kind.build(d, width)(x), num_layers + 1
        depends = bool(torch.autograd.grad(x[0, -1].sum(), first, retain_graph=True)[0][0, 0].any())
    torch.set_default_dtype(default)
    return num_layers


def _row(layer: dict[str, Any]) -> Sequence[object]:
    """Returns a row of the table: counted exponents → measured ones, over all sizes and of the last two."""
    growth, cells = layer["growth"], []
    names = "counted_exponent", "measured_exponent", "measured_exponent_at_the_end"
    for of_axis in (growth["n"], growth["d"], growth.get("k") or growth.get("r")):
        cells.append("{:.2f} → {:.2f}, {:.2f}".format(*(of_axis[name] for name in names)) if of_axis else "–")
    orders = [f"O({layer[name]})" for name in ("operations", "sequential", "path")]
    milliseconds = 1e3 * growth["n"]["seconds"][_SERIES["n"].index(1024)]
    return (layer["name"], *orders, layer["layers_to_cross_65_positions"], *cells, f"{milliseconds:.2f}")


def save_plot(layers: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Plot milliseconds over n, d and k or r, all logarithmic; dotted: the prediction from multiply-adds."""
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for panel, axes, label in zip(panels, ("n", "d", "kr"), _TITLES, strict=True):
        ticks = set[int]()
        for i, layer in enumerate(layers):
            for grown in (layer["growth"][axis] for axis in axes if axis in layer["growth"]):
                counts, milliseconds = grown["multiply_adds"], [1e3 * seconds for seconds in grown["seconds"]]
                predicted = [milliseconds[-1] * count / counts[-1] for count in counts]
                ticks.update(grown["sizes"])
                panel.plot(grown["sizes"], milliseconds, marker="o", color=f"C{i}", label=layer["name"])
                panel.plot(grown["sizes"], predicted, ":", color=f"C{i}")
        panel.set(xlabel=label, xscale="log", yscale="log")
        panel.set_xticks(sorted(ticks), [str(tick) for tick in sorted(ticks)], minor=False)
        panel.set_xticks([], minor=True)
        panel.grid(which="both", alpha=0.3)
    panels[0].set_ylabel("ms")
    panels[0].legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    sys.exit(main())
