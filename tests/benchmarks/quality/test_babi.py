"""The questions of bAbI are read as its files have them, and answered through the server."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.quality import babi
from seq2seq_serve.training.data.text_files import read_lines

SCRIPT = Path(babi.__file__).with_name("babi.sh")

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
    assert third.story == ("Fred is bored.",)


def test_every_place_of_a_question_in_its_story_is_scored_in_training(tmp_path):
    questions = [
        babi.Question(1, ("Fred went away.",) * place, f"Where is {number}?", "room")
        for number in range(100)
        for place in range(1, 6)
    ]
    babi.write_corpus(questions, 4, tmp_path)
    dev = read_lines(tmp_path / "dev.tsv")
    assert len(dev) == 50
    assert {line.count("Fred went") for line in dev} == {1, 2, 3, 4}  # the last sentences of long stories


@pytest.mark.slow  # a training, an export and two servers
def test_the_script_trains_and_asks_through_the_server(tmp_path):
    colours = "red", "green", "blue"
    for split, num_questions in (("train", 40), ("test", 4)):
        text = "".join(
            f"1 Fred likes {colours[number % 3]}.\n2 Jeff is in room {number}.\n"
            f"3 What does Fred like? \t{colours[number % 3]}\t1\n"
            for number in range(num_questions)
        )
        for task in range(1, 21):
            write(tmp_path / "en", task, split, text)
    environment = os.environ | {"SEEDS": "0", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    flags = ["--max-steps", "4", "--set", "eval_interval_steps=4", "checkpoint_interval_steps=2"]
    command = ["sh", str(SCRIPT), str(tmp_path), "en", str(tmp_path / "runs"), *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "| task 20 |" in done.stdout
    report = json.loads((tmp_path / "runs" / "quality.json").read_text())
    assert (report["run"]["steps"], report["chosen"], report["questions"]) == (4, "seed-0", 20 * 4)
    assert report["error_percent"]["fp32"].keys() == {str(task) for task in range(1, 21)}
