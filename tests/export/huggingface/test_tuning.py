"""A published model is tuned on a corpus, exported, and served as the checkpoint that it has become."""

import json
import shutil

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM

from seq2seq_serve import load
from seq2seq_serve.bundle.manifest import load_bundle
from seq2seq_serve.export.__main__ import main as export_main
from seq2seq_serve.training.__main__ import main
from seq2seq_serve.training.checkpoint import checkpoint_path, load_checkpoint
from seq2seq_serve.training.huggingface.tuning import keep_published, write_published
from seq2seq_serve.training.models.options import PublishedConfig
from seq2seq_serve.training.prepare import continue_run
from seq2seq_serve.training.reports import curves
from seq2seq_serve.training.run import RunFolder, load_published, load_run
from tests.export.huggingface.checkpoints import SHALLOW, TEXTS, edit
from tests.export.huggingface.tokenizer_files import sentences

NUM_NEW_TOKENS = 12
SLOW = pytest.mark.slow  # weights and frames are like those of the quick families
QUICK = ("marian", "marian-separate", "t5-1.1", "nllb", "bart", "t5gemma", "t5gemma2")
LANGUAGES = {
    "nllb": {"src_lang": "kor_Hang", "tgt_lang": "eng_Latn"},
    "mbart": {"src_lang": "ko_KR", "tgt_lang": "en_XX"},
    "mbart50": {"src_lang": "ko_KR", "tgt_lang": "en_XX"},
    "m2m100": {"src_lang": "ko", "tgt_lang": "en"},
}
SETTINGS = (
    *("learning_rate_scale=0.05", "warmup_steps=10", "batch_tokens=200", "dropout=0.1"),
    *("max_length_ratio=null", "bpe_dropout=0", "cooldown_share=0", "num_averaged=1"),
    *("eval_interval_steps=10", "checkpoint_interval_steps=10"),
)


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    # Drawing the curve takes as long as the steps of these trainings.
    monkeypatch.setattr(curves, "save_learning_curve", lambda folder: None)


@pytest.fixture
def corpus(tmp_path):
    """The target is the first word of its source."""
    texts = [text for text in sentences(120, 5) if text.split()]
    lines = [f"{' '.join(text.split())}\t{text.split()[0]}" for text in texts]
    (tmp_path / "train.tsv").write_text("\n".join(lines[8:]) + "\n", encoding="utf-8")
    (tmp_path / "dev.tsv").write_text("\n".join(lines[:8]) + "\n", encoding="utf-8")
    return ["--tsv", str(tmp_path / "train.tsv"), "--dev-tsv", str(tmp_path / "dev.tsv")]


def tune(folder, run, corpus, *flags):
    arguments = ["train", "tiny", "--out", str(run), "--from", str(folder), *corpus, "--threads", "1"]
    assert main([*arguments, "--device", "cpu", *flags, "--set", *SETTINGS]) == 0
    return RunFolder(run)


def weights(folder, step):
    return load_checkpoint(checkpoint_path(folder.checkpoints, step)).model


