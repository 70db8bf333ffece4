"""The comparison with other programs, on a small model."""

import importlib.util

import pytest

from benchmarks.peers import __main__ as peers
from benchmarks.peers.__main__ import compare
from benchmarks.peers.report import speed_table
from benchmarks.peers.work import Search, Suite, Work, random_model
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.training.config import EOS_ID, TransformerConfig

CONFIG = TransformerConfig(300, 32, 64, 4, 1, 1, max_source_length=16, max_target_length=16)


def test_lone_requests_run_with_an_instance_for_each_core():
    """An engine got as many slots as all requests have rows, fewer than its instances need."""
    works = (
        Work("greedy x 1", [[5, 6, EOS_ID]], Search(1, 8), is_exact=True),
        Work("beam 5 x 1", [[5, 6, EOS_ID]], Search(5, 8), is_exact=True),
    )
    suite = Suite("small", random_model(CONFIG), works)
    report = compare([suite], [Precision.FP32, Precision.INT8], 1, [(1, 2), (2, 1)])
    for found in report["equal_targets"].values():
        assert {count for name, count in found["equal"].items() if "fp32" in name} == {1}
    assert [row["work"] for row in report["results"]] == [work.name for work in works for _ in range(2)]
    for row in report["results"]:
        assert row["tokens_per_second"] > 0
        assert row["floor_ms"] > 0
        assert row["peers"]["transformers"]["ratio"] > 0
    assert speed_table(report["results"]).count("\n") == 5


def test_missing_peers_are_named_before_anything_is_measured(monkeypatch, capsys):
    """The note came after the machine was measured and a model exported."""

    def measure(_):
        raise RuntimeError("measured")

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(peers, "measure_machine", measure)
    with pytest.raises(RuntimeError, match="measured"):
        compare([], [Precision.FP32], 1, [(1, 2)])
    notes = capsys.readouterr().err
    assert all(f"{name} is not installed" in notes for name in ("ctranslate2", "transformers"))
