"""The comparison of imported checkpoints, whole, at sizes that tell nothing of speed."""

import json
import os

import pytest

pytest.importorskip("ctranslate2")
pytest.importorskip("sentencepiece")

from benchmarks.floors import Machine
from benchmarks.peers import __main__ as peers
from benchmarks.peers.checkpoints import make_checkpoint
from benchmarks.peers.work import Checkpoint, imported_suite, imported_suites
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.training.config import TransformerConfig

pytestmark = pytest.mark.filterwarnings("ignore")  # of the peers' own code

SIZES = TransformerConfig(
    vocab_size=1300, d_model=32, d_ff=64, num_heads=4, num_encoder_layers=1, num_decoder_layers=1
)
EOS_IDS = {suite.model.family: suite.model.eos_id for suite in imported_suites()}


@pytest.fixture
def run_small(tmp_path, monkeypatch, capsys):
    """`main` with one small checkpoint; the cores of the process are set back."""
    cores = os.sched_getaffinity(0)
    machine = Machine(1e10, {Precision.FP32: 1e11, Precision.INT8: 4e11})
    monkeypatch.setattr(peers, "measure_machine", lambda _: machine)
    monkeypatch.setattr(peers, "_LEAST_SECONDS", 1e-9)

    def run(family: str, *flags: str) -> dict:
        suite = imported_suite(family, Checkpoint(family, SIZES, EOS_IDS[family]), num_new_tokens=6)
        monkeypatch.setattr(peers, "imported_suites", lambda: [suite])
        assert peers.main(["--imported", "--rounds", "1", "--cores", "1", *flags]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    yield run
    os.sched_setaffinity(0, cores)


def check_report(report: dict, rivals: set[str]) -> None:
    assert len(report["results"]) == 2 * len(report["equal_targets"]) == 2 * 3
    for row in report["equal_targets"]:
        fp32 = {name: number for name, number in row["equal"].items() if "fp32" in name}
        assert {name.split()[0] for name in fp32} == rivals
        assert fp32 == dict.fromkeys(fp32, row["requests"]), row
    for row in report["results"]:
        assert row["peers"].keys() == rivals
        assert row["peers"]["ctranslate2"]["bar"] == 1
        assert row["floor_ms"] > 0
    assert report["medians"].keys() == rivals


@pytest.mark.slow  # it exports the model, and three libraries load it
@pytest.mark.parametrize("family", sorted(EOS_IDS))
def test_all_give_the_same_targets_of_an_imported_checkpoint(family, run_small):
    check_report(run_small(family), {"ctranslate2", "transformers"})


@pytest.mark.parametrize("family", sorted(EOS_IDS))
def test_checkpoints_have_the_sizes_and_the_settings_of_published_ones(family, tmp_path):
    make_checkpoint(Checkpoint(family, SIZES, EOS_IDS[family]), tmp_path / "made")
    config, generation = (
        json.loads((tmp_path / "made" / name).read_text())
        for name in ("config.json", "generation_config.json")
    )
    assert (config["vocab_size"], config["d_model"]) == (1300, 32)
    assert generation["eos_token_id"] == EOS_IDS[family]
    assert generation.get("bad_words_ids") == ([[1299]] if family == "marian" else None)
    assert generation.get("renormalize_logits", False) == (family == "marian")
    assert ("forced_bos_token_id" in generation) == (family == "nllb")
