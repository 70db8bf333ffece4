"""The questions of bAbI are read as its files have them, and answered through the server."""

import gzip
from pathlib import Path

import pytest

from benchmarks.quality import babi
from benchmarks.quality.__main__ import main
from seq2seq_serve.training.builtin import stories
from seq2seq_serve.training.data.text_files import read_lines

FILE = """1 Bill went to the bedroom.
2 Bill gave the football to Fred.
3 What did Bill give to Fred? \tfootball\t2
4 Jeff took the Milk there.
5 What does Jeff carry? \tmilk,Apple\t4 9
1 Fred is bored.
2 Where is Fred?\tkitchen\t1
"""


def write(folder: Path, task: int, split: str, text: str = FILE) -> None:
    folder.mkdir(exist_ok=True)
    with gzip.open(folder / f"qa{task}_some-name_{split}.txt.gz", "wt") as stream:
        stream.write(text)


def test_a_question_has_the_sentences_before_it_and_no_question_before_it(tmp_path):
    write(tmp_path / "en", 5, "train")
    first, second, third = babi.read_questions(tmp_path, "en", "train", [5])
    story = ("Bill went to the bedroom.", "Bill gave the football to Fred.")
    assert first == babi.Question(5, story, "What did Bill give to Fred?", "football")
    assert (second.story, second.answer) == ((*story, "Jeff took the Milk there."), "milk,apple")
    assert third.source == "Fred is bored. Where is Fred?"


def test_a_large_file_that_is_missing_is_the_small_one(tmp_path):
    write(tmp_path / "en", 3, "train")
    assert len(babi.read_questions(tmp_path, "en-10k", "train", [3])) == 3
    with pytest.raises(FileNotFoundError, match="qa4"):
        babi.read_questions(tmp_path, "en-10k", "train", [3, 4])


def test_a_file_of_another_format_is_named(tmp_path):
    write(tmp_path / "en", 1, "test", "Where is Fred?\n")
    with pytest.raises(
        ValueError, match=r"qa1_some-name_test.txt.gz, line 1: it does not begin with a number"
    ):
        babi.read_questions(tmp_path, "en", "test", [1])


def test_a_missing_folder_is_told_with_advice(tmp_path, capsys):
    assert main(["babi", "--data", str(tmp_path / "none"), "--run", str(tmp_path / "run")]) == 1
    assert "benchmarks/README.md lists the files of --data" in capsys.readouterr().err


def test_every_place_of_a_question_in_its_story_is_scored_in_training(tmp_path):
    lines = []
    for number in range(100):
        for place in range(5):
            lines += [
                f"{2 * place + 1} Fred went to room {number}.",
                f"{2 * place + 2} Where is Fred?\troom\t1",
            ]
    write(tmp_path / "en", 1, "train", "\n".join(lines) + "\n")
    files = babi.write_corpus(tmp_path, "en", [1], tmp_path / "corpus", max_sentences=50)
    dev = read_lines(Path(files.dev_tsv))
    assert len(dev) == 50
    assert {line.count("Fred went") for line in dev} == {1, 2, 3, 4, 5}


@pytest.mark.parametrize(("settings", "num_sentences"), [([], 50), (["--set", "max_source_length=3"], 3)])
def test_the_corpus_of_all_seeds_is_written_once_with_the_presets_limit(
    tmp_path, monkeypatch, settings, num_sentences
):
    story = "".join(f"{number} Fred went to room {number}.\n" for number in range(1, 61))
    write(tmp_path / "en", 1, "train", f"{story}61 Where is Fred?\troom\t1\n")
    write(tmp_path / "en", 1, "test")
    written, trained = [], []
    write_corpus = babi.write_corpus
    monkeypatch.setattr(babi, "write_corpus", lambda *args: written.append(args) or write_corpus(*args))

    def train(files, path, recipe, console):
        trained.append((path.name, read_lines(Path(files.tsv))))
        if len(trained) == 2:
            raise ValueError("enough")

    monkeypatch.setattr(babi, "train", train)
    flags = ["--data", str(tmp_path), "--only", "1", "--num-seeds", "2", "--run", str(tmp_path / "run")]
    assert main(["babi", *flags, *settings]) == 1
    assert len(written) == 1
    assert [name for name, _ in trained] == ["seed-0", "seed-1"]
    for _, (line,) in trained:
        assert line.count("Fred went") == num_sentences


def test_the_table_says_by_what_a_run_was_chosen():
    report = {
        "task": "bAbI en",
        "run": {"parameters": 90_900, "steps": 28_000},
        "chosen": "seed-1",
        "training_accuracy_percent": {"seed-0": 90.0, "seed-1": 91.0},
        "published": (12.4, 11),
        "error_percent": {"fp32": {1: 0.0, 2: 11.94}, "int8": {1: 0.0, 2: 12.0}},
        "mean_error_percent": {"fp32": 5.97, "int8": 6.0},
        "failed_tasks": {"fp32": 1, "int8": 1},
    }
    first, _, *rows = babi.table(report).splitlines()
    assert first == (
        "bAbI en: 90,900 parameters, 28,000 steps, seed-1 of 2 runs, "
        "chosen by a tenth of the training questions"
    )
    assert rows[2:] == [
        "| task 1 | 0.0 | 0.0 | |",
        "| task 2 | 11.9 | 12.0 | |",
        "| mean | 5.97 | 6.00 | 12.4 |",
        "| tasks above 5 % | 1 | 1 | 11 |",
    ]


@pytest.mark.slow  # a training, an export and two servers
def test_questions_are_answered_through_the_server(tmp_path, capsys):
    lines = {}
    for split, number in (("train", 400), ("test", 40)):
        found = [story for story in stories.generate(number, split=split) if story.kind == "colour"]
        lines[split] = "".join(
            "".join(f"{place} {sentence}\n" for place, sentence in enumerate(story.sentences, start=1))
            + f"{len(story.sentences) + 1} {story.question}\t{story.answer}\t1\n"
            for story in found
        )
        write(tmp_path / "en", 2, split, lines[split])
    arguments = [
        "babi",
        "--data",
        str(tmp_path),
        "--only",
        "2",
        "--num-seeds",
        "2",
        "--run",
        str(tmp_path / "run"),
    ]
    settings = ["--max-steps", "4", "--set", "eval_interval_steps=4", "checkpoint_interval_steps=2"]
    assert main([*arguments, *settings, "--out", str(tmp_path / "out.json")]) == 0
    out = capsys.readouterr().out
    assert "| task 2 |" in out
    assert str(tmp_path) not in (tmp_path / "out.json").read_text()
