"""Parses the commands of the benchmarks, draws their tables and bars, and writes their results."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_FLAT = 2  # levels of an object that stay in a line


def command(name: str, doc: str | None, examples: str) -> argparse.ArgumentParser:
    """Returns the parser of `python -m benchmarks.NAME`, with the flag --out.

    Args:
        name: Module below `benchmarks`.
        doc: Docstring of the module; its first line describes the command.
        examples: Flags of a call, one example a line.
    """
    prog = f"python -m benchmarks.{name}"
    parser = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        description=(doc or "").partition("\n")[0],
        epilog="examples:\n" + "\n".join(f"  {prog} {line}" for line in examples.splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON object to this file")
    return parser


def publish(report: dict[str, Any], out: Path | None) -> None:
    """Print the report as the last line of standard output, and write it to a file, if one is given."""
    if out:
        write(report, out)
    print(json.dumps(report, ensure_ascii=False), flush=True)


def write(report: dict[str, Any], out: Path) -> None:
    """Replace a file of JSON atomically, so that an interrupted process leaves a complete one."""
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f"{out.name}.part")
    part.write_text(as_lines(report) + "\n", encoding="utf-8")
    part.replace(out)


def as_lines(value: Any, indent: str = "") -> str:
    """Returns JSON with a line for each object or list of at most two levels."""
    if _depth(value) <= _FLAT:
        return json.dumps(value, ensure_ascii=False)
    inner = indent + " "
    if isinstance(value, dict):
        parts = [f"{inner}{json.dumps(str(key))}: {as_lines(one, inner)}" for key, one in value.items()]
        return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + as_lines(one, inner) for one in value) + f"\n{indent}]"


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


def median(values: Iterable[float]) -> float:
    """Returns the median as a float."""
    return float(statistics.median(values))


def bar(name: str, value: float | None, limit: float, *, is_least: bool = True) -> dict[str, Any]:
    """Returns a measured value beside its bar; without a value, `met` is None.

    Args:
        name: What was measured.
        value: The measured value.
        limit: The bar.
        is_least: Whether the value must be at least the limit; otherwise, at most.
    """
    met = None if value is None else value >= limit if is_least else value <= limit
    return {"name": name, "value": value, "bar": limit, "is": "least" if is_least else "most", "met": met}


def markdown(columns: Sequence[str], rows: Iterable[Sequence[object]], num_left: int = 1) -> str:
    """Returns a Markdown table; the first `num_left` columns are on the left, the others on the right."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * num_left + "--:|" * (len(columns) - num_left)]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines)
