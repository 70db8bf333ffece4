import json
import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from training.progress import Reporter
from training.run import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def steps(folder: RunFolder) -> list[int]:
    return [json.loads(line)["step"] for line in folder.metrics_file.read_text().splitlines()]


def test_what_an_earlier_session_recorded_after_the_resumed_step_is_removed(folder: RunFolder) -> None:
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
