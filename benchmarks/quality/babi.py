"""Questions about stories, answered through the server: `python -m benchmarks.quality babi --data DIR`.

Trains a memory network on the 20 tasks of bAbI together, several times, keeps the run with the fewest errors
on a tenth of the training questions, exports fp32 and int8, starts the real server, and asks all test
questions through the gRPC client. Sukhbaatar et al. 2015 (arXiv:1503.08895, table 1) also train all tasks
together, repeat the training, and choose by training error. benchmarks/LOG.md lists what differs here.
"""

from __future__ import annotations

import argparse
import gzip
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.flags import positive
from benchmarks.hardware import describe_hardware
from benchmarks.quality.recipe import PRECISIONS, Recipe, add_run_flags, ask, describe_run, run, train
from seq2seq_serve.bundle.names import QUESTION, STORY, Precision
from seq2seq_serve.training.data.corpus import CorpusFiles
from seq2seq_serve.training.data.text_files import write_lines
from seq2seq_serve.training.presets import preset_named
from seq2seq_serve.training.run import RunFolder

NUM_TASKS = 20
_PRESET = "memory-network-babi"
# Ten times the questions teach a wider model: what replaces the preset's settings, and its steps. The
# learning rate is highest, 0.002, at the end of the warm-up.
_SETTINGS: dict[str, dict[str, Any]] = {
    "en": {},
    "en-10k": {"d_model": 200, "num_linear_steps": 4500, "learning_rate_scale": 2.53},
}
_MAX_STEPS = {"en": None, "en-10k": 60_000}
_FAILED_PERCENT = 5.0  # a task with more errors has failed
_DEV_INTERVAL = 10  # one in ten training questions, chosen at random, is scored in training
_PUBLISHED = {"en": (12.4, 11), "en-10k": (7.5, 6)}  # mean error in percent, and failed tasks
_LINE = re.compile(r"(\d+) (.*)")


@dataclass(frozen=True)
class Question:
    """A question with its story and its answer, one word in lower case."""

    task: int
    story: tuple[str, ...]
    text: str
    answer: str

    @property
    def source(self) -> str:
        """The story and the question, as the corpus of a memory network has them."""
        return " ".join((*self.story, self.text))


def read_questions(data: Path, part: str, split: str, tasks: Sequence[int]) -> list[Question]:
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


def write_corpus(
    data: Path, part: str, tasks: Sequence[int], folder: Path, max_sentences: int
) -> CorpusFiles:
    """Write the training questions, with the last sentences of long stories, and those scored in training."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        f"{_shortened(question, max_sentences).source}\t{question.answer}"
        for question in read_questions(data, part, "train", tasks)
    ]
    write_lines(folder / "train.tsv", lines)
    write_lines(folder / "dev.tsv", random.Random(0).sample(lines, max(len(lines) // _DEV_INTERVAL, 1)))
    return CorpusFiles(tsv=str(folder / "train.tsv"), dev_tsv=str(folder / "dev.tsv"))


def _shortened(question: Question, max_sentences: int) -> Question:
    return Question(question.task, question.story[-max_sentences:], question.text, question.answer)


def main(arguments: Sequence[str]) -> int:
    """Train, choose, serve and ask; returns the exit code of `benchmarks.quality.recipe.run`."""
    options = _parser().parse_args(arguments)
    tasks = [options.only] if options.only else list(range(1, NUM_TASKS + 1))
    name = f"babi-{options.part}" + (f"-task-{options.only}" if options.only else "")
    path = options.run or Path("runs") / f"quality-{name}"
    first = options.seed or 0

    def measured(console: Console) -> dict[str, Any]:
        settings = {**_SETTINGS[options.part], **dict(options.set)}
        limit = preset_named(_PRESET).changed(settings).model.max_source_length
        files = write_corpus(options.data, options.part, tasks, path / "corpus", limit)
        runs = []
        for seed in range(first, first + options.num_seeds):
            max_steps = options.max_steps or _MAX_STEPS[options.part]
            recipe = Recipe(_PRESET, {**settings, "seed": seed}, max_steps)
            runs.append(path / f"seed-{seed}")
            train(files, runs[-1], recipe, console)
        scores = {one.name: RunFolder(one).read_summary().dev_score for one in runs}
        chosen = max(runs, key=lambda one: scores[one.name])
        return {
            "benchmark": "quality",
            "task": f"bAbI {options.part}",
            "hardware": describe_hardware(),
            "run": describe_run(chosen),
            "training_accuracy_percent": scores,
            "chosen": chosen.name,
            "published": _PUBLISHED[options.part] if not options.only else None,
        } | ask_all(chosen, read_questions(options.data, options.part, "test", tasks), console)

    return run(measured, table, options.data, options.out)


def ask_all(path: Path, questions: Sequence[Question], console: Console) -> dict[str, Any]:
    """Export the run and ask all questions through the server; returns the errors of each precision."""
    limit = RunFolder(path).read_config().model.max_source_length
    sources = [{STORY: " ".join(question.story[-limit:]), QUESTION: question.text} for question in questions]
    report: dict[str, Any] = {"questions": len(questions), "error_percent": {}, "mean_error_percent": {}}
    report["failed_tasks"] = {}
    for precision, results in ask(path, sources, console):
        answers = [result.text for result in results]
        errors = {
            task: 100
            * _mean([a != q.answer for a, q in zip(answers, questions, strict=True) if q.task == task])
            for task in sorted({question.task for question in questions})
        }
        report["error_percent"][precision] = errors
        report["mean_error_percent"][precision] = _mean(list(errors.values()))
        report["failed_tasks"][precision] = sum(error > _FAILED_PERCENT for error in errors.values())
    return report


def table(report: dict[str, Any]) -> str:
    """Returns the errors as a Markdown table."""
    published, failed = report["published"] or ("–", "–")
    lines = [
        f"{report['task']}: {report['run']['parameters']:,} parameters, {report['run']['steps']:,} steps, "
        f"{report['chosen']} of {len(report['training_accuracy_percent'])} runs, "
        "chosen by a tenth of the training questions",
        "",
        "| test error in % | fp32 | int8 | published |",
        "|---|--:|--:|--:|",
    ]
    errors = report["error_percent"]
    for task in errors[Precision.FP32]:
        lines.append(
            f"| task {task} | " + " | ".join(f"{errors[each][task]:.1f}" for each in PRECISIONS) + " | |"
        )
    means = " | ".join(f"{report['mean_error_percent'][each]:.2f}" for each in PRECISIONS)
    lines.append(f"| mean | {means} | {published} |")
    counts = " | ".join(str(report["failed_tasks"][each]) for each in PRECISIONS)
    lines.append(f"| tasks above {_FAILED_PERCENT:g} % | {counts} | {failed} |")
    return "\n".join(lines)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality babi",
        allow_abbrev=False,
        description="Train memory networks on bAbI, and ask the best one all questions through the server.",
    )
    parser.add_argument("task", choices=("babi",))
    parser.add_argument("--data", type=Path, required=True, help="folder with the folders en and en-10k")
    parser.add_argument(
        "--part",
        choices=_PUBLISHED,
        default="en",
        help="1,000 training questions a task, or 10,000 (default: en)",
    )
    parser.add_argument(
        "--only",
        type=int,
        choices=range(1, NUM_TASKS + 1),
        metavar="TASK",
        help="train and ask one task alone",
    )
    parser.add_argument(
        "--num-seeds", type=positive, default=3, help="number of runs to choose from (default: %(default)s)"
    )
    add_run_flags(parser)
    return parser
