"""Captions of built-in pictures and clips: `python -m benchmarks.quality.captions RUN...`.

Exports each run in fp32 and int8, starts the real server, and sends it the files of the test set, which have
combinations that training never has. Scored are the share of captions that are entirely right, and where the
model looked as it wrote a word that names an object or an event. `pictures.sh` trains the systems of "Show,
Attend and Tell" (soft and hard attention), and `clips.sh` the four of Yao et al. 2015.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.quality.recipe import PRECISIONS, ask, describe_run, export, report_scores
from benchmarks.report import command, markdown
from seq2seq_serve.client import GenerateOptions
from seq2seq_serve.protos.seq2seq_v1_pb2 import FINISH_REASON_EOS, Hypothesis
from seq2seq_serve.training.builtin import moving_shapes, shapes
from seq2seq_serve.training.run import RunFolder, load_run

SCORES = "right_percent", "events_percent", "pointing_percent"


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve and score; returns 0 if done, 1 if it failed."""
    parser = command("quality.captions", __doc__, "runs/pictures/soft runs/pictures/hard")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="finished runs of captioners")
    parser.add_argument("--task", default="captions", help="its name in the report (default: %(default)s)")
    options = parser.parse_args(arguments)

    def score(console: Console) -> dict[str, Any]:
        return {"systems": {run.name: caption_all(run, console) for run in options.runs}}

    return report_scores(options.task, score, table, options.out)


def caption_all(run: Path, console: Console) -> dict[str, Any]:
    """Export the run, and caption the files of its test set through the server; returns the scores."""
    folder = RunFolder(run)
    is_clip = folder.read_config().preset == "clip-captioner"
    files = [Path(pair.source) for pair in folder.read_pairs("test")]
    num_examples = 1 + max(int(file.stem) for file in files)
    examples: list[Any] = list((moving_shapes if is_clip else shapes).generate(num_examples, split="test"))
    is_right = moving_shapes.is_right if is_clip else shapes.is_right
    has_attention = getattr(folder.read_config().model, "attention", None) != "mean"
    options = GenerateOptions(attention=has_attention)
    report: dict[str, Any] = describe_run(run) | {"test": len(files)} | {score: {} for score in SCORES}
    bundle = export(load_run(run), run, console)
    for precision in PRECISIONS:
        [results] = ask(bundle, precision, [(files, options)], console)
        rights, hits = [], list[bool]()
        num_told = num_events = 0
        for file, result in zip(files, results, strict=True):
            example, text = examples[int(file.stem)], result.text
            rights.append(is_right(example, text))
            if is_clip:
                num_told += moving_shapes.num_told(example, text)
                num_events += len(example.events)
            if rights[-1] and has_attention:
                hits += pointing(example, result.answer.hypotheses[0])
        report["right_percent"][precision] = 100 * sum(rights) / len(rights)
        if num_events:
            report["events_percent"][precision] = 100 * num_told / num_events
        if hits:
            report["pointing_percent"][precision] = 100 * sum(hits) / len(hits)
    return report


def pointing(example: shapes.Scene | moving_shapes.Clip, hypothesis: Hypothesis) -> list[bool]:
    """Returns, for each word that names something, whether the place with most weight lies on it.

    A word's weights are the mean of those of its tokens.
    """
    tokens = list(hypothesis.attention.target_tokens)
    weights = np.array(hypothesis.attention.weights).reshape(len(tokens), -1)  # (T, S)
    if hypothesis.finish_reason == FINISH_REASON_EOS:
        tokens, weights = tokens[:-1], weights[:-1]
    words = np.cumsum([token.startswith(" ") for token in tokens])  # of each token
    if isinstance(example, shapes.Scene):
        named = shapes.named(example, hypothesis.text)
    else:
        named = moving_shapes.named(example, hypothesis.text)
    hits = []
    for word, number in enumerate(named):
        if number is not None:
            looked_at = int(weights[words == word].mean(axis=0).argmax())
            hits.append(bool(example.places(number).ravel()[looked_at]))
    return hits


def table(report: dict[str, Any]) -> str:
    """Returns the scores as a Markdown table."""
    columns = ["system", "parameters", "steps"]
    columns += [f"{name} in %, {each}" for name in ("right", "events", "pointing") for each in PRECISIONS]
    rows = []
    for name, system in report["systems"].items():
        cells = (
            f"{system[score][precision]:.1f}" if precision in system[score] else "–"
            for score in SCORES
            for precision in PRECISIONS
        )
        rows.append((name, f"{system['parameters']:,}", f"{system['steps']:,}", *cells))
    return markdown(columns, rows)


if __name__ == "__main__":
    sys.exit(main())
