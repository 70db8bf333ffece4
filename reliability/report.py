"""Formats the reliability benchmark's result as a table, for the terminal and for `docs/reliability.md`."""

from __future__ import annotations

from collections.abc import Iterator

from reliability.place import Bar, Figures, at_most


def bar_record(part: str, bar: Bar) -> Figures:
    """Returns a bar as an entry of the JSON object."""
    return {
        "part": part,
        "name": bar.name,
        "value": bar.value,
        "bar": bar.bar,
        "is": "most" if bar.is_most else "least",
        "met": bar.is_met,
        "timed": bar.is_timed,
    }


def failed_bar() -> Bar:
    """Returns the bar of a part that could not be completed."""
    return at_most("the part could not be run", 1, 0)


def markdown(report: Figures) -> str:
    """Returns all bars as a Markdown table, below a description of the environment."""
    hardware = report["hardware"]
    versions = hardware["versions"]
    lines = [
        f"{hardware['date']}, {hardware['cpu']}, {hardware['cpus_usable']} cores, Python "
        f"{hardware['python']}, ONNX Runtime {versions.get('onnxruntime', 'for GPUs')}, gRPC "
        f"{versions['grpcio']}, commit {hardware['commit']}, `{report['command']}`:",
        "",
        "| part | | measured | bar | met |",
        "|---|---|--:|--:|---|",
        *(f"| {' | '.join(_cells(bar))} |" for bar in report["bars"]),
    ]
    return "\n".join([*lines, *(f"\nNot run: {reason}." for reason in _not_run(report))]) + "\n"


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
