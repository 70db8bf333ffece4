"""Runs the Python blocks of a page in order, and writes what each prints into the text block below it.

So that the numbers of a page are those of its code. From the root:

python -m docs.page docs/attention.md
python -m docs.page docs/attention.md --check
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n(\n```text\n.*?```\n)?", flags=re.DOTALL)


def rendered(page: str) -> str:
    """The page with the output of each Python block below it; the blocks share their names.

    Raises:
        Exception: Whatever a block raises.
    """
    names: dict[str, Any] = {}

    def run(block: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(block["code"], names)
        output = f"\n```text\n{printed.getvalue()}```\n" if printed.getvalue() else ""
        return f"```python\n{block['code']}```\n{output}"

    return _BLOCK.sub(run, page)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page anew, or with `--check` say whether that would change it: 1 if so."""
    parser = argparse.ArgumentParser(prog="python -m docs.page", description=__doc__.partition("\n")[0])
    parser.add_argument("page", type=Path, help="a Markdown file")
    parser.add_argument("--check", action="store_true", help="only fail if an output is out of date")
    options = parser.parse_args(arguments)
    before = options.page.read_text(encoding="utf-8")
    after = rendered(before)
    if not options.check:
        options.page.write_text(after, encoding="utf-8")
        return 0
    lines = itertools.zip_longest(before.splitlines(), after.splitlines(), fillvalue="")
    for number, (old, new) in enumerate(lines, start=1):
        if old != new:
            sys.stderr.write(f"{options.page}:{number}: the page has {old!r}, and the code prints {new!r}\n")
            break
    return int(before != after)


if __name__ == "__main__":
    sys.exit(main())
