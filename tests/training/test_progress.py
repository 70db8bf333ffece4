import json
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


def test_the_bar_shows_figures_and_where_it_is(folder: RunFolder) -> None:
    screen = StringIO()
    with Reporter(folder, Console(file=screen, force_terminal=True, width=120), 0, 100) as reporter:
        reporter.show("loss 1.234  5,678 tokens/s  learning rate 1.00e-03")
        reporter.advance(50)
    assert "50/100" in screen.getvalue()
    assert "loss 1.234  5,678 tokens/s" in screen.getvalue()
