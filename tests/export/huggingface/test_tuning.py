"""A published model is tuned on a corpus, exported, and served as the checkpoint that it has become."""

import json
import shutil
import sys

import numpy as np
import peft
import pytest
import soundfile
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM

from seq2seq_serve import load
from seq2seq_serve.bundle.checked import from_json
from seq2seq_serve.bundle.manifest import load_bundle
from seq2seq_serve.export.__main__ import main as export_main
from seq2seq_serve.export.huggingface.reference import random_batches, read_theirs, worst_difference
from seq2seq_serve.training.__main__ import main
from seq2seq_serve.training.checkpoint import checkpoint_path, load_checkpoint
from seq2seq_serve.training.data.encoded import EncodedCorpus
from seq2seq_serve.training.huggingface.sounds import Sounds
from seq2seq_serve.training.huggingface.tuning import keep_published, write_published
from seq2seq_serve.training.models.options import PublishedConfig
from seq2seq_serve.training.prepare import continue_run
from seq2seq_serve.training.reports import curves
from seq2seq_serve.training.run import RunFolder, load_published, load_run
from tests.export.huggingface.checkpoints import CASES, PICTURES, SHALLOW, SOUNDS, edit
from tests.export.huggingface.tokenizer_files import sentences

NUM_NEW_TOKENS = 12
SLOW = pytest.mark.slow  # weights and frames are like those of the quick families
QUICK = ("marian", "marian-separate", "t5-1.1", "nllb", "bart", "t5gemma", "t5gemma2", *SOUNDS, *PICTURES)
ADAPTED = "marian", "t5-1.1", "bart", "whisper", "trocr", "trocr-deit", "t5gemma2"  # the quick ones
LANGUAGES = {
    "nllb": {"src_lang": "kor_Hang", "tgt_lang": "eng_Latn"},
    "mbart": {"src_lang": "ko_KR", "tgt_lang": "en_XX"},
    "mbart50": {"src_lang": "ko_KR", "tgt_lang": "en_XX"},
    "m2m100": {"src_lang": "ko", "tgt_lang": "en"},
}
LANGUAGES |= {"whisper": {"language": "en"}}
WORDS = ("low", "a bit higher", "high", "the highest of all")
SETTINGS = (
    *("learning_rate_scale=0.05", "warmup_steps=10", "batch_tokens=200", "dropout=0.1"),
    *("max_length_ratio=null", "cooldown_share=0", "num_averaged=1"),
    *("eval_interval_steps=10", "checkpoint_interval_steps=10", "source_language=ko", "target_language=en"),
)


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    # Drawing the curve takes as long as the steps of these trainings.
    monkeypatch.setattr(curves, "save_learning_curve", lambda folder: None)


@pytest.fixture
def published(copied):
    """A copy of a small checkpoint whose settings have languages."""

    def published(case):
        folder = copied(case, SHALLOW)
        file = "generation_config.json" if case in SOUNDS else "tokenizer_config.json"
        edit(folder / file, **LANGUAGES.get(case, {}))
        return folder

    return published


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
    assert main([*arguments, "--device", "cpu", "--set", *SETTINGS, *flags]) == 0
    return RunFolder(run)


def weights(folder, step):
    return load_checkpoint(checkpoint_path(folder.checkpoints, step)).model


@pytest.mark.parametrize("case", ["marian", pytest.param("t5", marks=SLOW)])
def test_a_tuned_model_learns_resumes_exactly_and_is_served_as_transformers_generates(
    published, corpus, tmp_path, case
):
    folder = published(case)
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
    assert manifest.provenance["parent"] == f"weights: {case} checkpoint copy"
    assert manifest.generation.splits_sentences, "the corpus decides, and not the family"
    assert (manifest.source_language, manifest.target_language) == ("ko", "en")


