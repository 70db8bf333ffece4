"""The benchmark of bulk work on a small bundle."""

import json
import subprocess
import sys


def test_bulk_work_writes_what_the_engine_answers(bundle_path, tmp_path):
    (tmp_path / "texts.txt").write_text("하나 둘\n셋\n")
    command = [sys.executable, "-m", "benchmarks.bulk", bundle_path, "--input", tmp_path / "texts.txt"]
    flags = ["--lines", "4", "--shard-lines", "2", "--rounds", "1", "--threads", "1"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["different_lines"] == 0
    assert report["contenders"]["bulk"]["to_direct"] > 0
