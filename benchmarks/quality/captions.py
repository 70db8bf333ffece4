"""Captions of built-in pictures and clips: `python -m benchmarks.quality captions`, `... clips`.

Trains the systems of "Show, Attend and Tell" (soft and hard attention) on pictures, or the four of Yao et al.
2015 on clips; exports each in fp32 and int8, starts the real server, and sends it the files of the test set,
which have combinations that training never has. Scored are the share of captions that are entirely right,
and where the model looked as it wrote a word that names an object or an event.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from benchmarks.hardware import describe_hardware
from benchmarks.quality.recipe import PRECISIONS, Recipe, add_run_flags, ask, describe_run, run, train
from seq2seq_serve.client import GenerateOptions
from seq2seq_serve.protos.seq2seq_v1_pb2 import FINISH_REASON_EOS, Hypothesis
from seq2seq_serve.training.builtin import moving_shapes, shapes
from seq2seq_serve.training.data.corpus import CorpusFiles
from seq2seq_serve.training.run import RunFolder


@dataclass(frozen=True)
class Example:
    """A picture or clip of the test set.

    Attributes:
        is_right: Whether a caption is entirely right.
        named: For each word of a right caption, the number of the object or event that it names, or None.
        places: The places of memory, bool (S,), that lie on the object or in the event of a number.
        num_events: The number of events; 0 for a picture.
        num_told: The number of events that a caption tells at their place in the order.
    """

    is_right: Callable[[str], bool]
    named: Callable[[str], list[int | None]]
    places: Callable[[int], NDArray[np.bool_]]
    num_events: int = 0
    num_told: Callable[[str], int] = lambda _: 0


@dataclass(frozen=True)
class System:
    """One of the models that a benchmark compares.

    Attributes:
        settings: Fields that replace those of the preset.
        parent: The name of the system whose weights it starts with.
        max_steps: The number of training steps; None means the preset's.
    """

    settings: dict[str, Any]
    parent: str = ""
    max_steps: int | None = None


@dataclass(frozen=True)
class Task:
    """One of the two benchmarks.

    Attributes:
        systems: Each by its name; a parent comes first.
        examples: Returns the examples of the test set, by their number.
    """

    preset: str
    systems: dict[str, System]
    examples: Callable[[int], list[Example]]


def _pictures(number: int) -> list[Example]:
    return [_of_scene(scene) for scene in shapes.generate(number, split="test")]


def _of_scene(scene: shapes.Scene) -> Example:
    return Example(
        lambda text: shapes.is_right(scene, text),
        lambda text: shapes.named_figures(scene, text),
        lambda number: scene.places(number).ravel(),
    )


def _clips(number: int) -> list[Example]:
    return [_of_clip(clip) for clip in moving_shapes.generate(number, split="test")]


def _of_clip(clip: moving_shapes.Clip) -> Example:
    frames = np.arange(len(clip.frames))

    def places(number: int) -> NDArray[np.bool_]:
        event = clip.events[number]
        return np.asarray((event.start <= frames) & (frames < event.stop))

    return Example(
        lambda text: moving_shapes.is_right(clip, text),
        lambda text: moving_shapes.named_events(clip, text),
        places,
        len(clip.events),
        lambda text: moving_shapes.num_told(clip, text),
    )


SCORES = "right_percent", "events_percent", "pointing_percent"
_FROM_SOFT = {"learning_rate_scale": 0.2, "warmup_steps": 200, "cooldown_share": 0.5}
TASKS = {
    "captions": Task(
        "captioner",
        {
            "soft": System({}),
            # Sampled places teach little as long as they are random, so hard attention starts from soft.
            "hard": System({"attention": "hard", **_FROM_SOFT}, parent="soft", max_steps=1500),
        },
        _pictures,
    ),
    "clips": Task(
        "clip-captioner",
        {
            "basic": System({"attention": "mean", "is_local": False}),
            "local": System({"attention": "mean", "is_local": True}),
            "global": System({"attention": "soft", "is_local": False}),
            "both": System({"attention": "soft", "is_local": True}),
        },
        _clips,
    ),
}


def main(arguments: Sequence[str]) -> int:
    """Train, serve and score; returns the exit code of `benchmarks.quality.recipe.run`."""
    options = _parser(arguments[0]).parse_args(arguments)
    task = TASKS[options.task]
    path = options.run or Path("runs") / f"quality-{options.task}"
    seed = {} if options.seed is None else {"seed": options.seed}

    def measured(console: Console) -> dict[str, Any]:
        systems = {}
        for name in options.systems or task.systems:
            console.rule(name)
            system = task.systems[name]
            settings = {**system.settings, **seed, **dict(options.set)}
            recipe = Recipe(task.preset, settings, options.max_steps or system.max_steps)
            parent = path / system.parent if system.parent else None
            train(CorpusFiles(), path / name, recipe, console, parent)
            systems[name] = describe_run(path / name) | caption_all(path / name, task, console)
        return {
            "benchmark": "quality",
            "task": options.task,
            "hardware": describe_hardware(),
            "systems": systems,
        }

    return run(measured, table, None, options.out)


def caption_all(path: Path, task: Task, console: Console) -> dict[str, Any]:
    """Export the run, and caption the files of its test set through the server; returns the scores."""
    folder = RunFolder(path)
    files = [Path(pair.source) for pair in folder.read_pairs("test")]
    examples = task.examples(1 + max(int(file.stem) for file in files))
    has_attention = getattr(folder.read_config().model, "attention", None) != "mean"
    options = GenerateOptions(attention=has_attention)
    report: dict[str, Any] = {"test": len(files)} | {score: {} for score in SCORES}
    for precision, results in ask(path, files, console, options):
        rights, hits = [], list[bool]()
        num_told = num_events = 0
        for file, result in zip(files, results, strict=True):
            example, text = examples[int(file.stem)], result.text
            rights.append(example.is_right(text))
            num_told, num_events = num_told + example.num_told(text), num_events + example.num_events
            if rights[-1] and has_attention:
                hits += pointing(example, result.answer.hypotheses[0])
        report["right_percent"][precision] = 100 * sum(rights) / len(rights)
        if num_events:
            report["events_percent"][precision] = 100 * num_told / num_events
        if hits:
            report["pointing_percent"][precision] = 100 * sum(hits) / len(hits)
    return report


def pointing(example: Example, hypothesis: Hypothesis) -> list[bool]:
    """Returns, for each word that names something, whether the place with most weight lies on it.

    A word's weights are the mean of those of its tokens.
    """
    tokens = list(hypothesis.attention.target_tokens)
    weights = np.array(hypothesis.attention.weights).reshape(len(tokens), -1)  # (T, S)
    if hypothesis.finish_reason == FINISH_REASON_EOS:
        tokens, weights = tokens[:-1], weights[:-1]
    words = np.cumsum([token.startswith(" ") for token in tokens])  # of each token
    hits = []
    for word, number in enumerate(example.named(hypothesis.text)):
        if number is not None:
            is_on = example.places(number)
            looked_at = int(weights[words == word].mean(axis=0).argmax())
            hits.append(bool(is_on[looked_at]))
    return hits


def table(report: dict[str, Any]) -> str:
    """Returns the scores as a Markdown table."""
    lines = [
        "| system | parameters | steps | right in %, fp32 | int8 | events in %, fp32 | int8 "
        "| pointing in %, fp32 | int8 |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, system in report["systems"].items():
        cells = [
            f"{system[score][precision]:.1f}" if precision in system[score] else "–"
            for score in SCORES
            for precision in PRECISIONS
        ]
        lines.append(f"| {name} | {system['parameters']:,} | {system['steps']:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _parser(task: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.quality {task}",
        allow_abbrev=False,
        description="Train captioners on built-in data, and score them through the server.",
    )
    parser.add_argument("task", choices=TASKS)
    parser.add_argument(
        "--systems",
        nargs="+",
        choices=TASKS[task].systems if task in TASKS else None,
        help="train and score only these (default: all)",
    )
    add_run_flags(parser)
    return parser
