"""An installation without the compiled operators says so, with the cause and the remedy, once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = "bulk", "bundle", "client", "documents", "drawing", "protos", "seq2seq_serve", "server"


@pytest.fixture
def run(tmp_path):
    """Run Python in a clone in which nothing was compiled: its output and errors, on lines."""
    for part in PARTS:
        (tmp_path / part).symlink_to(ROOT / part)
    (tmp_path / "kernels").mkdir()
    for path in (ROOT / "kernels").iterdir():
        if path.suffix in (".py", ".h", ".cpp", ".ptx"):
            (tmp_path / "kernels" / path.name).symlink_to(path)

    def run(*arguments: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(tmp_path), "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return (done.stdout + done.stderr).splitlines()

    return run


def test_a_server_and_a_program_warn_once_and_doctor_describes(run, bundle_path, tmp_path):
    """It was a word in a line of information, and the processes of instances had lines of their own."""
    program = "import sys; from seq2seq_serve import load; load(sys.argv[1], instances=2, threads=2).close()"
    (tmp_path / "in.txt").write_text("나\n", encoding="utf-8")
    bulk = "-m", "bulk", str(bundle_path), "--input", "in.txt", "--output", "out", "--provider", "cpu"
    for arguments in (
        ("-m", "server", str(bundle_path), "--provider", "cpu", "--check"),
        ("-c", program, str(bundle_path)),
        bulk,
    ):
        (line,) = [line for line in run(*arguments) if "several times slower" in line]
        assert f"{bundle_path} runs on cpu without the compiled operators" in line
        assert "without a C++ compiler (g++): install this package again" in line
        assert "WARNING" in line or arguments[:2] != ("-m", "server")
    described = " ".join(" ".join(run("-m", "client", "doctor")).split())
    assert described.count("lacks them, as after an installation without a C++ compiler") == 2
