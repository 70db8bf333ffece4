"""Plots the answers of `benchmarks.scale`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

_LOAD = 0.8  # at which policies are compared


def save_plot(report: dict[str, Any], path: Path) -> None:
    """Plot four answers: replicas, policies, a sudden rise, one lost replica.

    The path's suffix sets the image format.
    """
    figure = Figure(figsize=(13, 9), layout="constrained")
    panels = figure.subplots(2, 2)
    _plot_sizes(panels[0][0], report)
    _plot_policies(panels[0][1], report)
    _plot_jump(panels[1][0], report)
    _plot_lost(panels[1][1], report)
    for panel in panels.flat:
        panel.grid(which="both", alpha=0.3)
        panel.legend(fontsize=8)
    hardware = report["hardware"]
    figure.suptitle(f"simulated, one core of an {hardware['cpu']} a replica, {hardware['commit']}")
    figure.savefig(path, dpi=110)


def _plot_sizes(panel: Axes, report: dict[str, Any]) -> None:
    for policy in dict.fromkeys(row["policy"] for row in report["by_size"]):
        rows = [row for row in report["by_size"] if row["policy"] == policy]
        panel.plot([row["size"] for row in rows], [row["rate"] for row in rows], marker="o", label=policy)
    panel.axhline(report["capacity"], linestyle=":", color="gray", label="capacity")
    panel.set(xscale="log", xlabel="replicas", ylabel="requests/s a replica", ylim=(0, None))
    panel.set_title(f"what a replica takes at p99 ≤ {report['servers']['latency_seconds']:g} s")


def _plot_policies(panel: Axes, report: dict[str, Any]) -> None:
    kinds = [(kind, _LOAD) for kind in dict.fromkeys(row["replicas"] for row in report["policies"])]
    policies = list(dict.fromkeys(row["policy"] for row in report["policies"]))
    height = 0.8 / len(kinds)
    for number, (kind, load) in enumerate(kinds):
        rows = {
            row["policy"]: row for row in report["policies"] if (row["replicas"], row["load"]) == (kind, load)
        }
        places = [place + number * height for place in range(len(policies))]
        values = [rows[policy]["latency_p99"] for policy in policies]
        panel.barh(places, values, height, label=kind)
    panel.set_yticks([place + 0.4 for place in range(len(policies))], policies, fontsize=8)
    panel.invert_yaxis()
    panel.axvline(report["servers"]["latency_seconds"], linestyle=":", color="gray")
    panel.set(xscale="log", xlabel="p99 latency, s", xlim=(None, 500))
    panel.set_title(f"policies, 16 replicas at {_LOAD:.0%} of their capacity")


def _plot_jump(panel: Axes, report: dict[str, Any]) -> None:
    for row in report["jump"]:
        times, values = zip(*row["latency_p99_by_time"], strict=True)
        label = (
            f"pod {row['pod_seconds']:g} s, DNS {row['learn_seconds']:g} s, queue {row['max_waiting']}: "
            f"{row['refused']:.0%} refused"
        )
        panel.plot(times, values, label=label)
    panel.axhline(report["servers"]["latency_seconds"], linestyle=":", color="gray")
    panel.set(yscale="log", xlabel="s; at 60 the rate triples", ylabel="p99 latency, s", ylim=(None, 1000))
    panel.set_title("a sudden rise, by delay and limit of the queue")


def _plot_lost(panel: Axes, report: dict[str, Any]) -> None:
    for size in dict.fromkeys(row["size"] for row in report["one_lost"]):
        rows = [row for row in report["one_lost"] if row["size"] == size]
        loads = [100 * row["load"] for row in rows]
        panel.plot(
            loads, [row["latency_p99_during"] for row in rows], marker="o", label=f"one of {size} lost"
        )
    largest = max(row["size"] for row in report["one_lost"])
    rows = [row for row in report["one_lost"] if row["size"] == largest]
    panel.plot(
        [100 * row["load"] for row in rows],
        [row["latency_p99_before"] for row in rows],
        ":",
        color="gray",
        label="none lost",
    )
    panel.axhline(report["servers"]["latency_seconds"], linestyle=":", color="gray")
    panel.set(yscale="log", xlabel="load before, % of the capacity", ylabel="p99 latency, s")
    panel.set_title("the minute after one replica is lost")
