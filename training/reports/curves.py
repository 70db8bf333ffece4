"""The learning curve of a run as a picture, from its metrics."""

from __future__ import annotations

from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from seq2seq_serve.training.checkpoint import write_atomically
from seq2seq_serve.training.run import RunFolder

_SIZE_INCHES = 7.0, 6.0
_DPI = 110


def save_learning_curve(folder: RunFolder) -> None:
    """Draw the metrics of `metrics.jsonl` over the steps: losses above, dev scores below."""
    figure = learning_curve(folder.read_metrics())
    figure.suptitle(folder.path.resolve().name)
    FigureCanvasAgg(figure)
    write_atomically(folder.curve_file, lambda stream: figure.savefig(stream, format="png", dpi=_DPI))


def learning_curve(lines: list[dict[str, Any]]) -> Figure:
    """Return the figure for the lines of `metrics.jsonl`."""
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    losses, scores = figure.subplots(2, sharex=True)
    for axes, curves in (
        (losses, [("train", "loss", "training, as it is minimised"), ("dev", "loss", "dev, cross-entropy")]),
        (
            scores,
            [
                ("dev", "bleu", "dev BLEU"),
                ("dev", "chrf", "dev chrF"),
                ("dev", "accuracy", "dev accuracy in %"),
                ("dev", "wer", "dev WER in %"),
                ("dev", "cer", "dev CER in %"),
            ],
        ),
    ):
        for kind, name, label in curves:
            points = [(line["step"], line[name]) for line in lines if line["kind"] == kind and name in line]
            if points:
                axes.plot(*zip(*points, strict=True), label=label, marker="." * (kind == "dev"))
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(loc="center right")  # the best place takes long to find on a busy machine
    losses.set_ylabel("nats a token")
    scores.set_ylim(bottom=0)
    scores.set_xlabel("step")
    return figure