@pytest.mark.slow  # two hundred steps and an export for each; the parts have quick tests of their own
@pytest.mark.parametrize("case", [*SOUNDS, *PICTURES])
def test_sounds_and_pictures_are_learned_by_heart_and_served(published, tmp_path, case):
    """Tones of different pitches, or pictures of different brightness, have different texts."""
    folder = published(case)
    generation = json.loads((folder / "generation_config.json").read_text())
    files, corpus = write_examples(tmp_path, case)
    settings = "dropout=0", "label_smoothing=0", "eval_interval_steps=100"
    run = tune(folder, tmp_path / "run", corpus, "--max-steps", "100", "--set", *settings)
    shutil.rmtree(folder)
    summary = continue_run(run, None, torch.device("cpu"), Console(quiet=True), {"max_steps": 200})
    assert len(EncodedCorpus(run.encoded)) == len(WORDS)
    assert (summary.steps, summary.dev_cer, summary.dev_wer) == (200, 0, 0)
    bundle = tmp_path / "bundle"
    assert export_main([str(run.path), str(bundle), "--precision", "fp32"]) == 0
    with load(bundle, provider="cpu", precision="fp32", threads=1, max_slots=8) as model:
        answers = list(model.generate([file.read_bytes() for file in files], beam_size=1))
    assert [answer.hypotheses[0].text.strip() for answer in answers] == list(WORDS)
    manifest = load_bundle(bundle).manifest
    assert manifest.provenance["dev_score"] == "0.00"
    given = manifest.generation.suppressed_token_ids, manifest.generation.begin_suppressed_token_ids
    assert given == tuple(tuple(generation.get(f"{when}suppress_tokens", ())) for when in ("", "begin_"))
    assert len(manifest.template.start) == (4 if case in SOUNDS else 1)


def write_examples(folder, case):
    """The files, and the flags of a corpus of them; for Whisper with one that is too long."""
    suffixes = (".wav", ".flac", ".mp3", ".ogg") if case in SOUNDS else (".png",) * len(WORDS)
    files = [folder / f"{number}{suffix}" for number, suffix in enumerate(suffixes)]
    lines = [f"{file.name}\t{text}\n" for file, text in zip(files, WORDS, strict=True)]
    (folder / "dev.tsv").write_text("".join(lines))
    for number, file in enumerate(files):
        if case in PICTURES:
            Image.new("RGB", (50, 20), (60 * number,) * 3).save(file)
        else:
            times = np.arange(6_000) / 16_000
            soundfile.write(file, 0.5 * np.sin(2 * np.pi * 300 * 2**number * times), 16_000)
    if case in SOUNDS:
        soundfile.write(folder / "long.wav", np.zeros(11_000), 16_000)  # 0.64 seconds are the limit
        lines.append("long.wav\tleft out\n")
    (folder / "train.tsv").write_text("".join(lines))
    return files, ["--tsv", str(folder / "train.tsv"), "--dev-tsv", str(folder / "dev.tsv")]


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=SLOW) for case in CASES]
)
def test_weights_become_those_of_the_checkpoint_again(published, tmp_path, case):
    folder = published(case)
    trained = load_published(folder)
    assert isinstance(trained.config, PublishedConfig)
    assert from_json(PublishedConfig, json.loads(json.dumps(trained.config.to_json()))) == trained.config
    keep_published(folder, trained.model, tmp_path / "kept")
    write_published(tmp_path / "kept", trained.model.state_dict(), trained.config, tmp_path / "written")
    given, found = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "written"))
    assert found.keys() <= given.keys()
    # Tables of positions have unused rows; a map between halves of different widths became a part of others.
    other = ("embed_positions", "encoder_attn") if case == "trocr-deit" else ("embed_positions",)
    for name in (name for name in found if not any(part in name for part in other)):
        torch.testing.assert_close(found[name], given[name], rtol=0, atol=1e-6)  # norms had 1 added
    ours, again = trained.model.state_dict(), load_published(tmp_path / "written").model.state_dict()
    for name, tensor in ours.items():
        torch.testing.assert_close(again[name], tensor, rtol=0, atol=1e-6)


def test_pieces_of_a_source_are_those_of_its_own_vocabulary(checkpoint):
    tokenizer = load_published(checkpoint("marian-separate", SHALLOW)[0]).tokenizer
    *pieces, end = tokenizer.source_pieces(tokenizer.encode_source("203 5"))
    assert ("".join(pieces).strip(), end) == ("203 5", "</s>")
    assert "".join(tokenizer.pieces(tokenizer.encode_source("203 5"))) != "203 5</s>"


def test_whisper_writes_a_space_before_a_text_of_a_script_with_spaces(published):
    tokenizer = load_published(published("whisper")).tokenizer
    rows = tokenizer.encode_batch(["low", "안녕", "你好"])
    assert ["".join(tokenizer.pieces(row)) for row in rows] == [" low", " 안녕", "你好"]


