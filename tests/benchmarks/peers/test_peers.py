"""The comparison with peers, whole, at sizes that tell nothing of speed, with those that are installed."""

import dataclasses
import gzip
import importlib.util
import json
import os
import shutil

import pytest

from benchmarks.floors import Machine, step_floor
from benchmarks.peers import __main__ as peers
from benchmarks.peers import work as peers_work
from benchmarks.peers.report import Turns, equal_targets, summarise
from benchmarks.peers.work import Clock, Contender, Search, Suite, Work, base_works
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.training.config import TransformerConfig

PEERS = [name for name in ("ctranslate2", "transformers") if importlib.util.find_spec(name)]
PAIRS = [("하나 둘 셋", "one two three"), ("넷", "four"), ("다섯 하나", "five one")]


@pytest.fixture
def _whole_process():
    """What `main` sets for the whole process is set back."""
    cores = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, cores)


@pytest.fixture
def run_small(random_trained, bundle_path, tmp_path, monkeypatch, capsys, _whole_process):
    """`main` with the session's random model, which ends a target now and then."""
    works = base_works(random_trained.config.vocab_size, num_new_tokens=4)
    works = tuple(dataclasses.replace(work, is_exact=work.name.endswith("greedy x 1")) for work in works)
    machine = Machine(1e10, {Precision.FP32: 1e11, Precision.INT8: 4e11})
    monkeypatch.setattr(peers, "base_suite", lambda: Suite("base", random_trained, works))
    monkeypatch.setattr(peers, "measure_machine", lambda _: machine)
    monkeypatch.setattr(peers, "_LEAST_SECONDS", 1e-9)
    sources = [[9, 8, 7, 2], [5, 2], [6, 5, 2], [4, 2]]  # two of one length
    sentences = tuple(
        Work(f"base, 1000 sentences, {label}", sources, Search(beam_size, max_new_tokens=None))
        for label, beam_size in (("greedy", 1), ("beam 5", 5))
    )
    monkeypatch.setattr(peers, "sentences_suite", lambda: Suite("sentences", random_trained, sentences))
    monkeypatch.setattr(peers, "export_bundle", lambda _, path, __: shutil.copytree(bundle_path, path))
    monkeypatch.setattr(peers_work, "load_run", lambda _: random_trained)

    def run(*flags: str) -> tuple[dict, str]:
        assert peers.main(["--rounds", "1", "--cores", "1", *flags]) == 0
        captured = capsys.readouterr()
        return json.loads(captured.out.splitlines()[-1]), captured.err

    return run


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "tok").mkdir()
    for language, texts in zip(("en", "de"), zip(*PAIRS, strict=True), strict=True):
        file = tmp_path / "tok" / f"test_2016_flickr.lc.norm.tok.{language}.gz"
        file.write_bytes(gzip.compress("".join(f"{text}\n" for text in texts).encode()))
    return tmp_path


@pytest.mark.slow  # each peer has a test of its own
def test_everybody_takes_turns_and_gives_the_same_tokens(run_small, corpus, tmp_path):
    out = tmp_path / "report.json"
    report, _ = run_small("--multi30k", str(corpus), "--run", str(tmp_path / "mine"), "--out", str(out))
    assert report == json.loads(out.read_text())
    assert len(report["results"]) == 2 * len(report["equal_targets"]) == 2 * 9
    for row in report["equal_targets"]:
        fp32 = {name: number for name, number in row["equal"].items() if "fp32" in name}
        assert fp32 == dict.fromkeys(fp32, row["requests"]), row
    for row in report["results"]:
        assert row["peers"].keys() == set(PEERS)
        assert all(peer["ratio"] > 0 and peer["bar"] > 0 for peer in row["peers"].values())
        assert 0 < row["python_share"] < 1
        assert ("floor_ms" in row) == (row["work"] == "base, greedy x 1")
        assert ("bleu" in row) == row["work"].startswith("Multi30k")
        if row["precision"] == "fp32" and "bleu" in row:
            assert len({bleu["score"] for bleu in row["bleu"].values()}) == 1


def test_multi30k_is_run_first_where_it_is_given(monkeypatch):
    """It came after `base`, which nobody had asked for."""
    for name in ("base", "sentences", "multi30k"):
        suite = Suite(name, None, (Work(name, [[2]], Search(1, 4)),))
        monkeypatch.setattr(peers, f"{name}_suite", lambda *_, suite=suite: suite)
    options = peers._parser().parse_args(["--multi30k", "folder", "--run", "run"])
    assert [suite.name for suite in peers._suites(options, None)] == ["multi30k", "base", "sentences"]


def test_short_work_is_repeated_in_its_turn_and_the_mean_counts(monkeypatch):
    now = 0.0

    def translate(_sources, _search):
        nonlocal now
        now += 0.4
        return [[]]

    monkeypatch.setattr(peers, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(peers.time, "perf_counter", lambda: now)
    turns = Turns([])
    contender = Contender("ours", Precision.FP32, "1x1", translate, Clock(0.001, 0.3))
    peers._take_turn(Work("short", [[2]], Search(1, 4)), contender, turns)
    assert turns.seconds == pytest.approx([0.4])
    assert turns.step_seconds == [0.001] * 3
    assert turns.python_shares == pytest.approx([0.25] * 3)


def test_targets_of_another_length_are_not_compared():
    work = Work("exact", [[5, 2], [6, 2]], Search(1, max_new_tokens=3), is_exact=True)
    ours = Contender("ours", Precision.FP32, "", lambda *_: [])
    with pytest.raises(ValueError, match=r"ours fp32 gives targets of \[2, 3\] tokens, not of \[3\]"):
        equal_targets(work, {ours: Turns([[7, 7, 7], [7, 7]])})


def test_the_faster_setting_of_each_counts(random_trained):
    work = Work("base, greedy x 1", [[5, 2]], Search(1, max_new_tokens=2))
    seconds = {
        ("ours", "1x2"): [5.0],
        ("ours", "2x1"): [2.0, 3.0, 1.0],
        ("ctranslate2", "1x2"): [9.0],
        ("ctranslate2", "2x1"): [3.0],
    }
    turns = {
        Contender(library, Precision.FP32, setting, lambda *_: []): Turns([[7, 7]], its, [0.1], [0.5])
        for (library, setting), its in seconds.items()
    }
    row = summarise(Suite("base", random_trained, (work,)), work, Precision.FP32, turns)
    assert (row["setting"], row["tokens_per_second"]) == ("2x1", 1.0)
    expected = {"setting": "2x1", "tokens_per_second": pytest.approx(2 / 3), "ratio": 1.5, "bar": 1.6}
    assert row["peers"] == {"ctranslate2": expected}


def test_a_floor_is_reading_at_one_row_and_multiplying_at_many():
    sizes = TransformerConfig(
        vocab_size=400, d_model=32, d_ff=64, num_heads=4, num_encoder_layers=2, num_decoder_layers=2
    )
    machine = Machine(1e9, {Precision.FP32: 1e10, Precision.INT8: 4e10})
    one, many = (
        step_floor(sizes, Precision.FP32, rows, 1, source_tokens=20, target_tokens=16, machine=machine)
        for rows in (1, 400)
    )
    weights = 2 * (6 * 32 * 32 + 2 * 32 * 64) + 400 * 32
    assert one.read_seconds == pytest.approx((4 * weights + 2 * 2 * 36 * 32 * 4) / 1e9)
    assert one.multiply_seconds == pytest.approx((weights + 2 * 2 * 36 * 32) / 1e10)
    assert one.seconds == one.read_seconds
    assert many.multiply_seconds == pytest.approx(400 * one.multiply_seconds)
