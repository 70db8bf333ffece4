"""A bundle is cut to some tokens for drafts: it selects the most probable of them, and is not served."""

import dataclasses
import math
import os
import subprocess

import numpy as np
import pytest
import torch

from seq2seq_serve import kernels
from seq2seq_serve.bundle.manifest import load_bundle
from seq2seq_serve.bundle.names import SOURCE_IDS, Precision, Verb
from seq2seq_serve.export import exporter
from seq2seq_serve.export.__main__ import main
from seq2seq_serve.export.draft import _CHOICES, cut_bundle
from seq2seq_serve.export.exporter import ExportError, export_bundle
from seq2seq_serve.export.graphs.linear import Int4Weights, Int8Weights
from seq2seq_serve.server.config import RunnerConfig
from seq2seq_serve.server.engine.request import Constraints, Request
from seq2seq_serve.server.errors import NO_NUMBERS
from seq2seq_serve.server.runner.runner import OnnxRunner
from seq2seq_serve.training.config import EOS_ID
from tests.server.driver import Driver

QUANTIZED = [Precision.INT8, Precision.INT4]


@pytest.fixture(scope="module")
def texts(random_bundle) -> list[str]:
    """Texts with a half of the tokens."""
    return [random_bundle.target_tokenizer.decode([token_id]) for token_id in range(4, 300, 2)]


@pytest.fixture(scope="module")
def cut_path(bundle_path, texts, tmp_path_factory):
    path = tmp_path_factory.mktemp("cut") / "bundle"
    cut_bundle(bundle_path, path, texts)
    return path


def test_the_kept_weights_are_those_that_the_tokens_have_alone():
    weight, kept = torch.randn(70, 96), np.array([0, 3, 17, 31, 32, 64, 69])
    levels, scale = _CHOICES["Int4Choice"][:2]
    whole, alone = Int4Weights(weight), Int4Weights(weight[kept])
    np.testing.assert_array_equal(levels(whole.levels.numpy(), kept), alone.levels.numpy())
    np.testing.assert_array_equal(scale(whole.scale.numpy(), kept), alone.scale.numpy())
    levels, scale = _CHOICES["QuantizedChoice"][:2]
    whole, alone = Int8Weights(weight), Int8Weights(weight[kept])
    np.testing.assert_array_equal(levels(whole.levels.numpy(), kept), alone.levels.numpy())
    np.testing.assert_array_equal(scale(whole.scale.numpy(), kept), alone.scale.numpy())


def targets(bundle, precision: Precision, requests: list[Request], *, is_draft: bool = False):
    config = RunnerConfig(provider="cpu", precision=precision, num_threads=1, max_slots=4)
    runner = OnnxRunner(bundle, config, is_draft=is_draft)
    runner.warm_up()
    driver = Driver(runner)
    driver.submit(*requests)
    driver.finish()
    return [driver.results[request] for request in requests]


@pytest.mark.skipif(kernels.library() is None, reason="the operators are not compiled")
@pytest.mark.parametrize("precision", QUANTIZED)
def test_a_step_selects_the_most_probable_of_the_kept_tokens(precision, random_bundle, texts, cut_path):
    cut = load_bundle(cut_path)
    kept = {EOS_ID, *(each for text in texts for each in cut.target_tokenizer.encode(text))}
    others = frozenset(range(cut.manifest.target_vocab_size)) - kept
    rng = np.random.default_rng(0)
    plain = []
    for _ in range(20):
        source = np.array([*rng.integers(3, 300, 7), EOS_ID])
        plain.append(Request("r", {SOURCE_IDS: source}, len(source), 12, arrival=0.0))
    bounded = [
        dataclasses.replace(one, constraints=Constraints(suppressed_token_ids=others)) for one in plain
    ]
    expected = [result.best.token_ids for result in targets(random_bundle, precision, bounded)]
    found = [result.best.token_ids for result in targets(cut, precision, plain, is_draft=True)]
    assert found == expected
    assert len(others) > 100
    assert len({token_id for each in found for token_id in each}) > 2


