"""A command whose packages are missing says in one line how to install them; all have a version."""

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from seq2seq_serve import __version__
from seq2seq_serve.commands import needs_extra

ROOT = Path(__file__).parent.parent


def run(arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments.split()],
        cwd=ROOT,
        env={"PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "missing", "extra"),
    [
        ("export huggingface a b", "torch", "huggingface,cpu"),
        # slow: torch is imported before it is found out
        pytest.param("export huggingface a b", "safetensors", "huggingface,cpu", marks=pytest.mark.slow),
        ("export a b", "pydantic", "export,cpu"),
        ("server a", "grpc", "server,cpu"),
        ("server a", "prometheus_client", "server,cpu"),
        ("bulk a --input b --output c", "onnxruntime", "server,cpu"),
        ("training train demo --out a", "torch", "training"),
    ],
)
def test_a_missing_package_is_one_line(tmp_path, arguments, missing, extra):
    (tmp_path / f"{missing}.py").write_text(f"raise ModuleNotFoundError('it is missing', name={missing!r})")
    done = run(arguments, tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"error: {missing} is missing: pip install -e '.[{extra}]'")


@pytest.mark.parametrize("command", ["server", "export", "training", "bulk"])
def test_a_version_needs_no_other_package(tmp_path, command):
    for missing in ("grpc", "torch"):
        (tmp_path / f"{missing}.py").write_text(f"raise ModuleNotFoundError(name={missing!r})")
    assert run(f"{command} --version", tmp_path).stdout == f"seq2seq-serve {__version__}\n"


def test_a_missing_part_of_ours_is_a_bug():
    with pytest.raises(ModuleNotFoundError, match="nothing"), needs_extra("server"):
        import seq2seq_serve.nothing  # noqa: F401


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_refuses_another_python_than_that_of_its_environment(tmp_path):
    """It was ignored."""
    version = "{}.{}".format(*sys.version_info)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "other").write_text("#!/bin/sh\necho 3.1\n")
    (tmp_path / "other").chmod(0o755)

    def make(*arguments):
        command = ["make", "--dry-run", f"VENV={tmp_path}", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    expected = (
        f"{tmp_path} has Python {version}, and {tmp_path}/other is 3.1: remove {tmp_path}, or name another"
    )
    assert expected in make("lint", f"PYTHON={tmp_path}/other").stderr
    for arguments in (["lint"], ["lint", f"PYTHON={sys.executable}"], ["clean", f"PYTHON={tmp_path}/other"]):
        assert make(*arguments).returncode == 0


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_resumes_only_a_run_that_was_stopped(tmp_path):
    """The first training of the demo began with a warning about its own flag."""
    command = ["make", "--dry-run", f"RUN={tmp_path}", f"{tmp_path}/summary.json"]
    assert " --resume" not in subprocess.check_output(command, cwd=ROOT, text=True)
    (tmp_path / "config.json").touch()
    assert " --resume" in subprocess.check_output(command, cwd=ROOT, text=True)


def test_help_names_the_command_as_it_was_called(monkeypatch, capsys):
    from seq2seq_serve.client.__main__ import main

    for called, name in (("/venv/bin/seq2seq", "seq2seq"), ("/clone/client/__main__.py", "python -m client")):
        monkeypatch.setattr(sys, "argv", [called])
        with pytest.raises(SystemExit):
            main(["score", "--help"])
        assert f'example: {name} score "' in capsys.readouterr().out


@pytest.mark.parametrize("name", ["bulk", "client", "export", "server", "training"])
def test_every_command_has_help(name, monkeypatch, capsys):
    """A `%` in the help of an option was taken for a format, and `translate --help` was a traceback."""
    main = importlib.import_module(f"seq2seq_serve.{name}.__main__").main
    monkeypatch.setattr(sys, "argv", [f"/clone/{name}/__main__.py"])
    waiting, seen = [list[str]()], set[str]()  # a choice of an argument has the same help
    while waiting:
        command = waiting.pop()
        with pytest.raises(SystemExit) as ended:
            main([*command, "--help"])
        text = capsys.readouterr().out
        assert ended.value.code == 0
        assert text.startswith("usage: ")
        commands = re.search(r"^  \{([\w,-]+)\}", text, re.MULTILINE)
        if commands and text not in seen:
            seen.add(text)
            waiting += [[*command, one] for one in commands[1].split(",")]
