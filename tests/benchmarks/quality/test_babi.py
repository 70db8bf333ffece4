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