@pytest.mark.skipif(kernels.library() is None, reason="the operators are not compiled")
@pytest.mark.parametrize("precision", QUANTIZED)
def test_a_step_without_numbers_selects_nothing(precision, cut_path, monkeypatch):
    encode = OnnxRunner.encode

    def spoil(runner: OnnxRunner, first_row: int, requests: list[Request]) -> None:
        encode(runner, first_row, requests)
        for buffers in runner._groups_of_buffers:
            buffers._positions[:, first_row] = math.nan

    warm_up = OnnxRunner.warm_up

    def spoil_after_it(runner: OnnxRunner) -> None:
        warm_up(runner)
        monkeypatch.setattr(OnnxRunner, "encode", spoil)

    monkeypatch.setattr(OnnxRunner, "warm_up", spoil_after_it)
    request = Request("r", {SOURCE_IDS: np.array([5, 6, EOS_ID])}, 3, 9, arrival=0.0)
    [result] = targets(load_bundle(cut_path), precision, [request], is_draft=True)
    assert str(result.error) == NO_NUMBERS


def test_the_command_keeps_the_most_frequent_tokens_and_says_how_many(bundle_path, tmp_path, capsys):
    texts, out = tmp_path / "texts", tmp_path / "out"
    texts.write_text("the the the\nquick\n")
    assert main(["draft", str(bundle_path), str(texts), str(out), "--most", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{out}\n"
    counting, kept, *cuts = captured.err.splitlines()
    assert counting == "counting the tokens of the texts"
    assert kept.startswith("3 of 300 tokens are kept, ")  # with the end of sequence
    assert cuts == ["int8: cutting the weights", "int4: cutting the weights"]
    manifest = load_bundle(out).manifest
    assert manifest.drafts_only
    assert list(manifest.variants) == QUANTIZED
    for variant in manifest.variants.values():
        assert variant.graphs.keys() == {Verb.ENCODE, Verb.STEP}
        whole = load_bundle(bundle_path).manifest.variants[Precision.INT8].weights.size_bytes
        assert 0 < variant.weights.size_bytes < whole


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path, capsys, monkeypatch):
    """All texts were counted first."""
    (tmp_path / "file").write_text("")
    assert main(["draft", "no-bundle", "no-texts", str(tmp_path / "file" / "new" / "out")]) == 1
    assert f"{tmp_path}/file: " in capsys.readouterr().err
    monkeypatch.setattr(exporter.os, "access", lambda *_: False)
    assert main(["draft", "no-bundle", "no-texts", str(tmp_path / "new" / "out")]) == 1
    assert f"{tmp_path}: " in capsys.readouterr().err


def test_texts_that_are_missing_are_refused_before_the_bundle_is_read(tmp_path, capsys):
    assert main(["draft", "no-bundle", "no-texts", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.startswith("error: no-texts: ")


def test_texts_may_come_from_a_named_pipe(bundle_path, tmp_path):
    """It was opened twice, and its writer got SIGPIPE."""
    pipe, out = tmp_path / "texts", tmp_path / "out"
    os.mkfifo(pipe)
    with subprocess.Popen(["sh", "-c", 'echo the quick > "$0"', pipe]) as writer:
        assert main(["draft", str(bundle_path), str(pipe), str(out)]) == 0
    assert writer.returncode == 0
    assert load_bundle(out).manifest.drafts_only


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_texts_without_tokens_are_refused(texts, bundle_path, tmp_path):
    with pytest.raises(ExportError, match="the texts have no tokens"):
        cut_bundle(bundle_path, tmp_path / "out", texts)
    assert not list(tmp_path.iterdir())


def test_bundles_that_cannot_be_cut_are_refused(random_trained, texts, bundle_path, cut_path, tmp_path):
    with pytest.raises(ExportError, match="is kept"):
        cut_bundle(bundle_path, bundle_path, texts, overwrite=True)
    with pytest.raises(ExportError, match="is cut already"):
        cut_bundle(cut_path, tmp_path / "out", texts)
    export_bundle(random_trained, tmp_path / "fp32", [Precision.FP32])
    with pytest.raises(ExportError, match="has fp32"):
        cut_bundle(tmp_path / "fp32", tmp_path / "out", texts)


def test_a_cut_bundle_is_not_served(cut_path):
    with pytest.raises(ValueError, match="--draft"):
        OnnxRunner(load_bundle(cut_path), RunnerConfig(provider="cpu"))
