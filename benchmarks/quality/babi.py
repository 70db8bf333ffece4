"""Questions about stories: `python -m benchmarks.quality.babi DATA PART [--corpus FOLDER | --runs RUN...]`.

With --corpus, writes the training questions of the 20 tasks of bAbI. With --runs, keeps the run with the
fewest errors on a tenth of them, exports fp32 and int8, starts the real server, and asks all test questions
through the gRPC client. `babi.sh` does both, and trains memory networks in between. Sukhbaatar et al. 2015
(arXiv:1503.08895, table 1) also train all tasks together, repeat the training, and choose by training error.
benchmarks/LOG.md lists what differs here.
"""

from __future__ import annotations

import gzip
import random
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.quality.recipe import PRECISIONS, ask, describe_run, export, report_scores
from benchmarks.report import command, markdown
from seq2seq_serve.bundle.names import QUESTION, STORY, Precision
from seq2seq_serve.training.data.text_files import write_lines
from seq2seq_serve.training.presets import preset_named
from seq2seq_serve.training.run import RunFolder, load_run

_ALL_TASKS = range(1, 21)
_FAILED_PERCENT = 5.0  # a task with more errors has failed
_DEV_INTERVAL = 10  # one in ten training questions, chosen at random, is scored in training
_LINE = re.compile(r"(\d+) (.*)")


@dataclass(frozen=True)
class Question:
    """A question with its story and its answer, one word in lower case."""

    task: int
    story: tuple[str, ...]
    text: str
    answer: str


def read_questions(data: Path, part: str, split: str, tasks: Sequence[int] = _ALL_TASKS) -> list[Question]:
    """Returns the questions of some tasks in their order.

    Args:
        data: The folder with the folders `en` and `en-10k`.
        part: One of these folders; where it lacks a file, the file of `en` is read (training of task 3).
        split: "train" or "test".
        tasks: Numbers from 1 to 20.

    Raises:
        ValueError: A line is not one of a story.
        OSError: A file is missing or cannot be read.
    """
    questions: list[Question] = []
    for task in tasks:
        file = _file(data / part, task, split)
        if file is None and part != "en":
            file = _file(data / "en", task, split)
        if file is None:
            raise FileNotFoundError(2, "no such file", str(data / part / f"qa{task}_*_{split}.txt"))
        questions += _questions(file, task)
    return questions


def _file(folder: Path, task: int, split: str) -> Path | None:
    return next(iter(sorted(folder.glob(f"qa{task}_*_{split}.txt*"))), None)


def _questions(file: Path, task: int) -> Iterator[Question]:
    text = (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8")
    story: list[str] = []
    with text as lines:
        for number, line in enumerate(lines, start=1):
            match = _LINE.fullmatch(line.rstrip())
            if match is None:
                raise ValueError(f"{file}, line {number}: it does not begin with a number")
            if match[1] == "1":
                story = []
            sentence, *answer = match[2].split("\t")
            if answer:
                yield Question(task, tuple(story), sentence.strip(), answer[0].lower())
            else:
                story.append(sentence.strip())


def write_corpus(questions: Sequence[Question], max_sentences: int, folder: Path) -> None:
    """Write `train.tsv`, with the last sentences of long stories, and `dev.tsv`, scored in training."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        f"{' '.join((*question.story[-max_sentences:], question.text))}\t{question.answer}"
        for question in questions
    ]
    write_lines(folder / "train.tsv", lines)
    write_lines(folder / "dev.tsv", random.Random(0).sample(lines, max(len(lines) // _DEV_INTERVAL, 1)))


def ask_best(runs: Sequence[Path], questions: Sequence[Question], console: Console) -> dict[str, Any]:
    """Export the best run and ask all questions through the server; returns the errors of each precision."""
    scores = {run.name: RunFolder(run).read_summary().dev_score for run in runs}
    best = max(runs, key=lambda run: scores[run.name])
    limit = RunFolder(best).read_config().model.max_source_length
    sources = [{STORY: " ".join(question.story[-limit:]), QUESTION: question.text} for question in questions]
    report: dict[str, Any] = {
        "run": describe_run(best),
        "training_accuracy_percent": scores,
        "chosen": best.name,
        "questions": len(questions),
        "error_percent": {},
        "mean_error_percent": {},
        "failed_tasks": {},
    }
    bundle = export(load_run(best), best, console)
    for precision in PRECISIONS:
        [answers] = ask(bundle, precision, [(sources, None)], console)
        wrong: dict[int, list[bool]] = {}
        for answer, question in zip(answers, questions, strict=True):
            wrong.setdefault(question.task, []).append(answer.text != question.answer)
        errors = {task: 100 * statistics.fmean(its) for task, its in sorted(wrong.items())}
        report["error_percent"][precision] = errors
        report["mean_error_percent"][precision] = statistics.fmean(errors.values())
        report["failed_tasks"][precision] = sum(error > _FAILED_PERCENT for error in errors.values())
    return report


def table(report: dict[str, Any]) -> str:
    """Returns the errors as a Markdown table."""
    errors = report["error_percent"]
    rows: list[Sequence[object]] = [
        (f"task {task}", *(f"{errors[precision][task]:.1f}" for precision in PRECISIONS))
        for task in errors[Precision.FP32]
    ]
    rows.append(("mean", *(f"{report['mean_error_percent'][precision]:.2f}" for precision in PRECISIONS)))
    failed = (report["failed_tasks"][precision] for precision in PRECISIONS)
    rows.append((f"tasks above {_FAILED_PERCENT:g} %", *failed))
    return (
        f"{report['task']}: {report['run']['parameters']:,} parameters, {report['run']['steps']:,} steps, "
        f"{report['chosen']} of {len(report['training_accuracy_percent'])} runs, "
        "chosen by a tenth of the training questions\n\n"
    ) + markdown(("test error in %", *PRECISIONS), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the corpus, or choose, serve and ask; returns 0 if done, 1 if it failed."""
    parser = command(
        "quality.babi",
        __doc__,
        "babi/ en --corpus runs/babi\nbabi/ en --runs runs/babi/seed-0 runs/babi/seed-1",
    )
    parser.add_argument("data", type=Path, help="folder with the folders en and en-10k of bAbI v1.2")
    parser.add_argument("part", choices=("en", "en-10k"), help="1,000 training questions a task, or 10,000")
    todo = parser.add_mutually_exclusive_group(required=True)
    todo.add_argument("--corpus", type=Path, metavar="FOLDER", help="write train.tsv and dev.tsv into it")
    todo.add_argument("--runs", type=Path, nargs="+", metavar="RUN", help="score the best of these runs")
    options = parser.parse_args(arguments)

    def read(split: str) -> list[Question]:
        return read_questions(options.data, options.part, split)

    if options.runs:
        return report_scores(
            f"bAbI {options.part}",
            lambda console: ask_best(options.runs, read("test"), console),
            table,
            options.out,
        )
    try:
        limit = preset_named("memory-network-babi").model.max_source_length
        write_corpus(read("train"), limit, options.corpus)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
