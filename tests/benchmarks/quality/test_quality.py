import dataclasses
import json
import shutil
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.quality import __main__ as quality
from benchmarks.quality import choice as quality_choice
from benchmarks.quality import recipe as quality_recipe
from benchmarks.quality.__main__ import detokenise, main, measure, table
from benchmarks.quality.corpora import Detokenised, ScoredSet, Task
from benchmarks.quality.recipe import Recipe, train
from seq2seq_serve.training.checkpoint import checkpoint_step, list_checkpoints
from seq2seq_serve.training.config import TrainingConfig, TransformerConfig
from seq2seq_serve.training.data.corpus import CorpusFiles
from seq2seq_serve.training.data.text_files import SentencePair, write_lines
from seq2seq_serve.training.evaluation.comparison import MetricSettings
from seq2seq_serve.training.loop import TrainingInterrupted
from seq2seq_serve.training.presets import Preset
from seq2seq_serve.training.run import RunFolder


@pytest.fixture
def console() -> Console:
    return Console(file=StringIO())


def task_of(folder: Path, train: Sequence[tuple[str, str]], dev: Sequence[tuple[str, str]]) -> Task:
    """The pairs as a corpus of files, and the dev pairs as its test set, too."""
    names = {}
    for part, pairs in (("train", train), ("dev", dev)):
        for side, name in enumerate(("source", "target")):
            names[f"{part}.{name}"] = str(folder / f"{part}.{name}")
            write_lines(folder / f"{part}.{name}", [pair[side] for pair in pairs])
    references = [target.capitalize() for _, target in dev]
    return Task(
        "numbers",
        CorpusFiles(
            source=names["train.source"],
            target=names["train.target"],
            dev_source=names["dev.source"],
            dev_target=names["dev.target"],
        ),
        MetricSettings(tokenization="none", num_resamples=20),
        [ScoredSet("test", [SentencePair(*pair) for pair in dev], Detokenised("en", references))],
        ["하나 둘", "다섯"],
        {"test": "99.9 (nobody)"},
    )


@pytest.mark.slow  # four exports and as many servers, which have tests of their own
def test_a_run_is_averaged_served_and_scored_in_both_precisions(
    trained_run, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality_choice, "NUM_AVERAGED", (2, 10))
    monkeypatch.setattr(quality_choice, "ALPHAS", (0.0, 0.6))
    monkeypatch.setattr(quality, "_DETOKENISED", MetricSettings(is_lower_cased=True, num_resamples=20))
    run = tmp_path / "run"
    shutil.copytree(trained_run.run, run)
    task = task_of(tmp_path, trained_run.corpus.train, trained_run.corpus.dev)

    report = measure(task, run, Recipe("tiny", {}, None), console)

    # The run keeps 2 checkpoints, of which the best is one: four candidates, two for each alpha.
    steps = [checkpoint_step(path) for path in list_checkpoints(RunFolder(run).checkpoints)]
    (best,) = {each["steps"] for each in report["dev"]} - {tuple(steps)}
    assert best[0] in steps
    chosen = [(each["steps"], each["alpha"]) for each in report["dev"]]
    assert chosen == [(best, 0.0), (best, 0.6), (tuple(steps), 0.0), (tuple(steps), 0.6)]
    assert report["search"]["steps"] in (best, tuple(steps))
    assert report["search"]["beam_size"] == 5
    # By then greedy search makes no mistake, and beams find some short targets more probable.
    assert max(each["bleu"] for each in report["dev"]) > 50
    result = report["test"]["test"]
    assert result["sentences"] == len(trained_run.corpus.dev)
    for precision in ("fp32", "int8"):
        bleu = result["scores"][precision]["BLEU"]
        assert bleu["score"] > 50
        assert "tok:none" in bleu["signature"]
        assert result["detokenised"][precision]["BLEU"]["score"] > 50
        assert "case:lc" in result["detokenised"][precision]["BLEU"]["signature"]
    assert result["scores"]["int8"]["BLEU"]["p_value"] is not None
    first = report["translations"][0]
    assert first["source"] == "하나 둘"
    assert first["fp32"].split()[0] == first["int8"].split()[0] == "one"
    parameters = sum(parameter.numel() for parameter in trained_run.trained.model.parameters())
    assert report["run"]["parameters"] == parameters
    assert report["run"]["passes"] > 1
    step, loss, bleu = report["run"]["dev_step_loss_greedy_bleu"][-1]
    assert (step, bleu > 50, 0 < loss < 1) == (max(steps), True, True)
    assert json.loads(json.dumps(report))["test"] == report["test"]

    lines = table(report).splitlines()
    num_averaged = len(report["search"]["steps"])
    assert lines[0].startswith(
        f"numbers: {parameters:,} parameters, {step} steps, {num_averaged} checkpoints averaged, beam 5"
    )
    assert any(line.startswith("| test | BLEU | ") and line.endswith("| 99.9 (nobody) |") for line in lines)
    fp32, int8 = (result["scores"][precision]["BLEU"]["score"] for precision in ("fp32", "int8"))
    assert f"test: int8 − fp32 = {int8 - fp32:+.2f} BLEU" in lines
    assert any(line.startswith("| test | BLEU, detokenised, lower case | ") for line in lines)
    assert lines[-1].startswith("| 다섯 | five")


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> TrainingConfig:
    """Of a model that is trained in no time, and learns nothing."""
    model = TransformerConfig(
        vocab_size=270,
        d_model=16,
        d_ff=16,
        num_heads=2,
        num_encoder_layers=1,
        num_decoder_layers=1,
        max_target_length=20,
    )
    recipe = TrainingConfig(max_steps=2, batch_tokens=50, eval_interval_steps=2, checkpoint_interval_steps=1)
    monkeypatch.setattr(quality_recipe, "preset_named", lambda name: Preset(name, model, recipe))
    return recipe


