"""A command whose packages are missing says in one line how to install them."""

import subprocess
import sys
from pathlib import Path

import pytest

from seq2seq_serve.bundle.extras import needs_extra

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("arguments", "missing", "extra"),
    [
        ("export huggingface a b", "safetensors", "huggingface,cpu"),
        ("export huggingface a b", "torch", "huggingface,cpu"),
        ("export a b", "pydantic", "export,cpu"),
        ("server a", "grpc", "server,cpu"),
        ("server a", "prometheus_client", "server,cpu"),
    ],
)
def test_a_missing_package_is_one_line(tmp_path, arguments, missing, extra):
    (tmp_path / f"{missing}.py").write_text(f"raise ModuleNotFoundError('it is missing', name={missing!r})")
    done = subprocess.run(
        [sys.executable, "-m", *arguments.split()],
        cwd=ROOT,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1, done.stderr
    line = done.stderr
    assert line.startswith(
        f"error: {missing} is missing: in a clone of seq2seq-serve, pip install -e '.[{extra}]'"
    )


def test_a_missing_part_of_ours_is_a_bug():
    with pytest.raises(ModuleNotFoundError, match="nothing"), needs_extra("server"):
        import seq2seq_serve.bundle.nothing  # noqa: F401
