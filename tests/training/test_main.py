import dataclasses
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.export.exporter import export_bundle
from seq2seq_serve.training import distill
from seq2seq_serve.training.__main__ import main
from seq2seq_serve.training.commands import TrainRequest
from seq2seq_serve.training.config import EOS_ID, TransformerConfig
from seq2seq_serve.training.data.batches import BatchShare
from seq2seq_serve.training.data.corpus import CorpusFiles
from seq2seq_serve.training.evaluation.scoring import translate
from seq2seq_serve.training.loop import Trainer
from seq2seq_serve.training.presets import PRESETS, Preset
from seq2seq_serve.training.run import RunFolder, load_run


@pytest.fixture(autouse=True)
def _toy_preset(monkeypatch: pytest.MonkeyPatch, preset: Preset) -> None:
    monkeypatch.setitem(PRESETS, "toy", lambda: preset)
    # Threads of matrices this small wait for each other, on busy cores for most of the time.
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)


@pytest.fixture(scope="module")
def trained() -> dict[str, Path]:
    """Once there is one: a run that the command trained."""
    return {}


@pytest.fixture
def run(
    trained: dict[str, Path],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    corpus_files: list[str],
    capsys: pytest.CaptureFixture[str],
) -> Path:
    """A copy of a run that the command trained."""
    if not trained:
        out = tmp_path_factory.mktemp("trained") / "run"
        assert main(["train", "toy", "--out", str(out), "--threads", "1", *corpus_files]) == 0
        captured = capsys.readouterr()
        assert captured.out.startswith(f"{out}: dev BLEU ")
        assert "20 steps" in captured.out
        trained["run"] = out
    return Path(shutil.copytree(trained["run"], tmp_path / "run"))


Failed = Callable[..., str]


