"""Formats the results of `benchmarks.complexity` as a table for the README, and as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.report import markdown

_HEAD = ("layer", "operations", "sequential", "path", "layers", "n", "d", "k or r", "ms at n = 1024, d = 256")


def table(report: dict[str, Any]) -> str:
    """Returns a Markdown table.

    An exponent cell has the counted exponent, then the measured ones: over all sizes, and of the two largest.
    """
    rows = []
    for layer in report["layers"]:
        growth = layer["growth"]
        lengths = growth["n"]
        rows.append(
            (
                layer["name"],
                *(f"O({layer[key]})" for key in ("operations", "sequential", "path")),
                layer["layers_to_cross_65_positions"],
                *(_exponents(growth.get(axis)) for axis in ("n", "d")),
                _exponents(growth.get("k") or growth.get("r")),
                f"{1e3 * lengths['seconds'][lengths['sizes'].index(1024)]:.2f}",
            )
        )
    return markdown(_HEAD, rows, num_left=4)


def _exponents(growth: dict[str, Any] | None) -> str:
    if growth is None:
        return "–"
    return (
        f"{growth['counted_exponent']:.2f} → "
        f"{growth['measured_exponent']:.2f}, {growth['measured_exponent_at_the_end']:.2f}"
    )


def save_plot(report: dict[str, Any], path: Path) -> None:
    """Plot milliseconds over n, d and k or r, all logarithmic.

    A dotted line is the prediction from the multiply-adds alone.
    """
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    titles = ("positions n, at d = 256", "width of the model d, at n = 1024", "k or r, at n = 2048, d = 256")
    for panel, axes, title in zip(panels, (("n",), ("d",), ("k", "r")), titles, strict=True):
        sizes = set[int]()
        for i, layer in enumerate(report["layers"]):
            for axis in axes:
                if axis in layer["growth"]:
                    grown = layer["growth"][axis]
                    sizes.update(grown["sizes"])
                    color, counts = f"C{i}", grown["multiply_adds"]
                    milliseconds = [1e3 * seconds for seconds in grown["seconds"]]
                    predicted = [milliseconds[-1] * count / counts[-1] for count in counts]
                    panel.plot(grown["sizes"], milliseconds, marker="o", color=color, label=layer["name"])
                    panel.plot(grown["sizes"], predicted, ":", color=color)
        panel.set(xlabel=title, xscale="log", yscale="log")
        panel.set_xticks(sorted(sizes), [str(size) for size in sorted(sizes)], minor=False)
        panel.set_xticks([], minor=True)
        panel.grid(which="both", alpha=0.3)
    panels[0].set_ylabel("ms")
    panels[0].legend()
    hardware = report["hardware"]
    figure.suptitle(f"one layer, one sentence, one core of {hardware['cpu']}, {hardware['commit']}")
    figure.savefig(path, dpi=100)
