"""The benchmark of calls beside bulk work on a small bundle."""

import json
import subprocess
import sys


def test_calls_are_measured_alone_and_beside_each_kind_of_bulk_work(bundle_path, tmp_path):
    sources = tmp_path / "sources.txt"
    sources.write_text("하나의 둘이서\n\n하나의\n")
    command = [
        sys.executable,
        "-m",
        "benchmarks.beside",
        bundle_path,
        sources,
        "--rounds",
        "1",
        "--seconds",
        "0.5",
    ]
    done = subprocess.run([*command, "--items", "30"], capture_output=True, text=True, check=True)
    kinds = json.loads(done.stdout.splitlines()[-1])["kinds"]
    assert list(kinds) == ["alone", "translate_many", "joined batches", "plain batches"]
    assert kinds["alone"]["texts_per_second"] == 0
    for name, figures in kinds.items():
        assert 0 < figures["unary_p50"] <= figures["unary_p99"]
        assert 0 < figures["first_piece_p50"] <= figures["first_piece_p99"]
        assert (figures["texts_per_second"] > 0) == (name != "alone")
