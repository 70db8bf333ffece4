"""Installs OpenAI's client for JavaScript, as npm has it."""

import shutil
import subprocess
from pathlib import Path

import pytest

_SECONDS = 300


def install(folder: Path, program: Path, *packages: str) -> None:
    """Puts packages and a program that uses them into a folder; skips the test where npm cannot."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not installed")
    (folder / "package.json").write_text("{}")
    shutil.copy(program, folder)
    installed = subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", *packages],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if installed.returncode:
        pytest.skip(f"npm cannot install OpenAI's client: {installed.stderr[-500:]}")
