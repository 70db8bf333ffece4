import dataclasses
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from seq2seq_serve.bundle.tokenizer import Tokenizer
from seq2seq_serve.training import prepare
from seq2seq_serve.training.checkpoint import checkpoint_path, list_checkpoints
from seq2seq_serve.training.data.corpus import Corpus, CorpusFiles, load_corpus
from seq2seq_serve.training.data.encoded import EncodedCorpus
from seq2seq_serve.training.data.text_files import SentencePair, write_lines
from seq2seq_serve.training.data.vectors import PieceVectors
from seq2seq_serve.training.models.recurrent import RecurrentConfig
from seq2seq_serve.training.models.registry import make_model
from seq2seq_serve.training.prepare import continue_run, start_run
from seq2seq_serve.training.presets import Preset
from seq2seq_serve.training.run import RunFolder, load_run

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


class _Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def test_a_start_that_was_killed_anywhere_is_made_again(
    tmp_path: Path, with_vectors: Preset, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_changes, last_change = 0, math.inf

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def change_or_die(*arguments: Any, **options: Any) -> Any:
            nonlocal num_changes
            num_changes += 1
            if num_changes > last_change:
                raise _Killed
            return change(*arguments, **options)

        return change_or_die

    def content(folder: RunFolder) -> dict[Path, bytes]:
        files = [path for path in folder.path.rglob("*") if path.is_file()]
        return {file.relative_to(folder.path): file.read_bytes() for file in files}

    for name in ("mkdir", "open", "rename", "replace", "unlink", "write_bytes"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    start_run(RunFolder(tmp_path / "whole"), with_vectors, corpus)
    num_all, expected = num_changes, content(RunFolder(tmp_path / "whole"))
    assert num_all > 15
    for last in range(num_all):
        killed = RunFolder(tmp_path / str(last))
        num_changes, last_change = 0, last
        with pytest.raises(_Killed):
            start_run(killed, with_vectors, corpus)
        last_change = math.inf
        assert not killed.is_run
        start_run(killed, with_vectors, corpus)
        assert content(killed) == expected


def test_dev_pairs_in_the_training_corpus_are_a_warning(
    folder: RunFolder, preset: Preset, corpus: Corpus, caplog: pytest.LogCaptureFixture
) -> None:
    mixed = dataclasses.replace(corpus, train=[*corpus.train, *corpus.dev[:2], corpus.dev[0]])
    start_run(folder, preset, mixed)
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert told == [f"2 of {len(corpus.dev)} dev pairs are in the training corpus, too"]


def test_unusable_settings_are_refused_before_the_corpus_is_read(
    tmp_path: Path, preset: Preset, corpus: Corpus
) -> None:
    never_read = dataclasses.replace(corpus, train=_Unreadable())
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is a file, and a run needs a folder"):
        start_run(RunFolder(tmp_path / "file"), preset, never_read)
    missing = str(tmp_path / "missing.vec")
    with pytest.raises(FileNotFoundError, match=r"missing\.vec"):
        start_run(RunFolder(tmp_path / "run"), preset.changed({"source_vectors": missing}), never_read)
    with pytest.raises(ValueError, match="a vocabulary of 259 is too small"):
        start_run(RunFolder(tmp_path / "run"), preset.changed({"vocab_size": 259}), never_read)


class _Unreadable(list[SentencePair]):
    def __iter__(self) -> Iterator[SentencePair]:
        raise AssertionError("the corpus was read")


def test_a_finished_run_is_not_trained_again(
    folder: RunFolder, preset: Preset, corpus: Corpus, console: Console
) -> None:
    start_run(folder, preset, corpus)
    first = continue_run(folder, corpus, CPU, console)
    before = folder.model_file.stat().st_mtime_ns
    assert continue_run(folder, corpus, CPU, console) == first
    assert folder.model_file.stat().st_mtime_ns == before


def test_a_run_that_another_process_started_meanwhile_stays_as_it_is(
    folder: RunFolder, preset: Preset, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokenizer, pairs and config were written anew while it trained; only then the folder was locked."""
    learn = prepare._learn_tokenizer

    def learn_late(*arguments: Any) -> Tokenizer:
        monkeypatch.setattr(prepare, "_learn_tokenizer", learn)
        start_run(folder, preset, corpus)
        return learn(*arguments)

    monkeypatch.setattr(prepare, "_learn_tokenizer", learn_late)
    with pytest.raises(ValueError, match="already holds a run"):
        start_run(folder, preset, corpus)
    folder.config_file.unlink()
    with folder.locked(), pytest.raises(ValueError, match="another process trains in"):
        start_run(folder, preset, corpus)
    assert not folder.is_run


def test_a_run_that_stopped_early_resumes_only_with_settings_that_allow_more_steps(
    folder: RunFolder, preset: Preset, corpus: Corpus, console: Console
) -> None:
    start_run(folder, preset.changed({"eval_interval_steps": 2, "patience": 1, "max_steps": 50}), corpus)
    stopped = continue_run(folder, corpus, CPU, console).steps
    assert stopped < 50
    before = folder.config_file.read_bytes()
    assert continue_run(folder, corpus, CPU, console, {"precision": "bf16"}).steps == stopped
    assert folder.config_file.read_bytes() == before
    # Patience begins anew, and in a cool-down there is no end to it.
    later = continue_run(folder, corpus, CPU, console, {"max_steps": 51}).steps
    assert stopped < later < 51
    assert continue_run(folder, corpus, CPU, console, {"max_steps": 52, "cooldown_share": 0.9}).steps == 52
    with pytest.raises(ValueError, match=r"all its 52 steps: to cool down it needs more of them"):
        continue_run(folder, corpus, CPU, console, {"cooldown_share": 0.5})


def test_a_run_records_the_commits_that_trained_it(
    folder: RunFolder, preset: Preset, corpus: Corpus, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = []
    start_run(folder, preset, corpus)
    for commit, max_steps in (("first", 5), ("second", 8), ("second", 9)):
        monkeypatch.setattr(prepare, "repository_commit", lambda commit=commit: commit)
        continue_run(folder, corpus, CPU, console, {"max_steps": max_steps})
        commits.append(folder.read_config().commit)
    assert commits == ["first", "first, from step 5 second", "first, from step 5 second"]


def test_a_run_cannot_stop_before_the_steps_done_and_stays_as_it_was(
    folder: RunFolder, preset: Preset, corpus: Corpus, console: Console
) -> None:
    start_run(folder, preset, corpus)
    continue_run(folder, corpus, CPU, console)
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="has done 20 steps, and cannot stop at step 19 any more"):
        continue_run(folder, corpus, CPU, console, {"max_steps": 19})
    assert {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()} == before


def test_checkpoints_of_another_model_are_refused_on_resume(
    folder: RunFolder, preset: Preset, corpus: Corpus, console: Console
) -> None:
    config = start_run(folder, preset, corpus)
    continue_run(folder, corpus, CPU, console)
    folder.write_config(dataclasses.replace(config, model=dataclasses.replace(config.model, d_ff=32)))
    with pytest.raises(ValueError, match=r"step-00000020\.pt: the weights of a model with d_ff 64, "):
        continue_run(folder, corpus, CPU, console, {"max_steps": 25})


def test_a_run_of_an_older_commit_or_without_its_encoded_corpus_goes_on(
    folder: RunFolder, preset: Preset, corpus: Corpus, console: Console
) -> None:
    start_run(folder, preset, corpus)
    continue_run(folder, corpus, CPU, console)
    shutil.rmtree(folder.encoded)
    content = json.loads(folder.config_file.read_text())
    for field in ("micro_batch_tokens", "precision", "drop_copies"):
        del content["training"][field]
    folder.config_file.write_text(json.dumps(content))
    assert continue_run(folder, corpus, CPU, console, {"max_steps": 25}).steps == 25
    assert len(EncodedCorpus(folder.encoded)) == len(corpus.train)


def test_a_run_goes_on_without_the_files_that_it_was_started_with(
    folder: RunFolder, preset: Preset, corpus: Corpus, console: Console, tmp_path: Path
) -> None:
    files = CorpusFiles(tsv=str(tmp_path / "a.tsv"), dev_tsv=str(tmp_path / "b.tsv"))
    for name, pairs in (("a", corpus.train), ("b", corpus.dev)):
        write_lines(tmp_path / f"{name}.tsv", ["\t".join(pair) for pair in pairs])
    start_run(folder, preset, load_corpus(files, seed=0), files)
    (tmp_path / "a.tsv").unlink()
    assert continue_run(folder, None, CPU, console).steps == 20
    shutil.rmtree(folder.encoded)
    assert continue_run(folder, None, CPU, console).steps == 20  # finished
    with pytest.raises(FileNotFoundError, match=r"a\.tsv"):
        continue_run(folder, None, CPU, console, {"max_steps": 25})


def test_drop_copies_drops_pairs_of_equal_sides(
    folder: RunFolder, preset: Preset, corpus: Corpus, caplog: pytest.LogCaptureFixture
) -> None:
    copies = (*corpus.train, SentencePair("same", "same"))
    recipe = dataclasses.replace(preset.training, drop_copies=True)
    with caplog.at_level("INFO"):
        start_run(
            folder, dataclasses.replace(preset, training=recipe), dataclasses.replace(corpus, train=copies)
        )
    assert len(EncodedCorpus(folder.encoded)) == len(corpus.train)
    assert re.search(r"dropped: copies +1\n", caplog.text)


def test_resume_falls_back_to_the_newest_whole_checkpoint_with_a_log_line(
    folder: RunFolder, preset: Preset, corpus: Corpus, console: Console, caplog: pytest.LogCaptureFixture
) -> None:
    start_run(folder, preset, corpus)
    continue_run(folder, corpus, CPU, console)
    newest = list_checkpoints(folder.checkpoints)[-1]
    assert newest == checkpoint_path(folder.checkpoints, 20)
    newest.write_bytes(newest.read_bytes()[:5000])
    folder.summary_file.unlink()
    with caplog.at_level("INFO"):
        continue_run(folder, corpus, CPU, console)
    assert f"checkpoint skipped: {newest}: damaged or half-written" in caplog.text
    assert "continuing after step 15" in caplog.text


def test_pairs_that_cannot_be_scored_are_left_out(folder: RunFolder, preset: Preset, corpus: Corpus) -> None:
    dev = (SentencePair("", "empty"), SentencePair("하나 " * 40, "long"), *corpus.dev)
    start_run(folder, preset, dataclasses.replace(corpus, dev=dev))
    assert folder.read_pairs("dev") == list(corpus.dev)


def test_a_corpus_with_nothing_to_score_or_to_train_on_is_refused(
    tmp_path: Path, preset: Preset, corpus: Corpus, console: Console
) -> None:
    with pytest.raises(ValueError, match="none of 1 dev pairs is left: nothing to score"):
        start_run(
            RunFolder(tmp_path / "a"), preset, dataclasses.replace(corpus, dev=(SentencePair(" ", "a"),))
        )
    with pytest.raises(ValueError, match="has 0 pairs and no text: nothing to train on"):
        start_run(RunFolder(tmp_path / "b"), preset, dataclasses.replace(corpus, train=()))
    assert list(tmp_path.iterdir()) == []
    too_long = dataclasses.replace(corpus, train=(SentencePair("word " * 30, "a b"),))
    start_run(RunFolder(tmp_path / "c"), preset, too_long)
    with pytest.raises(ValueError, match="0 pairs left: nothing to train on"):
        continue_run(RunFolder(tmp_path / "c"), too_long, CPU, console)


def test_the_tokenizer_learns_from_what_is_text_only(
    tmp_path: Path, folder: RunFolder, preset: Preset, corpus: Corpus
) -> None:
    far_too_long = SentencePair("z" * 1000, "zzzz")
    start_run(folder, preset, dataclasses.replace(corpus, train=(*corpus.train, far_too_long)))
    other = RunFolder(tmp_path / "other")
    start_run(other, preset, corpus)
    assert folder.tokenizer_file.read_bytes() == other.tokenizer_file.read_bytes()


def test_the_tokenizer_learns_from_pairs_of_all_places_of_a_very_large_corpus(
    tmp_path: Path, folder: RunFolder, preset: Preset, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(corpus.train) == 32
    other = RunFolder(tmp_path / "other")
    start_run(other, preset, dataclasses.replace(corpus, train=corpus.train[::4]))
    monkeypatch.setattr(prepare, "_MAX_TOKENIZER_PAIRS", 10)
    start_run(folder, preset, corpus)
    assert folder.tokenizer_file.read_bytes() == other.tokenizer_file.read_bytes()


@pytest.fixture
def with_vectors(preset: Preset, tmp_path: Path) -> Preset:
    """The toy preset, whose embeddings of four words start as vectors of a file."""
    file = tmp_path / "vectors.txt"
    rows = {"one": 1.0, "two": 2.0, "하나": 3.0, "둘": 4.0}
    file.write_text("".join(f"{word}{f' {value}' * 32}\n" for word, value in rows.items()), encoding="utf-8")
    model = {"tied": "target", "vocab_size": 320}
    return preset.changed(model | {"source_vectors": str(file), "target_vectors": str(file)})


RECURRENT = RecurrentConfig(320, 32, 16, 1, 1, tied="target", max_source_length=24, max_target_length=24)


@pytest.mark.parametrize(("are_frozen", "model"), [(False, None), (True, None), (True, RECURRENT)])
def test_embeddings_start_as_the_words_of_a_file_and_stay_so_if_frozen(
    folder: RunFolder,
    with_vectors: Preset,
    corpus: Corpus,
    console: Console,
    are_frozen: bool,
    model: RecurrentConfig | None,
    tmp_path: Path,
) -> None:
    if model:
        with_vectors = dataclasses.replace(with_vectors, model=model)
    preset = with_vectors.changed({"are_vectors_frozen": are_frozen, "max_steps": 3})
    start_run(folder, preset, corpus)
    (tmp_path / "vectors.txt").unlink()  # the run has what it needs
    continue_run(folder, corpus, CPU, console)
    continue_run(folder, corpus, CPU, console, {"max_steps": 6})  # from a checkpoint
    trained = load_run(folder.path)
    matrices = {"source": trained.model.source_weight, "target": trained.model.embedding.weight}
    for side, matrix in matrices.items():
        vectors = PieceVectors.load(folder.vectors_file(side))
        assert {trained.tokenizer.decode([id_]).strip() for id_ in vectors.ids.tolist()} >= {"one", "하나"}
        assert torch.equal(matrix[vectors.ids], vectors.vectors) == are_frozen
        # Six steps of a warm-up move a weight little from where it started.
        assert (matrix[vectors.ids] - vectors.vectors).abs().max() < 0.1
    torch.manual_seed(preset.training.seed)
    start = make_model(trained.config).embedding.weight
    is_free = torch.ones(len(start), dtype=torch.bool)
    is_free[vectors.ids] = False
    assert (trained.model.embedding.weight != start)[is_free].float().mean() > 0.9


def test_a_run_with_wrong_vectors_is_not_started(
    folder: RunFolder, with_vectors: Preset, corpus: Corpus, tmp_path: Path
) -> None:
    (tmp_path / "vectors.txt").write_text("one 1 2\n")
    with pytest.raises(ValueError, match=r"vectors\.txt, line 1: vectors of 2 numbers, but d_model is 32"):
        start_run(folder, with_vectors, corpus)
    assert not folder.path.exists()


def test_a_run_starts_as_the_one_it_is_given(
    tmp_path: Path, folder: RunFolder, preset: Preset, corpus: Corpus, console: Console
) -> None:
    start_run(folder, preset, corpus)
    continue_run(folder, corpus, CPU, console)
    parent = load_run(folder.path)
    shutil.rmtree(folder.path)  # the new run has what it needs
    child, few = RunFolder(tmp_path / "child"), dataclasses.replace(corpus, train=corpus.train[:9])
    # Steps that are too small to change a weight show what it started as.
    other = dataclasses.replace(preset, model=parent.config)
    other = other.changed({"dropout": 0.3, "learning_rate_scale": 1e-20, "seed": 5, "max_steps": 1})
    start_run(child, other, few, parent=parent)
    for _ in range(2):
        continue_run(child, few, CPU, console)
        trained = load_run(child.path)
        assert trained.tokenizer.to_json() == parent.tokenizer.to_json()
        assert trained.config == dataclasses.replace(parent.config, dropout=0.3)
        weights = trained.model.state_dict()
        assert all(torch.equal(weights[name], value) for name, value in parent.model.state_dict().items())
        child.summary_file.unlink()  # and once more, from the checkpoint
    assert corpus.sha256() in trained.provenance["parent"]
    assert parent.provenance["weights"] in trained.provenance["parent"]
    # Where the checkpoints are gone, too, a run starts again as it did.
    for file in list_checkpoints(child.checkpoints):
        file.unlink()
    continue_run(child, few, CPU, console)
    assert torch.equal(load_run(child.path).model.embedding.weight, parent.model.embedding.weight)


def test_a_start_removes_files_of_an_interrupted_one(
    folder: RunFolder, preset: Preset, corpus: Corpus, console: Console
) -> None:
    folder.path.mkdir()
    for file in folder.optional_files:
        file.write_text("of another start")
    start_run(folder, preset, dataclasses.replace(corpus, test=()))
    assert not [file for file in folder.optional_files if file.exists()]
    continue_run(folder, None, CPU, console, {"max_steps": 1})


def test_a_run_cannot_start_as_one_of_other_sizes(
    folder: RunFolder, tmp_path: Path, preset: Preset, corpus: Corpus, console: Console
) -> None:
    start_run(folder, preset, corpus)
    continue_run(folder, corpus, CPU, console, {"max_steps": 1})
    parent = load_run(folder.path)
    preset = dataclasses.replace(preset, model=parent.config)
    child = RunFolder(tmp_path / "child")
    with pytest.raises(ValueError, match="norm is post in the run to start from, and cannot become pre: "):
        start_run(child, preset.changed({"norm": "pre"}), corpus, parent=parent)
    with pytest.raises(ValueError, match=r"normalization is nfc in .* become nfkc"):
        start_run(child, preset.changed({"normalization": "nfkc"}), corpus, parent=parent)
    with pytest.raises(ValueError, match=rf"vocab_size is {parent.config.vocab_size} in .* become 299"):
        start_run(child, preset.changed({"vocab_size": 299}), corpus, parent=parent)
    other = dataclasses.replace(preset, model=RECURRENT)
    with pytest.raises(ValueError, match=r"kind is transformer in .* become recurrent: .* attention_dropout"):
        start_run(child, other, corpus, parent=parent)
    with pytest.raises(ValueError, match="leave the word vectors out"):
        start_run(child, preset.changed({"source_vectors": "x"}), corpus, parent=parent)
    assert not child.path.exists()
