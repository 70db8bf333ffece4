"""What `seq2seq doctor` says of a machine, an installation and a bundle."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from seq2seq_serve import __version__, kernels
from seq2seq_serve.client.__main__ import main
from seq2seq_serve.export.draft import cut_bundle

ROOT = Path(__file__).parent.parent


@pytest.fixture
def run(capsys):
    """Run the command: exit code, and the lines of its output by label; a label may have several."""

    def run(*arguments: str) -> tuple[int, dict[str, str]]:
        code = main(["doctor", *arguments])
        out, err = capsys.readouterr()
        assert err == ""
        lines = out.splitlines()
        assert len(lines) < 30, "it is one screen"
        assert max(map(len, lines)) <= 250
        rows: dict[str, str] = {}
        label = ""
        for line in lines:
            label = line[:10].strip() or label
            rows[label] = f"{rows.get(label, '')} {line[10:]}"
        return code, rows

    return run


def test_a_machine_is_described(run, monkeypatch):
    monkeypatch.delenv("SEQ2SEQ_ISA", raising=False)
    code, rows = run()
    assert code == 0
    assert f"seq2seq-serve {__version__}" in rows["version"]
    assert "onnxruntime 1." in rows["packages"]
    assert "GiB, of which models may have" in rows["memory"]
    if kernels.instructions():
        assert f"for a CPU: compiled and loaded (int8, int4: {kernels.instructions()})" in rows["operators"]
    assert rows.keys() >= {"python", "processor", "GPU", "CUDA"}
    assert "bundle" not in rows


def test_a_bundle_is_described_with_what_it_takes_here(run, bundle_path):
    code, rows = run(str(bundle_path))
    assert code == 0
    assert "transformer, version " in rows["bundle"]
    assert "runs on cpu" in rows["fp32"]
    assert "slots of" in rows["fp32"]


def test_a_bundle_for_drafts_is_described_as_one(run, bundle_path, tmp_path):
    cut_bundle(bundle_path, tmp_path / "cut", ["the quick brown fox"])
    code, rows = run(str(tmp_path / "cut"))
    assert code == 0
    assert re.search(r"only drafts for another model, as its --draft: \d+ of 300 tokens$", rows["use"])
    assert "slots of" in rows["int8"]


def test_what_cannot_be_served_here_says_why(run, bundle_path, tmp_path):
    code, rows = run(str(tmp_path))
    assert code == 1
    assert "there is no manifest.json" in rows["bundle"]
    shutil.copytree(bundle_path, tmp_path / "damaged")
    (tmp_path / "damaged" / "tokenizer.json").write_text("{}")
    code, rows = run(str(tmp_path / "damaged"))
    assert code == 1
    assert "tokenizer.json has 2 bytes" in rows["bundle"]


def test_an_installation_of_the_client_alone_names_what_is_missing(tmp_path):
    for missing in ("onnxruntime", "numpy"):
        (tmp_path / f"{missing}.py").write_text(f"raise ModuleNotFoundError(name={missing!r})")
    done = subprocess.run(
        [sys.executable, "-m", "client", "doctor", "somewhere"],
        cwd=ROOT,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "operators not known: onnxruntime is not installed (pip install" in done.stdout
