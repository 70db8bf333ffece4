import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from seq2seq_serve.bundle.manifest import LengthBound
from seq2seq_serve.training.checkpoint import Checkpoint, save_checkpoint, save_tensors
from seq2seq_serve.training.data.corpus import Corpus
from seq2seq_serve.training.data.encoded import EncodedCorpus
from seq2seq_serve.training.data.lengths import learn_length_bound
from seq2seq_serve.training.data.text_files import SentencePair
from seq2seq_serve.training.models.transformer import Transformer
from seq2seq_serve.training.prepare import start_run
from seq2seq_serve.training.presets import Preset
from seq2seq_serve.training.run import (
    RunFolder,
    Summary,
    load_checkpoints,
    load_run,
    read_weights,
    write_weights,
)

SUMMARY = Summary(
    dev_bleu=51.234,
    dev_chrf=60.0,
    bleu_signature="nrefs:1",
    chrf_signature="nrefs:1",
    weights="checkpoint at step 3",
    steps=3,
    seconds=1.0,
)


@pytest.fixture
def folder(tmp_path: Path, preset: Preset, corpus: Corpus) -> RunFolder:
    """A run with everything but what training leaves."""
    folder = RunFolder(tmp_path / "run")
    start_run(folder, preset, corpus)
    return folder


@pytest.fixture
def finished(folder: RunFolder) -> RunFolder:
    torch.manual_seed(0)
    config = folder.read_config().model
    write_weights(folder.model_file, Transformer(config).state_dict(), config)
    folder.write_summary(SUMMARY)
    return folder


def test_a_finished_run_is_loaded(finished: RunFolder, corpus: Corpus) -> None:
    run = load_run(finished.path)
    assert not run.model.training
    assert run.config == run.model.config
    assert run.config.vocab_size == run.tokenizer.vocab_size
    assert run.dev == [tuple(pair) for pair in corpus.dev]
    assert run.dev_score == 51.234
    assert run.provenance["preset"] == "toy"
    assert run.provenance["corpus_sha256"] == corpus.sha256()
    assert "51.23" not in run.provenance.values()  # it has a field of its own
    assert re.fullmatch(r"unknown|[0-9a-f]{40}(-dirty)?", run.provenance["commit"])
    assert all(isinstance(value, str) for value in run.provenance.values())


@pytest.mark.parametrize(
    ("texts", "are_single"),
    [
        (["One.", "Two words", "Is it 3.5?"] * 4, True),
        (["One."] * 10 + ["One. Two."], True),
        (["One."] * 8 + ["One. Two.", "One.\u2028Two."], False),
    ],
)
def test_a_run_knows_whether_its_sources_are_single_sentences(
    finished: RunFolder, texts: list[str], are_single: bool
) -> None:
    finished.write_pairs("dev", [SentencePair(text, "b") for text in texts])
    assert load_run(finished.path).has_single_sentences is are_single


def test_a_run_has_the_length_bound_of_its_corpus_and_keeps_it_without_the_corpus(
    finished: RunFolder,
) -> None:
    corpus = EncodedCorpus(finished.encoded)
    learned = learn_length_bound(corpus.source_lengths, corpus.target_lengths)
    shutil.rmtree(finished.encoded)
    assert finished.read_config().length_bound == load_run(finished.path).length_bound == learned


def test_a_run_that_is_older_than_the_bound_learns_it_where_its_corpus_is(finished: RunFolder) -> None:
    content = json.loads(finished.config_file.read_text())
    learned = content.pop("length_bound")
    finished.config_file.write_text(json.dumps(content))
    assert load_run(finished.path).length_bound == LengthBound(**learned)
    shutil.rmtree(finished.encoded)
    assert load_run(finished.path).length_bound is None


def test_checkpoints_are_loaded_before_the_run_has_finished(folder: RunFolder) -> None:
    weights = {}
    for step in (2, 4):
        weights[step] = Transformer(folder.read_config().model).state_dict()
        kept = Checkpoint(step, weights[step], {}, epoch=0, batch_index=step, best=None, seconds=1.0)
        save_checkpoint(folder.checkpoints, kept)
    one, both = load_checkpoints(folder.path, [2]), load_checkpoints(folder.path, [2, 4])
    assert (one.provenance["weights"], one.provenance["steps"]) == ("checkpoint at step 2", "2")
    assert both.provenance["weights"] == "average of the checkpoints at steps 2, 4"
    assert one.dev_score is None
    for name, weight in one.model.state_dict().items():
        assert torch.equal(weight, weights[2][name])
        torch.testing.assert_close(both.model.state_dict()[name], (weight + weights[4][name]) / 2)
    with pytest.raises(ValueError, match=r"run has no checkpoint of step 3; it has those of 2, 4$"):
        load_checkpoints(folder.path, [4, 3])


def test_all_that_is_missing_is_listed_with_how_to_go_on(folder: RunFolder) -> None:
    folder.text_files("dev")[1].unlink()
    with pytest.raises(
        ValueError, match=r"lacks dev.target.txt, model.pt, summary.json: .* train toy --out .*/run --resume"
    ):
        load_run(folder.path)


def test_missing_pairs_of_a_run_are_named(finished: RunFolder) -> None:
    for file in finished.text_files("test"):
        file.unlink()
    with pytest.raises(ValueError, match=r"the run .* has no test pairs"):
        finished.read_pairs("test")


def test_a_tokenizer_that_does_not_fit_is_refused(finished: RunFolder) -> None:
    config = finished.read_config()
    model = dataclasses.replace(config.model, vocab_size=config.model.vocab_size + 1)
    finished.write_config(dataclasses.replace(config, model=model))
    weights = read_weights(finished.model_file, config.model)
    save_tensors(finished.model_file, {"weights": weights})  # as older commits did
    with pytest.raises(ValueError, match=r"tokenizer\.json has \d+ tokens, and config\.json has \d+"):
        load_run(finished.path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "Expecting property name"),
        ("[]", "not the configuration of a run of format 1"),
        ('{"format": 2}', "not the configuration of a run of format 1"),
        ('{"format": 1}', "preset is missing; model is missing; "),
    ],
)
def test_a_damaged_config_is_named(folder: RunFolder, content: str, message: str) -> None:
    folder.config_file.write_text(content)
    with pytest.raises(ValueError, match=rf"config\.json: {message}"):
        folder.read_config()


def test_a_damaged_summary_is_named(finished: RunFolder) -> None:
    finished.summary_file.write_text('{"dev_bleu": 1}')
    with pytest.raises(ValueError, match=r"summary\.json: dev_chrf is missing; "):
        load_run(finished.path)
