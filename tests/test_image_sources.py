"""Everything that the Dockerfile copies is there, and is let into the build."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def copied() -> list[str]:
    """The sources of COPY that come from the clone, for either runtime."""
    lines = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    sources = [source for line in lines for source in line.split()]
    return [each.replace("${RUNTIME}", runtime) for each in sources for runtime in ("cpu", "gpu")]


def is_let_in(path: str) -> bool:
    """Whether `.dockerignore` lets a path in; the last pattern for it or a folder above it decides."""
    above = [str(folder) for folder in Path(path).parents][:-1]
    is_ignored = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if line and not line.startswith("#") and any(fnmatch(one, pattern) for one in (path, *above)):
            is_ignored = not line.startswith("!")
    return not is_ignored


@pytest.mark.parametrize("source", dict.fromkeys(copied()))
def test_what_the_image_copies_is_there_and_let_in(source):
    assert (ROOT / source).exists()
    assert is_let_in(source)


def test_what_the_image_does_not_need_is_kept_out():
    assert not is_let_in("tests/test_image_sources.py")
    assert not is_let_in("benchmarks")
    assert {"bulk", "kernels", "server", "pyproject.toml"} <= set(copied())
