"""The gallery trains what is missing, names the log of what failed, and shows each picture that it draws."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.serving import free_ports
from seq2seq_serve.training.run import RunFolder

ROOT = Path(__file__).parents[2]
# Steps of a long warm-up: steps at the full rate would leave weights that float32 rounds coarsely.
SHORT = "--max-steps 2 --set eval_interval_steps=2 warmup_steps=1000 batch_tokens=400"


def make_gallery(folder: Path, interpreter: str) -> subprocess.CompletedProcess[str]:
    """Run the script with an interpreter of its own."""
    program = folder.parent / "python"
    program.write_text(f'#!/bin/sh\nexec {interpreter} "$@"\n')
    program.chmod(0o755)
    ports = dict(zip(("PORT", "METRICS_PORT"), map(str, free_ports(2)), strict=True))
    return subprocess.run(
        ["sh", "benchmarks/gallery.sh", str(folder)],
        cwd=ROOT,
        env=os.environ | ports | {"PYTHON": str(program), "FLAGS": SHORT},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow  # eight trainings and exports
def test_every_model_is_trained_once_and_the_page_shows_all_of_them(tmp_path):
    folder, interpreter = tmp_path / "gallery", f"{sys.executable} -m tests.benchmarks.few_examples"
    done = make_gallery(folder, interpreter)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{folder}/gallery.md\n"
    page = (folder / "gallery.md").read_text()
    pictures = re.findall(r"!\[.+\]\((.+)\)", page)
    assert len(pictures) == 8
    for picture in pictures:
        Image.open(folder / picture).verify()
    hard, soft = (RunFolder(folder / "runs" / f"captioner-{name}").read_config() for name in ("hard", "soft"))
    assert "steps: 2;" in hard.parent
    assert soft.corpus_sha256 in hard.parent

    again = make_gallery(folder, interpreter)
    assert again.returncode == 0, again.stderr
    assert "steps" not in again.stderr
    assert (folder / "gallery.md").read_text() == page


def test_a_failed_training_names_its_log_and_nothing_is_exported_or_served(tmp_path):
    folder = tmp_path / "gallery"
    done = make_gallery(folder, "false")
    assert done.returncode != 0
    assert done.stdout == ""
    assert f"failed; its log is {folder}/runs/captioner-soft.log\n" in done.stderr
    assert not (folder / "bundles").exists()
