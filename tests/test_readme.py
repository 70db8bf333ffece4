"""The README's commands do what it says. Only the training is cut to seconds, and the ports are free ones."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.serving import free_ports, wait_until_ready

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def code_blocks(heading: str) -> list[str]:
    """The fenced blocks of one section."""
    section = README.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"```\w*\n(.*?)```", section, flags=re.DOTALL)


def environment() -> dict[str, str]:
    """With this interpreter as `python`, and this repository importable."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}


def run(command: str, folder: Path, **options) -> subprocess.CompletedProcess[str]:
    """Run a shell command."""
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment(), capture_output=True, text=True, **options
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def write_corpus(folder: Path) -> None:
    for split, numbers in (("train", range(300)), ("dev", range(300, 308))):
        for language, text in (("ko", "오늘은 금요일 {} 입니다\n"), ("en", "Today is Friday {}.\n")):
            lines = [text.format(number) for number in numbers]
            (folder / f"{split}.{language}").write_text("".join(lines), encoding="utf-8")


COMMANDS, PROGRAM, ASYNC_PROGRAM, *_ = code_blocks("Train, export, serve, call")
TRAIN, EXPORT, SERVE, CALL = COMMANDS.strip().splitlines()


def serve_and_call(folder: Path, call: str) -> str:
    """Starts the server, runs the call and both programs against it, and returns what the call prints."""
    port, metrics_port = free_ports(2)
    serve = SERVE.replace("50051", str(port)).replace("9464", str(metrics_port))
    server = subprocess.Popen(["bash", "-c", f"exec {serve}"], cwd=folder, env=environment())
    try:
        wait_until_ready(server, f"http://127.0.0.1:{metrics_port}/readyz")
        answer = run(f"{call} --address localhost:{port}", folder, timeout=60).stdout
        printed = []
        for text in (PROGRAM, ASYNC_PROGRAM):
            (folder / "program.py").write_text(text.replace("50051", str(port)), encoding="utf-8")
            printed.append(run("python program.py", folder, timeout=60).stdout.splitlines())
        assert float(printed[0][0].split()[-1]) > 0
        assert len(ast.literal_eval(printed[1][0])) == 2
        return answer
    finally:
        server.terminate()
        assert server.wait(60) == 0


def test_serve_and_call(trained_run, tmp_path):
    shutil.copytree(trained_run.bundle, tmp_path / EXPORT.split()[4])
    call = CALL.replace("오늘은 금요일 입니다", "하나 둘 셋")  # of the words that the model has learned
    assert serve_and_call(tmp_path, call) == "one two three\n"


@pytest.mark.slow  # new to the test above are only the words of two commands
def test_train_export_serve_and_call(tmp_path):
    write_corpus(tmp_path)
    run(f"{TRAIN} --max-steps 3", tmp_path, timeout=300)
    run(EXPORT, tmp_path, timeout=600)
    assert serve_and_call(tmp_path, f"{CALL} --max-new-tokens 5").count("\n") == 1


def make_demo(folder: Path, flags: str = "") -> str:
    variables = f"VENV={Path(sys.executable).parent.parent} RUN={folder}/run BUNDLE={folder}/bundle"
    return run(f"make {flags} --no-print-directory -C {ROOT} demo {variables}", folder, timeout=1200).stdout


@pytest.mark.slow  # a whole training
@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_demo_reaches_its_score_in_every_precision_and_repeats_no_finished_step(tmp_path):
    first = make_demo(tmp_path)
    assert "training train" in first
    # Tables for people go to standard error, results to standard output.
    assert "오늘은 금요일 입니다" not in first
    scores = [float(score) for score in re.findall(r'"bleu": ([0-9.]+)', first.splitlines()[-1])]
    assert min(scores) >= 90
    assert max(scores) - min(scores) <= 1.0
    second = make_demo(tmp_path, "--dry-run")
    assert "benchmarks.demo" in second
    assert "training train" not in second
    assert "-m export" not in second


def test_make_lists_every_target_that_the_readme_names():
    listed = run(f"make --no-print-directory -C {ROOT}", ROOT).stdout
    for target in set(re.findall(r"`?make ([a-z]+)", README)):
        assert re.search(rf"^  make {target} ", listed, flags=re.MULTILINE), target
