"""Plots the answers of `benchmarks.scale`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def save_plot(report: dict[str, Any], path: Path) -> None:
    """Plot three answers: what a server takes, one lost server, a sudden rise.

    The path's suffix sets the image format.
    """
    figure = Figure(figsize=(15, 4.8), layout="constrained")
    sizes, lost, rise = figure.subplots(1, 3)
    for policy in dict.fromkeys(row["policy"] for row in report["by_size"]):
        rows = [row for row in report["by_size"] if row["policy"] == policy]
        sizes.plot([row["size"] for row in rows], [row["rate"] for row in rows], marker="o", label=policy)
    sizes.axhline(report["by_size"][0]["capacity"], linestyle=":", color="gray", label="capacity")
    sizes.set(xlabel="servers", ylabel="requests/s a server", ylim=(0, None))
    objective = report["question"]["latency_seconds"]
    sizes.set_title(f"what a server takes at p99 ≤ {objective:g} s")
    for size in dict.fromkeys(row["size"] for row in report["one_lost"]):
        rows = [row for row in report["one_lost"] if row["size"] == size]
        seconds = [row["latency_p99_during"] for row in rows]
        lost.plot([100 * row["load"] for row in rows], seconds, marker="o", label=f"one of {size}")
    lost.set(xlabel="load before, % of the capacity", title="the minute after one server is lost")
    for row in report["rise"]:
        label = (
            f"after {row['ready_seconds']:g} + {row['learn_seconds']:g} s, queue {row['max_waiting']}: "
            f"{row['refused']:.0%} refused"
        )
        rise.plot(*zip(*row["latency_p99_by_time"], strict=True), label=label)
    rise.set(xlabel="s; at 0 the rate triples", title="a sudden rise")
    for panel in (lost, rise):
        panel.axhline(objective, linestyle=":", color="gray")
        panel.set(yscale="log", ylabel="p99 latency, s")
    rise.set_ylim(top=300)  # room for the legend
    for panel in (sizes, lost, rise):
        panel.grid(which="both", alpha=0.3)
        panel.legend(fontsize=8)
    figure.suptitle(f"simulated with times of one core a server, {report['times_of']}")
    figure.savefig(path, dpi=100)