def test_a_package_that_only_whisper_needs_is_named(checkpoint, corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.models.whisper.tokenization_whisper", None)
    folder = checkpoint("whisper", SHALLOW)[0]
    with pytest.raises(SystemExit, match=r"transformers .*\[huggingface\]"):
        tune(folder, tmp_path / "run", corpus)


def test_a_file_that_is_not_a_sound_is_named(tmp_path):
    sounds = Sounds(80, 3_000, folder=tmp_path)
    (tmp_path / "a.wav").write_text("no sound")
    source = b"a.wav"
    for read in (sounds.drop_reason, sounds.inputs):
        with pytest.raises(ValueError, match=r"a\.wav"):
            read(source)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "case", [case if case in ADAPTED else pytest.param(case, marks=SLOW) for case in CASES]
)
def test_an_adapter_changes_what_transformers_computes_as_it_changes_our_model(
    published, corpus, tmp_path, case
):
    folder = published(case)
    if case in PICTURES + SOUNDS:
        _, corpus = write_examples(tmp_path, case)
    weights_before = (folder / "model.safetensors").read_bytes()
    lora = "--lora", "rank=2,alpha=16,targets=all-linear"
    flags = "--max-steps", "10", "--set", "learning_rate_scale=0.2", "warmup_steps=1"
    run = tune(folder, tmp_path / "run", corpus, *lora, *flags)
    assert (folder / "model.safetensors").read_bytes() == weights_before
    tuned, base = load_run(run.path), load_published(folder)
    assert isinstance(tuned.config, PublishedConfig)
    media, pad_id = tuned.config.media, json.loads((folder / "config.json").read_text()).get("pad_token_id")
    theirs = peft.PeftModel.from_pretrained(read_theirs(folder, media), run.adapter).eval()
    batches = random_batches(tuned.config, pad_id or 0)
    with torch.inference_mode():
        expected = [
            theirs(**batch.named_source(media), decoder_input_ids=batch.target_ids).logits.log_softmax(-1)
            for batch in batches
        ]
    assert worst_difference(tuned.model, batches, expected) < 1e-4
    assert worst_difference(base.model, batches, expected) > 0.1
    # All that transformers has as a linear layer is changed, without the projection to logits. In a model
    # with a map between its halves, ours has that map in its cross-attention's keys and values.
    changed = {name.split(".lora_")[0] for name in load_file(run.adapter / "adapter_model.safetensors")}
    num_layers = {"trocr-deit": 6 + 8, "whisper": 6 + 10, "trocr": 6 + 10}
    assert len(changed) == num_layers.get(case, len(changed)) > 0


@pytest.mark.parametrize(
    ("case", "frozen", "changed"),
    [
        ("t5", "embedding,encoder_layers", {"source_bias", "target_bias", "encoder_norm", "decoder_norm"}),
        (
            "trocr",
            "front,source_positions,encoder_layers,encoder_norm",
            {"embedding", "target_positions", "target_norm"},
        ),
    ],
)
def test_frozen_parts_stay_as_they_were_published(checkpoint, corpus, tmp_path, case, frozen, changed):
    folder = checkpoint(case, SHALLOW)[0]
    if case in PICTURES:
        _, corpus = write_examples(tmp_path, case)
    run = tune(folder, tmp_path / "run", corpus, "--max-steps", "10", "--set", f"frozen={frozen}")
    before, after = load_published(folder).model.state_dict(), weights(run, 10)
    found = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert found == {*changed, "decoder_layers"}


def test_what_cannot_be_tuned_is_refused_in_one_line(checkpoint, corpus, tmp_path, caplog):
    arguments = ["train", "tiny", "--out", str(tmp_path / "run"), *corpus, "--from"]
    for case, flags, message in (
        ("whisper", [], "source_language"),
        ("m2m100", [], "target_language"),
        ("t5", ["--set", "bpe_dropout=0.1"], "bpe_dropout"),
        ("t5", ["--set", "frozen=head"], "frozen has 'head'"),
    ):
        assert main([*arguments, str(checkpoint(case, SHALLOW)[0]), *flags]) == 1
        assert message in caplog.messages[-1]
    assert not RunFolder(tmp_path / "run").is_run
