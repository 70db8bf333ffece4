"""What the image installs is pinned, and is what pyproject.toml asks for."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("runtime", ["cpu", "gpu"])
def test_the_image_installs_what_the_server_needs_pinned_and_hashed(runtime):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    text = (ROOT / "deploy" / f"requirements-{runtime}.txt").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    pinned: dict[str, list[str]] = {}
    for line in lines:
        name, version = re.match(r"(\S+)==([^\s;]+)", line).groups()
        pinned.setdefault(canonicalize_name(name), []).append(version)
        assert " --hash=sha256:" in line, name
    for wanted in map(
        Requirement, [*project["dependencies"], *extras["server"], *extras["tracing"], *extras[runtime]]
    ):
        versions = pinned[canonicalize_name(wanted.name)]
        assert all(wanted.specifier.contains(version) for version in versions), (wanted, versions)
