"""A bundle is written whole or not at all."""

import stat
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from seq2seq_serve.bundle.manifest import SpecialIds, load_bundle
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.export import exporter, parity
from seq2seq_serve.export.exporter import MAX_LOSS, TOLERANCES, ExportError, describe, export_bundle
from tests.models import RECURRENT, make_random_recurrent

FP32 = [Precision.FP32]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refuse_to_go_on(line: str) -> None:
    raise AssertionError(f"the export went on to {line!r}")


def test_the_manifest_tells_sizes_limits_and_where_the_model_comes_from(random_trained, random_bundle):
    manifest = random_bundle.manifest
    assert manifest.kind == "transformer"
    assert manifest.sizes == {
        "vocab_size": random_trained.config.vocab_size,
        "d_model": 32,
        "d_ff": 64,
        "d_head": 8,
        "num_heads": 4,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
    }
    assert (manifest.source_language, manifest.target_language) == ("ko", "en")
    assert manifest.provenance == {"preset": "random", "dev_score": "0.00"}


def test_the_manifest_bounds_targets_by_the_training_corpus(trained_run, random_bundle):
    assert load_bundle(trained_run.bundle).manifest.length_bound == trained_run.trained.length_bound
    assert trained_run.trained.length_bound is not None
    assert random_bundle.manifest.length_bound is None  # no corpus


def test_the_manifest_holds_the_proof(random_bundle):
    proof = random_bundle.manifest.variants[Precision.FP32].parity
    assert 0 < proof.max_log_probability_difference < proof.tolerance == TOLERANCES[Precision.FP32]
    assert proof.shapes == parity.SHAPES
    for precision, most in ((Precision.INT8, 0.04), (Precision.INT4, 0.25)):  # measured 0.013 and 0.16
        proof = random_bundle.manifest.variants[precision].parity
        assert 0 < proof.max_log_probability_difference < proof.tolerance == TOLERANCES[precision]
        assert 0 < proof.mean_log_probability_difference < most
        assert proof.score >= proof.reference_score - MAX_LOSS[precision]


def test_int8_of_a_trained_model_translates_as_well(trained_run):
    proof = load_bundle(trained_run.bundle).manifest.variants[Precision.INT8].parity
    assert proof.reference_score > 80
    assert proof.score > proof.reference_score - 1
    assert 0 < proof.mean_log_probability_difference < 0.02  # measured 0.001


def test_a_bundle_is_for_everybody_to_read(bundle_path):
    assert stat.S_IMODE(bundle_path.stat().st_mode) == 0o755


def test_a_folder_that_is_there_is_not_replaced_unasked(random_trained, tmp_path):
    (tmp_path / "precious").write_text("")
    with pytest.raises(ExportError, match="--overwrite"):
        export_bundle(random_trained, tmp_path, FP32, report=refuse_to_go_on)
    assert names_in(tmp_path) == ["precious"]


def test_a_failing_proof_leaves_the_old_bundle_and_nothing_else(random_trained, tmp_path, monkeypatch, told):
    path = tmp_path / "bundle"
    path.mkdir()
    (path / "manifest.json").write_text("old")
    lines, report = told
    refusal = r"fp32 differs from the trained model by .*e-0. in a log-probability, and 1e-12"
    with monkeypatch.context() as patch:
        patch.setitem(TOLERANCES, Precision.FP32, 1e-12)
        patch.setattr(parity, "rounding", lambda *_: 0.0)
        with pytest.raises(ExportError, match=refusal):
            export_bundle(random_trained, path, FP32, overwrite=True, report=report)
    assert lines == ["fp32: converting", "fp32: comparing with the trained model"]
    assert names_in(tmp_path) == ["bundle"]
    assert (path / "manifest.json").read_text() == "old"
    export_bundle(random_trained, path, FP32, overwrite=True)
    assert names_in(tmp_path) == ["bundle"]
    load_bundle(path)


def test_a_bundle_that_a_server_would_refuse_is_not_written(random_trained, tmp_path, monkeypatch):
    monkeypatch.setattr(exporter, "SpecialIds", lambda pad_id, _: SpecialIds(pad_id, (10**6,)))
    with pytest.raises(ExportError, match=r"special_ids\.eos_ids has the id 1000000"):
        export_bundle(random_trained, tmp_path / "bundle", FP32)
    assert names_in(tmp_path) == []


def test_an_interrupt_between_the_two_renames_puts_the_old_bundle_back(random_trained, tmp_path, monkeypatch):
    path = tmp_path / "bundle"
    path.mkdir()
    (path / "manifest.json").write_text("old")
    rename = Path.rename

    def rename_and_interrupt(self: Path, target: Path) -> None:
        rename(self, target)
        if self == path:
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", rename_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_bundle(random_trained, path, FP32, overwrite=True)
    assert names_in(tmp_path) == ["bundle"]
    assert (path / "manifest.json").read_text() == "old"


