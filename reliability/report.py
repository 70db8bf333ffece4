"""Formats the reliability benchmark's result as a table, for the terminal and for `docs/reliability.md`."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.report import markdown as markdown_table
from reliability.place import Bar, Figures, at_most


def failed_bar() -> Bar:
    """Returns the bar of a part that could not be completed."""
    return at_most("the part could not be run", 1, 0)


def markdown(report: Figures) -> str:
    """Returns all bars as a Markdown table, below a description of the environment."""
    hardware = report["hardware"]
    versions = hardware["versions"]
    head = (
        f"{hardware['date']}, {hardware['cpu']}, {hardware['cpus_usable']} cores, Python "
        f"{hardware['python']}, ONNX Runtime {versions.get('onnxruntime', 'for GPUs')}, gRPC "
        f"{versions['grpcio']}, commit {hardware['commit']}, `{report['command']}`:"
    )
    table = markdown_table(("part", "", "measured", "bar", "met"), map(_cells, report["bars"]), num_left=2)
    return "\n".join([head, "", table, *(f"\nNot run: {reason}." for reason in _not_run(report))]) + "\n"


def _not_run(report: Figures) -> Iterator[str]:
    """Yields what was not run and why: a part that was skipped, or something that a part did without."""
    for part, figures in report.items():
        if isinstance(figures, dict):
            if "skipped" in figures:
                yield f"{part}: {figures['skipped']}"
            yield from (f"{part}, {name}: {reason}" for name, reason in figures.get("missing", {}).items())


def _cells(bar: Figures) -> tuple[str, str, str, str, str]:
    sign = "≤" if bar["is"] == "most" else "≥"
    met = "yes" if bar["met"] else "**no**"
    return bar["part"], bar["name"], f"{bar['value']:.4g}", f"{sign} {bar['bar']:g}", met
