"""`train` from a program does what the command does, and its example in docs/training.md runs."""

import logging
import re
from pathlib import Path

import pytest
from rich.console import Console

from seq2seq_serve.training import Run, train
from seq2seq_serve.training.__main__ import main
from seq2seq_serve.training.data.corpus import Corpus
from seq2seq_serve.training.evaluation.search import SourceLengthError
from seq2seq_serve.training.presets import PRESETS, Preset
from seq2seq_serve.training.run import RunFolder, load_run

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
QUICK = {"threads": 1, "device": "cpu", "progress": False}


@pytest.fixture(autouse=True)
def _toy_preset(monkeypatch: pytest.MonkeyPatch, preset: Preset) -> None:
    monkeypatch.setitem(PRESETS, "toy", lambda: preset)


def test_a_run_is_that_of_the_command(
    tmp_path: Path, corpus_files: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    files = {flag[2:].replace("-", "_"): file for flag, file in zip(*[iter(corpus_files)] * 2, strict=True)}
    settings = {"dropout": 0.0, "eval_interval_steps": 5}
    run = train("toy", str(tmp_path / "run"), **files, max_steps=12, seed=3, settings=settings, **QUICK)
    assert capfd.readouterr() == ("", "")
    flags = ["--max-steps", "12", "--seed", "3", "--set", "dropout=0", "eval_interval_steps=5"]
    out = tmp_path / "command"
    machine = ["--threads", "1", "--device", "cpu"]
    assert main(["train", "toy", "--out", str(out), *corpus_files, *flags, *machine]) == 0
    printed = capfd.readouterr().out
    assert printed.startswith(f"{out}: {run.summary}\n12 steps, ")
    assert run.folder == tmp_path / "run"
    assert run.score == run.summary.dev_score == load_run(out).dev_score
    ours, theirs = run.model.model.state_dict(), load_run(out).model.state_dict()
    assert all(ours[name].equal(theirs[name]) for name in ours | theirs)
    configs = [RunFolder(folder).read_config() for folder in (run.folder, out)]
    assert configs[0] == configs[1]
    # It resumes by either.
    assert main(["train", "toy", "--out", str(run.folder), "--resume", "--max-steps", "13", *machine]) == 0
    assert train("toy", out, resume=True, max_steps=14, **QUICK).summary.steps == 14


def test_pairs_in_memory_train_and_continue(tmp_path: Path, corpus: Corpus) -> None:
    console = Console(quiet=True)
    machine = QUICK | {"progress": console}
    run = train("toy", tmp_path / "run", corpus.train, dev_pairs=corpus.dev, max_steps=10, **machine)
    assert RunFolder(run.folder).read_pairs("dev") == list(corpus.dev)
    sources = [pair.source for pair in corpus.dev]
    targets = run.translate(sources)
    assert len(targets) == len(sources)
    assert len(run.translate(sources[:1], beam_size=3)) == 1
    assert run.checkpoint(10).provenance["steps"] == "10"
    with pytest.raises(ValueError, match="7"):
        run.checkpoint(7)
    with pytest.raises(SourceLengthError):
        run.translate(["하나 " * 99])
    with pytest.raises(ValueError, match=r"already holds a run: give resume=True to continue it"):
        train("toy", run.folder, corpus.train, **QUICK)
    for pairs in (corpus.train, None):
        dev = pairs and corpus.dev
        further = train("toy", run.folder, pairs, dev_pairs=dev, resume=True, max_steps=12, **QUICK)
        assert further.summary.steps == 12
    with pytest.raises(ValueError, match="was started with other pairs"):
        train("toy", run.folder, corpus.train[1:], dev_pairs=corpus.dev, resume=True, **QUICK)
    tuned = train("toy", tmp_path / "tuned", iter(corpus.train), parent=run.folder, max_steps=2, **QUICK)
    assert tuned.model.provenance["parent"].startswith("weights: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pairs": [("a", "b")], "tsv": "a.tsv"}, "give either pairs or files, not both: tsv"),
        ({"dev_pairs": [("a", "b")]}, "dev_pairs go with pairs: give both"),
        ({"source": "a"}, "give both source and target, or neither"),
        ({"seed": 1, "settings": {"seed": 2}}, "seed: given as an argument and in settings"),
        ({"settings": {"learning_rat": 2}}, r"unknown settings learning_rat \(meant: learning_rate_scale"),
        ({"device": "gpu"}, "'gpu' is unknown: give auto, cpu, cuda or cuda:N"),
        (
            {"pairs": [("a", "b"), {"source": "a", "target": "b"}]},
            r"^\{'source': 'a', .* is among the pairs, and",
        ),
        (
            {"pairs": [("a", 5)]},
            r"^\('a', 5\) is among the pairs, and must be a source and a target, both texts",
        ),
        ({"pairs": []}, "has 0 records: the corpus is empty"),
    ],
)
def test_wrong_arguments_are_refused_before_a_run_exists(
    tmp_path: Path, arguments: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train("toy", tmp_path / "run", **(QUICK | arguments))
    assert not RunFolder(tmp_path / "run").is_run


def test_the_example_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## From Python")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    names: dict[str, object] = {}
    with caplog.at_level(logging.INFO):
        exec(compile(code, str(PAGE), "exec"), names)
    run = names["run"]
    assert isinstance(run, Run)
    assert run.score > 90
    assert "training on 950 pairs" in caplog.text
    assert run.translate(["4 1 4.", "9 0 2."]) == ["four one four.", "nine zero two."]