def test_overwrite_replaces_only_bundles(random_trained, tmp_path):
    folder, file = tmp_path / "thesis", tmp_path / "file"
    folder.mkdir()
    (folder / "chapter 1").write_text("precious")
    file.write_text("precious")
    for path in (folder, file):
        with pytest.raises(ExportError, match="is not a bundle"):
            export_bundle(random_trained, path, FP32, overwrite=True, report=refuse_to_go_on)
    assert (folder / "chapter 1").read_text() == file.read_text() == "precious"


@pytest.mark.parametrize(
    ("precision", "worse", "worst", "advice"),
    [
        (Precision.INT8, 89.1, 88.9, r"1\.0 is allowed. Export fp32 only"),
        (Precision.INT4, 88.1, 87.9, r"2\.0 is allowed. Export int8 or fp32"),
    ],
)
def test_a_precision_that_translates_worse_is_refused(
    precision, worse, worst, advice, random_trained, request, monkeypatch
):
    graphs = request.getfixturevalue(f"post_{precision}").graphs
    monkeypatch.setattr(exporter, "_scores", lambda *_: (worst, 90.0))
    with pytest.raises(ExportError, match=rf"{precision} .* {worst}0 BLEU .* 90.00; .*{advice}"):
        exporter.prove(random_trained, graphs, precision)
    monkeypatch.setattr(exporter, "_scores", lambda *_: (worse, 90.0))
    line = describe(exporter.prove(random_trained, graphs, precision), precision, random_trained.dev)
    assert f"BLEU {worse}0 on 4 dev sources" in line


@pytest.mark.parametrize("difference", [float("inf"), float("nan"), 10.1])
def test_int8_that_is_far_off_is_refused_whatever_its_bleu(
    random_trained, post_int8, monkeypatch, difference
):
    """Of a model that has learnt nothing, graphs that give NaN were taken: 0.0 BLEU against 0.9."""
    monkeypatch.setattr(exporter, "_scores", lambda *_: (0.0, 0.9))
    monkeypatch.setattr(parity, "worst_difference", lambda *_: difference)
    with pytest.raises(ExportError, match=r"int8 .* 1e\+01 is allowed"):
        exporter.prove(random_trained, post_int8.graphs, Precision.INT8)


@pytest.mark.parametrize(
    ("precision", "advice"), [(Precision.INT8, "Export fp32 only"), (Precision.INT4, "Export int8 or fp32")]
)
@pytest.mark.parametrize("noise", [0.5, float("nan")])
def test_where_bleu_is_too_low_to_prove_anything_references_decide(
    random_trained, precision, advice, request, monkeypatch, noise
):
    graphs = request.getfixturevalue(f"post_{precision}").graphs
    monkeypatch.setattr(exporter, "_scores", lambda *_: (0.0, 0.9))
    proof = exporter.prove(random_trained, graphs, precision)
    line = describe(proof, precision, random_trained.dev)
    assert "0.90, too low" in line
    model = deepcopy(random_trained.model)
    with torch.no_grad():
        model.embedding.weight += noise * torch.randn(model.embedding.weight.shape)
    monkeypatch.setattr(parity, "worst_difference", lambda *_: 1.0)
    other = replace(random_trained, model=model)
    with pytest.raises(ExportError, match=f"{precision} .* on average .* {advice}"):
        exporter.prove(other, graphs, precision)


def test_the_proof_of_int8_counts_each_source_once(random_trained, post_int8, monkeypatch):
    """Of pictures with five captions each, the first 200 pairs were 40 pictures."""
    compared: list[tuple[list[int], list[int]]] = []
    monkeypatch.setattr(parity, "worst_difference", lambda *_: 0.0)
    monkeypatch.setattr(parity, "mean_difference", lambda *args: compared.extend(args[2]) or 0.0)
    scored: list[list[str]] = []
    score = exporter.score
    monkeypatch.setattr(exporter, "score", lambda *args: scored.append(args[1]) or score(*args))
    dev = [(f"source {number}", f"target {number} {i}") for number in range(3) for i in range(5)]
    trained = replace(random_trained, dev=dev)
    line = describe(exporter.prove(trained, post_int8.graphs, Precision.INT8), Precision.INT8, dev)
    encode = random_trained.tokenizer.encode_batch
    assert [target[1:-1] for _, target in compared] == encode([f"target {number} 0" for number in range(3)])
    assert scored == [[[f"target {number} {i}" for i in range(5)] for number in range(3)]] * 2
    assert "on 3 dev sources" in line


def test_a_nan_difference_fails_the_proof(random_trained, post_fp32, monkeypatch):
    monkeypatch.setattr(parity, "worst_difference", lambda *_: float("nan"))
    with pytest.raises(ExportError, match=r"fp32 .* nan"):
        exporter.prove(random_trained, post_fp32.graphs, Precision.FP32)


def test_a_parent_that_is_a_file_is_named(random_trained, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match=r"cannot write into .*/file: "):
        export_bundle(random_trained, tmp_path / "file" / "bundle", FP32, report=refuse_to_go_on)


@pytest.mark.slow  # converts each graph twice
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_models_are_proved_in_half_precision_for_cuda(name, tmp_path):
    manifest = export_bundle(make_random_recurrent(name), tmp_path / "bundle", [Precision.FP16])
    assert 0 < manifest.variants[Precision.FP16].parity.max_log_probability_difference < 0.05
