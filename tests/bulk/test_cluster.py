"""Bulk work on a Ray cluster of three nodes, which are processes of this machine."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from seq2seq_serve.bulk.__main__ import main
from tests.bulk.test_main import FLAGS, files, texts_of

pytestmark = pytest.mark.slow

# In a process of its own, because Ray leaves threads and warnings behind.
SCRIPT = """
import sys, threading, time
from pathlib import Path
from ray.cluster_utils import Cluster
from seq2seq_serve.bulk.__main__ import main

out, *arguments = sys.argv[1:]
cluster = Cluster()
nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
cluster.wait_for_nodes()

def kill():
    while len(list(Path(out).glob("*.txt"))) < 5:
        time.sleep(0.01)
    cluster.remove_node(nodes[-1], allow_graceful=False)

assert main([*arguments, "--output", out + "-wrong", "--ray", cluster.address, "--beam-size", "99"]) == 2
killing = threading.Thread(target=kill)
killing.start()
code = main([*arguments, "--output", out, "--ray", cluster.address])
killing.join()
sys.exit(code)
"""


def test_a_cluster_that_loses_a_node_writes_every_line_once(bundle_path, tmp_path):
    pytest.importorskip("ray", reason="pip install -e '.[dev-deploy]'")
    (tmp_path / "a.txt").write_text("".join(f"{text}\n" for text in texts_of(3000)))
    arguments = [str(bundle_path), "--input", str(tmp_path / "a.txt"), "--shard-lines", "50", *FLAGS]
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "out"), *arguments]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search("^error: .*--beam-size", done.stderr, re.MULTILINE)
    assert re.search("a worker was lost: .*; another one takes over its shards", done.stderr)
    assert "3000 lines in" in done.stdout
    assert main([*arguments, "--output", str(tmp_path / "whole")]) == 0
    found = files(tmp_path / "out")  # the killed node may have left a temporary file
    assert {name: found[name] for name in found if not name.endswith(".tmp")} == files(tmp_path / "whole")
