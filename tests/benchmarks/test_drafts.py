"""The benchmark of drafts on a small bundle."""

import json
import subprocess
import sys


def test_the_drafted_and_the_accepted_tokens_are_printed(bundle_path, tmp_path):
    (tmp_path / "texts.txt").write_text("하나 둘 하나 둘\n")
    command = [sys.executable, "-m", "benchmarks.drafts", bundle_path, tmp_path / "texts.txt"]
    flags = ["--threads", "1", "--pairs", "1", "--warm-up", "1"]
    # Apart, because all graphs of a process that serves share its threads
    done = subprocess.run([*command, *flags], capture_output=True, text=True, check=True)
    [row] = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert 0 <= row["accepted_tokens"] <= row["drafted_tokens"]
