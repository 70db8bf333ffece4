import json
import re
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from seq2seq_serve.training.reports.progress import Reporter
from seq2seq_serve.training.run import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def steps(folder: RunFolder) -> list[int]:
    return [json.loads(line)["step"] for line in folder.metrics_file.read_text().splitlines()]


def test_metrics_after_the_resumed_step_are_removed(folder: RunFolder) -> None:
    with Reporter(folder, Console(file=StringIO()), 0, 100) as reporter:
        for step in (20, 40, 60):
            reporter.record(step, "train", {"loss": 1.0})
    with folder.metrics_file.open("a") as stream:
        stream.write('{"step": 80, "ki')  # killed while it wrote
    with Reporter(folder, Console(file=StringIO()), 45, 100) as reporter:
        reporter.record(60, "train", {"loss": 0.5})
    assert steps(folder) == [20, 40, 60]
    assert json.loads(folder.metrics_file.read_text().splitlines()[-1])["loss"] == 0.5


def test_the_bar_shows_all_figures_on_a_terminal_of_80_columns(folder: RunFolder) -> None:
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, color_system=None, width=80)
    with Reporter(folder, console, 0, 300_000) as reporter:
        reporter.show("loss 11.234  1,234,567 tokens/s")
        reporter.advance(150_000)
    figures = r"training ━+ +150000/300000 loss 11\.234  1,234,567 tokens/s \S+ left"
    assert re.search(figures, screen.getvalue())
    assert "…" not in screen.getvalue()


def test_without_a_terminal_there_is_a_line_now_and_then(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, seconds = StringIO(), iter([0.0, 59.0, 60.0, 100.0, 120.0])
    monkeypatch.setattr(
        "seq2seq_serve.training.reports.progress.time", SimpleNamespace(monotonic=lambda: next(seconds))
    )
    with Reporter(folder, Console(file=screen, width=40), 1000, 5000) as reporter:
        for step in (2000, 3000, 4000, 4500):
            reporter.advance(step)
            reporter.show(f"loss {step / 1000}  1,234,567 tokens/s")
        lines = [re.sub(r"\d+:\d\d:\d\d", "H:MM:SS", line) for line in screen.getvalue().splitlines()]
    assert lines == [
        "step 3000 of 5000, loss 3.0  1,234,567 tokens/s, H:MM:SS left",
        "step 4500 of 5000, loss 4.5  1,234,567 tokens/s, H:MM:SS left",
    ]
