"""The comparison with other programs, on a small model."""

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
