"""Plots the results of `benchmarks.load`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def save_plot(report: dict[str, Any], path: Path) -> None:
    """Plot latency, time to first token and gaps over the arrival rate.

    The path's suffix sets the image format.
    """
    rows = report["sweep"]
    rates = [row["requests_per_second"] for row in rows]
    figure = Figure(figsize=(13, 4), layout="constrained")
    panels = figure.subplots(1, 3)
    for panel, (name, title) in zip(
        panels,
        (
            ("latency", "whole answer"),
            ("first_token", "first token (greedy, sampling)"),
            ("inter_token", "between tokens (greedy, sampling)"),
        ),
        strict=True,
    ):
        for q, style in (("p50", "--"), ("p99", "-")):
            panel.plot(rates, [1e3 * row[f"{name}_{q}"] for row in rows], style, marker="o", label=q)
            if name != "latency":
                ideal = [1e3 * row[f"ideal_{name}_{q}"] for row in rows]
                panel.plot(rates, ideal, style, color="gray", label=f"{q} of an ideal scheduler")
        panel.set_title(title)
        panel.set_xlabel("requests/s")
        panel.set_ylabel("ms")
        panel.set_yscale("log")
        panel.grid(which="both", alpha=0.3)
    if peer := report["against_ctranslate2"]:
        ratios = peer["ctranslate2_latency_p99_by_rate_ratio"]
        panels[0].plot(
            [peer["requests_per_second"] / float(ratio) for ratio in ratios],
            [1e3 * p99 for p99 in ratios.values()],
            "-",
            marker="x",
            label="p99 of CTranslate2, without sampling",
        )
    for panel in panels:
        panel.legend(loc="upper left")
    hardware = report["hardware"]
    figure.suptitle(f"{hardware['cpu']}, {len(report['server_cores'])} cores, {hardware['commit']}")
    figure.savefig(path, dpi=120)