@pytest.fixture
def failed(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Failed:
    """Runs a command that fails; returns its one message."""

    def failed(*arguments: str) -> str:
        capsys.readouterr()
        caplog.clear()
        assert main(arguments) == 1
        (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
        assert record.exc_info is None
        assert capsys.readouterr().out == ""
        return record.getMessage()

    return failed


def test_train_leaves_a_run_and_a_second_start_is_refused(
    run: Path, corpus_files: list[str], failed: Failed
) -> None:
    assert load_run(run).provenance["preset"] == "toy"
    message = failed("train", "toy", "--out", str(run), *corpus_files)
    assert message == (
        f"{run} already holds a run: continue it with `python -m training train toy --out {run} --resume`, "
        "or give another --out"
    )


def test_resume_needs_no_corpus_flags_and_can_go_further(
    run: Path, capsys: pytest.CaptureFixture[str], failed: Failed
) -> None:
    assert main(["train", "toy", "--out", str(run), "--resume", "--max-steps", "25"]) == 0
    assert "25 steps" in capsys.readouterr().out
    message = failed("train", "demo", "--out", str(run), "--resume")
    assert message == f"{run} was started with the preset toy, not demo"


def test_a_run_is_fine_tuned(
    run: Path, tmp_path: Path, corpus_files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tuned"
    flags = ["--from", str(run), "--max-steps", "2", "--set", "dropout=0.2"]
    assert main(["train", "demo", "--out", str(out), *corpus_files, *flags]) == 0
    tuned, parent = load_run(out), load_run(run)
    assert (tuned.config.d_model, tuned.config.dropout) == (parent.config.d_model, 0.2)  # not of the demo
    assert tuned.provenance["parent"].startswith("weights: ")
    assert tuned.tokenizer.normalization == "nfc"
    assert capsys.readouterr().out.startswith(f"{out}: dev BLEU ")


def test_a_fine_tuning_resumes_with_its_command_and_refuses_another_parent(
    run: Path, tmp_path: Path, corpus_files: list[str], capsys: pytest.CaptureFixture[str], failed: Failed
) -> None:
    out = tmp_path / "tuned"
    flags = ["--out", str(out), *corpus_files, "--max-steps", "2", "--resume", "--from"]
    for _ in range(2):
        assert main(["train", "demo", *flags, str(run)]) == 0
        RunFolder(out).summary_file.unlink()
    capsys.readouterr()
    shutil.copytree(run, tmp_path / "further")
    assert main(["train", "toy", "--out", str(tmp_path / "further"), "--resume", "--max-steps", "21"]) == 0
    message = failed("train", "demo", *flags, str(tmp_path / "further"))
    assert message == f"{out} was not started with the weights of --from: leave it out"


def test_a_draft_model_learns_what_its_run_writes_and_has_its_tokens(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], failed: Failed
) -> None:
    out = tmp_path / "draft"
    flags = ["--out", str(out), "--max-steps", "2", "--max-sources", "30", "--set", "d_ff=16"]
    assert main(["distill", str(run), "toy", *flags]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: dev ")
    teacher, draft = load_run(run), load_run(out)
    assert draft.tokenizer.token_bytes == teacher.tokenizer.token_bytes
    assert (draft.config.d_ff, draft.config.vocab_size) == (16, teacher.config.vocab_size)
    targets_file = out / "distilled" / "train.target.txt"
    assert 15 <= targets_file.read_text(encoding="utf-8").count("\n") <= 30
    sources, targets = zip(*draft.dev, strict=True)
    bound = teacher.length_bound
    assert list(targets) == translate(teacher.model, teacher.tokenizer, sources, length_bound=bound)
    assert main(["train", "toy", "--out", str(out), "--resume", "--max-steps", "3"]) == 0
    message = failed("distill", str(run), "toy", *flags)
    assert message.startswith(f"{out} already holds a run")
    flags[1] = str(tmp_path / "other")
    message = failed("distill", str(run), "toy", *flags, "vocab_size=300")
    assert message == "a draft model takes vocab_size from its run: leave out what --set gives"
    # An interrupted start goes on after the targets that it has written.
    shutil.copytree(targets_file.parent, tmp_path / "other" / "distilled")
    kept = targets_file.read_text(encoding="utf-8").replace("o", "0").split("\n")[:9]
    (tmp_path / "other" / "distilled" / "train.target.txt").write_text("\n".join(kept), encoding="utf-8")
    message = failed("train", "toy", "--out", str(tmp_path / "other"), "--resume", "--max-steps", "2")
    assert message.endswith("is the beginning of a draft model: repeat its `distill` command")
    few = [*flags, "--max-sources", "5"]  # it removed them
    assert "has 8 targets, for another --max-sources" in failed("distill", str(run), "toy", *few)
    assert main(["distill", str(run), "toy", *flags]) == 0
    written = (tmp_path / "other" / "distilled" / "train.target.txt").read_text(encoding="utf-8").split("\n")
    assert written[:8] == kept[:8] != targets_file.read_text(encoding="utf-8").split("\n")[:8]
    assert written[8:] == targets_file.read_text(encoding="utf-8").split("\n")[8:]
    flags[1] = str(tmp_path / "third")
    shutil.copytree(tmp_path / "other" / "distilled", tmp_path / "third" / "distilled")
    (tmp_path / "third" / "distilled" / "weights.sha256").write_text("of other weights", encoding="utf-8")
    assert main(["distill", str(run), "toy", *flags]) == 0
    targets = (tmp_path / "third" / "distilled" / "train.target.txt").read_text(encoding="utf-8")
    assert targets == targets_file.read_text(encoding="utf-8")
    flags[1] = str(tmp_path / "fourth")
    (tmp_path / "fourth" / "distilled").mkdir(parents=True)
    (tmp_path / "fourth" / "distilled" / "mine.txt").write_text("mine", encoding="utf-8")
    assert "that `distill` did not write" in failed("distill", str(run), "toy", *flags)
    assert (tmp_path / "fourth" / "distilled" / "mine.txt").exists()
    flags[1] = str(tmp_path / "fifth")
    with pytest.raises(SystemExit, match="2"):
        main(["distill", str(run), "recurrent", *flags])
    assert re.search("'?demo'?, '?tiny'?, '?small'?, '?base'?, '?big'?, '?toy'?\\)", capsys.readouterr().err)
    shutil.copytree(run, tmp_path / "copy", ignore=shutil.ignore_patterns("encoded"))
    assert "there is nothing to translate" in failed("distill", str(tmp_path / "copy"), "toy", *flags)


@pytest.mark.parametrize(("signal_number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_draft_model_is_warned_of_before_its_targets_and_a_signal_says_how_to_go_on(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    signal_number: int,
    exit_code: int,
) -> None:
    """SIGTERM printed nothing, and that the training ends before the warm-up came after the targets."""

    def interrupted(*_: object, **__: object) -> list[str]:
        signal.raise_signal(signal_number)
        return []

    monkeypatch.setattr(distill, "translate", interrupted)
    flags = ["--out", str(tmp_path / "draft"), "--max-steps", "1", "--set", "warmup_steps=4000"]
    assert main(["distill", str(run), "toy", *flags]) == exit_code
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [
        "the learning rate rises for 4,000 steps, and training ends after 1: set warmup_steps, too",
        "interrupted; the same command goes on after the targets that are written",
    ]
    assert re.search(r"translating \d+ dev sources", capsys.readouterr().err)


@pytest.fixture
def whole_command(tmp_path: Path, corpus_files: list[str]) -> list[str]:
    """A command that decides everything of a run, and gives more room to the vocabulary than it takes."""
    flags = ["--resume", *corpus_files, "--seed", "3", "--vocab-size", "5000", "--max-steps", "12"]
    return ["train", "toy", "--out", str(tmp_path / "run"), *flags, "--set", "dropout=0.2", "patience=null"]


def test_one_command_starts_a_run_continues_it_and_leaves_it_when_it_is_finished(
    tmp_path: Path,
    whole_command: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    failed: Failed,
) -> None:
    folder, step = RunFolder(tmp_path / "run"), Trainer.train_step
    assert main(whole_command) == 0
    (warning, *_) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(f"{folder.path} has no run yet: starting one on source.txt, target.txt, ")
    assert folder.read_config().model.vocab_size < 5000
    weights = load_run(folder.path).model.state_dict()
    shutil.rmtree(folder.path)

    def killed(self: Trainer, share: BatchShare) -> tuple[torch.Tensor, torch.Tensor]:
        if self.step == 7:
            raise _Killed
        return step(self, share)

    monkeypatch.setattr(Trainer, "train_step", killed)
    with pytest.raises(_Killed):
        main(whole_command)
    monkeypatch.setattr(Trainer, "train_step", step)
    caplog.clear()
    with caplog.at_level("INFO"):
        assert main(whole_command) == 0
        assert "continuing after step 5" in caplog.text
        assert main(whole_command) == 0
    assert "run is finished: nothing to do" in caplog.text
    continued = load_run(folder.path).model.state_dict()
    assert all(torch.equal(weights[name], continued[name]) for name in weights | continued)
    message = failed(*whole_command, "tied=none", "--seed", "4", "--vocab-size", "4000")
    assert message.startswith(
        "--resume cannot change tied from all to none, seed from 3 to 4, vocab_size from 5000 to 4000: "
    )


def test_a_run_older_than_the_room_of_its_vocabulary_goes_on_with_its_command(
    tmp_path: Path, whole_command: list[str], failed: Failed
) -> None:
    folder = RunFolder(tmp_path / "run")
    assert main(whole_command) == 0
    folder.write_config(dataclasses.replace(folder.read_config(), max_vocab_size=None))
    assert main([*whole_command, "--max-steps", "14"]) == 0
    message = failed(*whole_command, "--seed", "4")
    assert message.startswith("--resume cannot change seed from 3 to 4: ")


class _Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def test_a_corpus_is_read_again_only_where_it_may_be_another(
    tmp_path: Path, whole_command: list[str], capsys: pytest.CaptureFixture[str], failed: Failed
) -> None:
    assert main(whole_command) == 0
    source = tmp_path / "source.txt"
    lines = source.read_text(encoding="utf-8").splitlines()
    capsys.readouterr()
    for text, is_newer, is_refused in (
        (lines, True, False),
        (lines[::-1], False, False),
        (lines[::-1], True, True),
        (None, False, False),
    ):
        source.unlink()
        if text:
            source.write_text("\n".join(text) + "\n", encoding="utf-8")
            encoded_at = RunFolder(tmp_path / "run").encoded.stat().st_mtime
            os.utime(source, (encoded_at + (1 if is_newer else -1),) * 2)
        if is_refused:
            assert "is not the corpus that" in failed(*whole_command)
        else:
            assert main(whole_command) == 0
            capsys.readouterr()


def test_a_model_that_cannot_be_compiled_is_refused_before_anything_is_written(
    tmp_path: Path, corpus_files: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "run"
    assert main(["train", "recurrent", "--out", str(out), "--compile", *corpus_files]) == 1
    assert "leave out --compile" in caplog.text
    assert not out.exists()


def test_seed_vocabulary_and_normalization_are_the_flags(
    tmp_path: Path, corpus_files: list[str], failed: Failed
) -> None:
    out = tmp_path / "run"
    flags = ["--max-steps", "1", "--seed", "5", "--vocab-size", "265", "--normalization", "nfkc"]
    flags += ["--source-language", "ko", "--target-language", "en", "--device", "cpu", "--threads", "1"]
    assert main(["train", "toy", "--out", str(out), *corpus_files, *flags]) == 0
    config = RunFolder(out).read_config()
    assert (config.training.seed, config.model.vocab_size, config.training.max_steps) == (5, 265, 1)
    assert config.training.normalization == load_run(out).tokenizer.normalization == "nfkc"
    assert (load_run(out).source_language, load_run(out).target_language) == ("ko", "en")
    flags = ["--from", str(out), "--normalization", "none"]
    message = failed("train", "toy", "--out", str(tmp_path / "b"), *corpus_files, *flags)
    assert message.startswith("normalization is nfkc in the run to start from, and cannot become none")


@pytest.mark.parametrize(
    ("preset", "files", "settings", "languages"),
    [
        ("demo", CorpusFiles(), {}, ("ko", "en")),
        ("recurrent", CorpusFiles(), {"target_language": "en-GB"}, ("ko", "en-GB")),
        ("demo", CorpusFiles(tsv="my.tsv"), {}, (None, None)),
        ("memory-network", CorpusFiles(), {}, (None, None)),
    ],
)
def test_the_built_in_corpus_of_texts_has_its_languages(preset, files, settings, languages) -> None:
    """A server of the demo's model listed no language for LibreTranslate's programs."""
    recipe = TrainRequest(preset, Path("run"), files, settings).configuration().training
    assert (recipe.source_language, recipe.target_language) == languages


def test_any_setting_of_the_preset_can_be_changed_and_is_kept_for_a_resume(
    tmp_path: Path, corpus_files: list[str], failed: Failed
) -> None:
    out = tmp_path / "run"
    flags = ["--max-steps", "1", "--set", "bpe_dropout=.1", "bpe_dropout=.3", "patience=None"]
    flags += ["--set", "tied=none"]
    assert main(["train", "toy", "--out", str(out), *corpus_files, *flags]) == 0
    config = RunFolder(out).read_config()
    assert (config.training.bpe_dropout, config.training.patience, config.model.tied) == (0.3, None, "none")
    assert main(["train", "toy", "--out", str(out), "--resume", "--max-steps", "2"]) == 0
    assert RunFolder(out).read_config().training.bpe_dropout == 0.3
    message = failed("train", "toy", "--out", str(out), "--resume", "--set", "tied=all")
    assert message.startswith("--resume cannot change tied from none to all: fixed when the run was started")
    changes = ["--max-steps", "3", "--precision", "bf16", "--micro-batch-tokens", "20"]
    changes += ["--set", "patience=7", "cooldown_share=0.2"]
    assert main(["train", "toy", "--out", str(out), "--resume", *changes]) == 0
    recipe = RunFolder(out).read_config().training
    assert (recipe.max_steps, recipe.precision, recipe.micro_batch_tokens) == (3, "bf16", 20)
    assert (recipe.patience, recipe.cooldown_share) == (7, 0.2)


def test_score_translates_a_runs_pairs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{run}, dev pairs, beam 1, 4 sentences"
    assert lines[1].startswith(f"BLEU {load_run(run).dev_score:.2f} (95 % of resampled sets: ")
    flags = ["--part", "dev", "--beam-size", "2", "--tokenize", "none", "--lowercase", "--bootstrap", "0"]
    assert main(["score", str(run), *flags]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{run}, dev pairs, beam 2, alpha 0.6, 4 sentences\nBLEU ")
    assert "case:lc|eff:no|tok:none" in printed
    assert "resampled" not in printed


def test_several_references_of_a_source_score_one_target(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The source was translated for each of its references, and each target scored against one."""
    folder = RunFolder(run)
    first, second, *_ = folder.read_pairs("dev")
    trained = load_run(run)
    (target,) = translate(trained.model, trained.tokenizer, [first.source], length_bound=trained.length_bound)
    folder.write_pairs("dev", [first, second, first._replace(target=target)])
    assert main(["score", str(run)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{run}, dev pairs, beam 1, 2 sentences\n")
    assert "nrefs:var|" in printed
    folder.write_pairs("dev", [first, first._replace(target=target)])
    assert main(["score", str(run), "--bootstrap", "0"]) == 0
    assert "\nchrF2 100.00\n" in capsys.readouterr().out


def test_score_translates_a_file_with_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, reference = RunFolder(run).text_files("dev")
    assert main(["score", str(run), "--source", str(source), "--reference", str(reference)]) == 0
    first, bleu, *_ = capsys.readouterr().out.splitlines()
    assert first == f"{run}, {source}, beam 1, 4 sentences"
    assert bleu.startswith(f"BLEU {load_run(run).dev_score:.2f} (95 % of resampled sets: ")


def test_a_checkpoint_is_looked_at_while_its_run_is_trained(run: Path, failed: Failed) -> None:
    RunFolder(run).summary_file.unlink()
    RunFolder(run).model_file.unlink()
    assert "training has not finished" in failed("score", str(run))
    assert main(["score", str(run), "--step", "20", "--bootstrap", "0"]) == 0
    assert main(["attention", str(run), "하나 둘", "--step", "20"]) == 0
    assert main(["attention", str(run), "하나 둘", "--step", "20", "--encoder"]) == 0
    message = failed("attention", str(run), "하나", "--step", "7")
    assert "has no checkpoint of step 7; it has those of " in message


def test_a_sentence_that_is_too_long_for_a_run_is_named(run: Path, tmp_path: Path, failed: Failed) -> None:
    (tmp_path / "source").write_text("하나\n" + "하나 둘 " * 500 + "\n")
    (tmp_path / "reference").write_text("one\ntwo\n")
    files = ["--source", str(tmp_path / "source"), "--reference", str(tmp_path / "reference")]
    for beam_size in ("1", "2"):
        message = failed("score", str(run), *files, "--beam-size", beam_size)
        assert message.startswith(f"{tmp_path / 'source'}, line 2: a source has ")


def test_sources_and_references_of_different_lengths_are_refused(
    run: Path, tmp_path: Path, failed: Failed
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text("하나\n둘\n")
    b.write_text("one\n")
    message = failed("score", str(run), "--source", str(a), "--reference", str(b))
    assert message == f"the files have different numbers of lines: {a} has 2, {b} has 1"


def test_attention_prints_the_alignment_and_writes_json_and_an_image(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, image_file = tmp_path / "alignment.json", tmp_path / "alignment.png"
    assert main(["attention", str(run), "하나 둘", "--json", str(file), "--png", str(image_file)]) == 0
    content = json.loads(file.read_text())
    source, target = content["source_tokens"], content["target_tokens"]
    assert source[-1] == target[-1] == "<eos>"
    assert "".join(source[:-1]) == "하나 둘"
    assert len(content["weights"]) == len(target)
    for row in content["weights"]:
        assert len(row) == len(source)
        assert sum(row) == pytest.approx(1, abs=1e-5)
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(target)
    assert image_file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("is_bounded", [True, False])
def test_the_alignment_of_a_target_that_does_not_end_ends_at_the_bound_or_with_the_model(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_bounded: bool
) -> None:
    trained, file = load_run(run), tmp_path / "alignment.json"
    limit = trained.config.max_target_length - 1
    if is_bounded:
        assert trained.length_bound is not None
        limit = trained.length_bound.max_new_tokens(len(trained.tokenizer.encode_source("하나 둘")))
        assert limit < trained.config.max_target_length - 1
    else:
        trained = dataclasses.replace(trained, length_bound=None)
    with torch.no_grad():
        trained.model.embedding.weight[EOS_ID] = 0  # another token is always more probable
    monkeypatch.setattr("seq2seq_serve.training.commands.load_run", lambda _: trained)
    assert main(["attention", str(run), "하나 둘", "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    assert "<eos>" not in content["target_tokens"]
    assert len(content["weights"]) == len(content["target_tokens"]) == limit


def test_attention_of_the_encoder_is_every_layer_and_head(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, image_file = tmp_path / "heads.json", tmp_path / "heads.png"
    command = ["attention", str(run), "하나 둘", "--encoder", "--json", str(file)]
    assert main([*command, "--png", str(image_file)]) == 0
    content = json.loads(file.read_text())
    tokens = content["tokens"]
    assert (content["layers"], content["heads"]) == ([1, 2], [1, 2])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["layer", "head", "itself", "before", "after", "<eos>"]
    for line, (layer, head) in zip(lines[1:], [(1, 1), (1, 2), (2, 1), (2, 2)], strict=True):
        rows = content["weights"][layer - 1][head - 1]
        assert all(len(row) == len(rows) == len(tokens) for row in rows)
        means = [
            sum(rows[i][i] for i in range(len(rows))) / len(rows),
            sum(rows[i + 1][i] for i in range(len(rows) - 1)) / (len(rows) - 1),
            sum(rows[i][i + 1] for i in range(len(rows) - 1)) / (len(rows) - 1),
            sum(row[-1] for row in rows) / len(rows),
        ]
        assert line[:2] == [str(layer), str(head)]
        assert [float(number) for number in line[2:]] == pytest.approx(means, abs=0.0051)
    assert image_file.read_bytes().startswith(b"\x89PNG")


def test_one_layer_or_one_head_of_the_encoder_can_be_chosen(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = []
    for choice in ([], ["--layer", "2"], ["--head", "1"], ["--layer", "2", "--head", "1"]):
        capsys.readouterr()
        file = tmp_path / "heads.json"
        assert main(["attention", str(run), "하나 둘", "--encoder", *choice, "--json", str(file)]) == 0
        contents.append(json.loads(file.read_text()))
    every, layer, head, one = contents
    assert (layer["layers"], layer["heads"]) == ([2], [1, 2])
    assert (head["layers"], head["heads"]) == ([1, 2], [1])
    assert layer["weights"] == every["weights"][1:]
    assert head["weights"] == [heads[:1] for heads in every["weights"]]
    assert one["weights"] == [[every["weights"][1][0]]]
    # Of one head each piece stands in a line, with what it attends to most.
    printed = capsys.readouterr().out.splitlines()
    for line, token, row in zip(printed, one["tokens"], one["weights"][0][0], strict=True):
        best = row.index(max(row))
        assert line.split() == [*repr(token).split(), f"{row[best]:.2f}", *repr(one["tokens"][best]).split()]


def test_a_layer_or_head_that_the_encoder_does_not_have_is_refused(run: Path, failed: Failed) -> None:
    for kind in ("layer", "head"):
        message = failed("attention", str(run), "하나", "--encoder", f"--{kind}", "3")
        assert message == f"--{kind} is 3, but the encoder has only 2"


def test_corpus_writes_parallel_files_and_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "corpus"
    assert main(["corpus", "--out", str(out)]) == 0
    for line in capsys.readouterr().out.splitlines():
        part, total, _ = line.split()
        for language in ("ko", "en"):
            assert len((out / f"{part}.{language}").read_text().split("\n")) - 1 == int(total)


def test_out_of_memory_logs_the_flag_that_needs_less(
    tmp_path: Path,
    corpus_files: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def train_step(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nSee the documentation")

    monkeypatch.setattr(Trainer, "train_step", train_step)
    assert main(["train", "toy", "--out", str(tmp_path / "run"), *corpus_files]) == 1
    messages = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert messages[0] == "CUDA out of memory. Tried to allocate 9 GiB."
    assert "--micro-batch-tokens N" in messages[1]


def test_cpus_are_counted_where_affinity_is_unknown(
    tmp_path: Path, corpus_files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    assert main(["train", "toy", "--out", str(tmp_path / "run"), *corpus_files, "--max-steps", "1"]) == 0
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["train", "huge", "--out", "x"],
        ["train", "toy"],
        ["train", "toy", "--out", "x", "--source", "only-one-side"],
        ["train", "toy", "--out", "x", "--max-s", "1"],
        ["train", "toy", "--out", "x", "--max-steps", "1", "--set", "max_steps=2"],
        ["score"],
        ["score", "x", "--source", "y"],
        ["score", "x", "--source", "y", "--reference", "z", "--part", "dev"],
        ["attention", "x"],
        ["attention", "x", "text", "--layer", "1"],
        ["attention", "x", "text", "--head", "1"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    errors = capsys.readouterr().err
    assert errors.endswith("--help shows the usage\n")
    if arguments in (["score", "x", "--source", "y"], ["attention", "x", "text", "--head", "1"]):
        assert errors.endswith(f"\npython -m training {arguments[0]} --help shows the usage\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-steps", "0"], "--max-steps: 0 is less than 1"),
        (["--max-steps", "many"], "--max-steps: invalid integer value: 'many'"),
        (["--seed", "-1"], "--seed: -1 is less than 0"),
        (["--seed", str(2**64)], f"--seed: {2**64} is too much: give less than {2**63}"),
        (["--threads", "100000"], "--threads: 100000 is too much: give less than 1025"),
        (["--vocab-size", "1"], "--vocab-size: 1 is less than 260"),
        (["--set", "dropout"], "--set: 'dropout' is not NAME=VALUE"),
        (["--device", "abacus"], "--device: 'abacus' is unknown: give auto, cpu, cuda or cuda:N"),
        (["--device", "cuda:99"], "--device: there is no cuda:99: torch finds "),
    ],
)
def test_a_wrong_value_names_its_flag_and_exits_with_2(
    tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["train", "toy", "--out", str(tmp_path / "run"), *flags])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--beam-size", "0"], "--beam-size: 0 is less than 1"),
        (["--alpha", "1"], "--alpha needs a --beam-size above 1"),
        (["--alpha", "nan"], "--alpha: nan is not from -10 to 10"),
        (["--alpha", "inf"], "--alpha: inf is not from -10 to 10"),
        (["--alpha=-1000"], "--alpha: -1000 is not from -10 to 10"),
    ],
)
def test_a_wrong_search_is_a_usage_error(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["score", "run", *flags])
    assert message in capsys.readouterr().err


def test_a_missing_tokenizer_of_bleu_is_named_before_any_work_and_may_be_changed(
    run: Path, tmp_path: Path, corpus_files: list[str], failed: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mecab_ko", None)
    missing = "BLEU's tokenizer ko-mecab is not installed: choose another one, or pip install 'sacrebleu[ko]'"
    setting = ["--set", "bleu_tokenization=ko-mecab"]
    assert failed("train", "toy", "--out", str(tmp_path / "new"), *corpus_files, *setting) == missing
    assert not (tmp_path / "new").exists()
    assert failed("train", "toy", "--out", str(run), "--resume", "--max-steps", "25", *setting) == missing
    assert failed("score", str(run), "--tokenize", "ko-mecab") == missing
    folder = RunFolder(run)
    flags = ["--resume", "--max-steps", "25", "--set", "bleu_tokenization=char"]
    assert main(["train", "toy", "--out", str(run), *flags]) == 0
    assert folder.read_config().training.bleu_tokenization == "char"
    assert "tok:char" in folder.read_summary().bleu_signature


def test_a_preset_of_another_family_than_the_parents_is_refused(
    run: Path, tmp_path: Path, corpus_files: list[str], failed: Failed
) -> None:
    message = failed("train", "recurrent", "--out", str(tmp_path / "new"), "--from", str(run), *corpus_files)
    assert message.startswith(f"recurrent is of the family recurrent, and {run} of the family transformer: ")
    assert not (tmp_path / "new").exists()


def test_a_run_is_trained_by_one_process_at_a_time(run: Path, failed: Failed) -> None:
    with RunFolder(run).locked():
        message = failed("train", "toy", "--out", str(run), "--resume", "--max-steps", "25")
        assert message == f"another process trains in {run}: wait for it, or stop it"
    assert main(["train", "toy", "--out", str(run), "--resume", "--max-steps", "25"]) == 0


def test_weights_know_the_config_of_their_model(run: Path, failed: Failed) -> None:
    """Another number of heads has weights of the same shapes, and was another model without a word."""
    path = run / "config.json"
    config = json.loads(path.read_text())
    heads = config["model"]["num_heads"]
    path.write_text(json.dumps(config | {"model": config["model"] | {"num_heads": 2 * heads}}))
    expected = (
        f"the weights of a model with num_heads {heads}, and config.json has {2 * heads}: write {heads} there"
    )
    for arguments in (
        ("score", str(run)),
        ("score", str(run), "--step", "20"),
        ("train", "toy", "--out", str(run), "--resume", "--max-steps", "25"),
    ):
        assert failed(*arguments).endswith(expected)


def test_short_targets_are_scored_by_chrf(
    tmp_path: Path, corpus_files: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """BLEU is 0 for targets of fewer than four tokens: a training that learned was stopped as no better."""
    words = tmp_path / "words.tsv"
    words.write_text("".join(f"Wort {number}\tword {number}\n" for number in range(40)))
    out = tmp_path / "words"
    with caplog.at_level("INFO"):
        assert main(["train", "toy", "--out", str(out), "--tsv", str(words)]) == 0
    assert "dev score: chrF, because most dev targets have fewer tokens" in caplog.text
    summary = RunFolder(out).read_summary()
    assert (summary.metric, summary.dev_bleu, summary.dev_score) == ("chrf", 0, summary.dev_chrf)
    manifest = export_bundle(load_run(out), tmp_path / "bundle", [Precision.INT8])
    assert [variant.parity.metric for variant in manifest.variants.values()] == ["chrf"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["train", "toy", "--out", "{}/run", "--source", "{}/no", "--target", "{}/no"],
            "{}/no: No such file or directory",
        ),
        (["train", "toy", "--out", "{}/run", "--tsv", "{}"], "{}: Is a directory"),
        (["train", "toy", "--out", "{}/file/run"], "{}/file/run/checkpoints: Not a directory"),
        (["train", "toy", "--out", "{}/run", "--from", "{}"], "{} is not a training run"),
        (["score", "{}"], "is not a training run"),
        (["attention", "{}", "text"], "is not a training run"),
        (["attention", "{}", ""], "the text is empty: nothing to translate"),
        (["attention", "{}", " \n"], "the text is empty: nothing to translate"),
        (["attention", "{}", "ab\udcff"], "the text is not UTF-8, from character 3 on"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_1(
    tmp_path: Path, arguments: list[str], message: str, failed: Failed
) -> None:
    (tmp_path / "file").write_text("")
    found = failed(*(argument.replace("{}", str(tmp_path)) for argument in arguments))
    assert message.replace("{}", str(tmp_path)) in found
    assert "Errno" not in found
    assert "\n" not in found


@pytest.mark.parametrize(("signal_number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_sets_the_exit_code_and_logs_how_to_resume(
    tmp_path: Path,
    corpus_files: list[str],
    press_ctrl_c: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    signal_number: int,
    exit_code: int,
) -> None:
    out = tmp_path / "run"
    press_ctrl_c(7, signal_number)
    assert main(["train", "toy", "--out", str(out), *corpus_files]) == exit_code
    assert f"continue with: python -m training train toy --out {out} --resume" in caplog.text
    assert "Traceback" not in caplog.text + capsys.readouterr().err
    assert list(RunFolder(out).checkpoints.glob("step-*.pt"))


def test_an_experiment_is_one_file_whose_values_flags_replace(
    tmp_path: Path, corpus_files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    files = dict(zip(corpus_files[::2], corpus_files[1::2], strict=True))
    lines = [f"{flag[2:].replace('-', '_')} = '{name}'" for flag, name in files.items()]
    lines += ["preset = 'toy'", f"out = '{tmp_path / 'run'}'", "max_steps = 9", "seed = 3", "resume = true"]
    lines += ["dropout = 0.25", "norm = 'pre'", "patience = 'null'", "learning_rate_scale = 0.7", "d_ff = 24"]
    file = tmp_path / "run.toml"
    file.write_text("\n".join(lines))
    flags = ["--max-steps", "2", "--set", "seed=4", "dropout=0.5"]
    assert main(["train", "--config", str(file), *flags]) == 0
    assert "2 steps" in capsys.readouterr().out
    config = RunFolder(tmp_path / "run").read_config()
    model, recipe = config.model, config.training
    assert isinstance(model, TransformerConfig)
    assert (config.preset, model.dropout, model.norm, model.d_ff) == ("toy", 0.5, "pre", 24)
    assert (recipe.max_steps, recipe.seed, recipe.patience) == (2, 4, None)
    assert recipe.learning_rate_scale == 0.7
    assert main(["train", "toy", "--config", str(file), "--max-steps", "3", *flags[2:]]) == 0  # it resumes
    assert "3 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat = 1", "run.toml: there is no setting learning_rat (meant: learning_rate?)"),
        ("sorce = 'a'", "run.toml: there is no setting sorce (meant: source?)"),
        ("max-steps = 3", "run.toml: there is no setting max-steps (meant: max_steps?)"),
        ("set = 'dropout=0.1'", "run.toml: there is no setting set"),
        ("tsv = ['a', 'b']", "run.toml: tsv is ['a', 'b'], and must be one value"),
        ("resume = 'yes'", "run.toml: resume is 'yes', and must be true or false"),
        ("max_steps = 0", "run.toml: argument --max-steps: 0 is less than 1"),
        ("preset = 'huge'", "run.toml: argument preset: invalid choice: 'huge'"),
        ("max_steps = ", "run.toml is not valid TOML"),
        ("preset = 'toy'", "error: out is missing: name it here, or in a file with --config"),
        ("out = 'x'", "error: preset is missing"),
    ],
)
def test_a_wrong_experiment_exits_with_2_and_names_file_and_key(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["train", "--config", str(file)])
    assert message in capsys.readouterr().err