@pytest.mark.parametrize("case", ["marian", "t5"])
def test_a_tuned_model_learns_resumes_exactly_and_is_served_as_transformers_generates(
    checkpoint, corpus, tmp_path, case
):
    folder = shutil.copytree(checkpoint(case, SHALLOW)[0], tmp_path / "published")
    whole = tune(folder, tmp_path / "whole", corpus, "--max-steps", "20")
    losses = [line["loss"] for line in whole.read_metrics() if line["kind"] == "dev"]
    assert losses[1] < losses[0] - 0.1
    parts = tune(folder, tmp_path / "parts", corpus, "--max-steps", "10")
    shutil.rmtree(folder)  # a run keeps what it needs
    assert continue_run(parts, None, torch.device("cpu"), Console(quiet=True), {"max_steps": 20}).steps == 20
    expected, found = weights(whole, 20), weights(parts, 20)
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())

    bundle = tmp_path / "bundle"
    assert export_main([str(whole.path), str(bundle), "--precision", "fp32"]) == 0
    trained = load_run(whole.path)
    assert isinstance(trained.config, PublishedConfig)
    write_published(whole.published, trained.model.state_dict(), trained.config, tmp_path / "written")
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "written").eval()
    texts = [source for source, _ in trained.dev]
    options = {"max_new_tokens": NUM_NEW_TOKENS, "long_source": "refuse"}  # `generate` reads a text as one
    with load(bundle, provider="cpu", precision="fp32", threads=1, max_slots=8) as model:
        answers = [answer.hypotheses[0] for answer in model.generate(texts, **options)]
    for answer, source_ids in zip(answers, trained.tokenizer.encode_sources(texts), strict=True):
        (found,) = theirs.generate(torch.tensor([source_ids]), max_new_tokens=NUM_NEW_TOKENS, do_sample=False)
        start, *target = found.tolist()
        assert start == trained.config.frame.start_ids[0]
        assert answer.token_ids == [one for one in target if one != trained.config.frame.eos_id]
    manifest = load_bundle(bundle).manifest
    assert manifest.provenance["parent"] == f"weights: {case} checkpoint published"
    assert manifest.generation.splits_sentences, "the corpus decides, and not the family"


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=SLOW) for case in TEXTS]
)
def test_weights_become_those_of_the_checkpoint_again(checkpoint, tmp_path, case):
    folder = shutil.copytree(checkpoint(case, SHALLOW)[0], tmp_path / "published")
    edit(folder / "tokenizer_config.json", **LANGUAGES.get(case, {}))
    trained = load_published(folder)
    assert isinstance(trained.config, PublishedConfig)
    assert PublishedConfig.from_json(json.loads(json.dumps(trained.config.to_json()))) == trained.config
    keep_published(folder, trained.model, tmp_path / "kept")
    write_published(tmp_path / "kept", trained.model.state_dict(), trained.config, tmp_path / "written")
    given, found = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "written"))
    assert found.keys() <= given.keys()
    for name in (name for name in found if "embed_positions" not in name):  # which has unused rows
        torch.testing.assert_close(found[name], given[name], rtol=0, atol=1e-6)  # norms had 1 added
    ours, again = trained.model.state_dict(), load_published(tmp_path / "written").model.state_dict()
    for name, tensor in ours.items():
        torch.testing.assert_close(again[name], tensor, rtol=0, atol=1e-6)


def test_pieces_of_a_source_are_those_of_its_own_vocabulary(checkpoint):
    tokenizer = load_published(checkpoint("marian-separate", SHALLOW)[0]).tokenizer
    *pieces, end = tokenizer.source_pieces(tokenizer.encode_source("203 5"))
    assert ("".join(pieces).strip(), end) == ("203 5", "</s>")
    assert "".join(tokenizer.pieces(tokenizer.encode_source("203 5"))) != "203 5</s>"


def test_frozen_parts_stay_as_they_were_published(checkpoint, corpus, tmp_path):
    folder = checkpoint("t5", SHALLOW)[0]
    run = tune(
        folder, tmp_path / "run", corpus, "--max-steps", "10", "--set", "frozen=embedding,encoder_layers"
    )
    before, after = load_published(folder).model.state_dict(), weights(run, 10)
    changed = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"source_bias", "target_bias", "decoder_layers", "encoder_norm", "decoder_norm"}


def test_what_cannot_be_tuned_is_refused_in_one_line(checkpoint, corpus, tmp_path, caplog):
    arguments = ["train", "tiny", "--out", str(tmp_path / "run"), *corpus, "--from"]
    for case, flags, message in (
        ("whisper", [], "reads positions: only models of texts can be tuned"),
        ("m2m100", [], "the settings name none as target_language: set src_lang and tgt_lang in tokenizer"),
        ("t5", [], "bpe_dropout needs a tokenizer of byte pairs that was learned here: leave it out"),
        (
            "t5",
            ["--set", "bpe_dropout=0", "frozen=head"],
            "frozen has 'head', and the model's parts are embedd",
        ),
    ):
        assert main([*arguments, str(checkpoint(case, SHALLOW)[0]), *flags]) == 1
        assert message in caplog.messages[-1]
    assert not RunFolder(tmp_path / "run").is_run
