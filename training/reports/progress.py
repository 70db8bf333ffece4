"""The reports of a run in training: progress bar, metrics.jsonl, TensorBoard."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from torch.utils.tensorboard import SummaryWriter

from seq2seq_serve.training.checkpoint import write_atomically
from seq2seq_serve.training.run import RunFolder

_LINE_INTERVAL_SECONDS = 60.0


class Reporter:
    """Owns the run's metrics file, and the progress bar on the console, during training.

    If the console is not a terminal, it gets a line per minute instead of the bar. Training continues after
    `first_step`; metrics of later steps are removed, because their session left no checkpoint of them.
    """

    def __init__(self, folder: RunFolder, console: Console, first_step: int, max_steps: int) -> None:
        _drop_later_lines(folder.metrics_file, first_step)
        self._metrics = folder.metrics_file.open("a", encoding="utf-8")
        self._tensorboard = SummaryWriter(folder.tensorboard, purge_step=first_step + 1)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),  # fills the rest of the line
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            expand=True,
        )
        self._line_time = time.monotonic()
        self._task = self._bar.add_task("training", total=max_steps, completed=first_step, figures="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()
        self._metrics.close()
        self._tensorboard.close()

    def advance(self, step: int) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=step)

    def show(self, figures: str) -> None:
        """Put figures beside the bar."""
        self._bar.update(self._task, figures=figures)
        now = time.monotonic()
        is_due = figures and now - self._line_time >= _LINE_INTERVAL_SECONDS
        if self._bar.console.is_terminal or not is_due:
            return
        self._line_time = now
        (task,) = self._bar.tasks
        left = f"{timedelta(seconds=round(task.time_remaining))} left" if task.time_remaining else ""
        line = ", ".join(filter(None, [f"step {task.completed} of {task.total}", figures, left]))
        self._bar.console.print(line, soft_wrap=True, highlight=False)

    def record(self, step: int, kind: str, values: dict[str, float]) -> None:
        """Write the "train" or "dev" values of a step: a line of metrics.jsonl, and points in TensorBoard."""
        self._metrics.write(json.dumps({"step": step, "kind": kind} | values) + "\n")
        self._metrics.flush()
        for name, value in values.items():
            self._tensorboard.add_scalar(f"{kind}/{name}", value, step)


def _drop_later_lines(file: Path, first_step: int) -> None:
    if not file.is_file():
        return
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            is_kept = json.loads(line)["step"] <= first_step
        except ValueError:  # the half-written last line of a killed session
            continue
        if is_kept:
            kept.append(f"{line}\n")
    write_atomically(file, lambda stream: stream.write("".join(kept).encode()))