def test_training_starts_goes_on_and_is_not_repeated(
    tmp_path: Path, console: Console, recipe: TrainingConfig
) -> None:
    task = task_of(tmp_path, [("하나", "one"), ("둘", "two")], [("셋", "three")])
    folder = RunFolder(tmp_path / "run")
    train(task.files, folder.path, Recipe("tiny", {"seed": 3}, None), console)
    assert folder.read_summary().steps == 2
    assert folder.read_config().training == dataclasses.replace(recipe, seed=3)
    trained_at = folder.model_file.stat().st_mtime_ns
    for settings in ({"seed": 3}, {}):
        train(task.files, folder.path, Recipe("tiny", settings, None), console)
    assert folder.model_file.stat().st_mtime_ns == trained_at
    train(task.files, folder.path, Recipe("tiny", {}, 3), console)
    assert folder.read_summary().steps == 3
    for settings in ({"seed": 4}, {"d_ff": 8}):
        with pytest.raises(ValueError, match="was started with other settings: give another --run"):
            train(task.files, folder.path, Recipe("tiny", settings, None), console)


def test_each_seed_has_a_run_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def measured(_task: object, path: Path, recipe: Recipe, *_: object) -> None:
        runs.append((str(path), recipe.settings))
        raise ValueError("enough")

    monkeypatch.setattr(quality, "multi30k", lambda *_: None)
    monkeypatch.setattr(quality, "measure", measured)
    for flags in ([], ["--seed", "1", "--set", "d_ff=256"]):
        assert main(["multi30k", "--data", ".", *flags]) == 1
    assert runs == [
        ("runs/quality-multi30k-en-de", {}),
        ("runs/quality-multi30k-en-de-seed-1", {"d_ff": 256, "seed": 1}),
    ]


def test_wrong_usage_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["korean", "--data", str(tmp_path), "--direction", "de-en"])
    assert "--direction applies to multi30k only" in capsys.readouterr().err
    assert main(["multi30k", "--data", str(tmp_path)]) == 1
    expected = f"error: {tmp_path}/tok/test_2016_flickr.lc.norm.tok.en.gz: No such file or directory ("
    assert capsys.readouterr().err.startswith(expected)


def test_tokens_become_text() -> None:
    french = Detokenised("fr", [])
    assert detokenise(["l&apos; homme dit : « oui » .", "un chien"], french) == [
        "l'homme dit : « oui ».",
        "un chien",
    ]
    assert detokenise(["a man , 3 @-@ year @-@ old ."], Detokenised("en", [])) == ["a man, 3-year-old."]


def test_results_that_cannot_be_written_are_told_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(quality, "multi30k", lambda *_: pytest.fail("began"))
    assert main(["multi30k", "--data", str(tmp_path), "--out", str(tmp_path / "file" / "a.json")]) == 1
    assert "file" in capsys.readouterr().err


def test_an_interrupted_training_says_that_the_same_command_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise TrainingInterrupted(7, 15)

    monkeypatch.setattr(quality, "multi30k", lambda *_: None)
    monkeypatch.setattr(quality, "measure", interrupted)
    assert main(["multi30k", "--data", str(tmp_path)]) == 143
    assert capsys.readouterr().err == "interrupted: run the same command again to resume\n"
