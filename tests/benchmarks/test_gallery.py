"""The gallery trains what is missing, names the log of what failed, and shows each picture that it draws."""

import dataclasses
import re
import sys
from io import StringIO
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from benchmarks import gallery
from benchmarks.gallery import EXHIBITS, Exhibit, main, make_bundles
from seq2seq_serve.bundle.names import MANIFEST_FILE
from seq2seq_serve.training.run import RunFolder
from tests.benchmarks import few_examples

HEADINGS = [
    "# A gallery of attention",
    "## One sentence, four models",
    "### No attention",
    "### Dot attention",
    "### Additive attention",
    "### The Transformer",
    "## Pictures and a clip",
    "### Soft attention",
    "### Hard attention",
    "### Attention over time",
    "## Questions about stories",
]
PICTURES = [
    "recurrent-dot",
    "recurrent-additive",
    "transformer",
    "captioner-soft",
    "captioner-hard",
    "clip-captioner",
    "story-1",
    "story-2",
]


def headings(page: str) -> list[str]:
    return [line for line in page.splitlines() if line.startswith("#")]


def shown(page: str) -> list[str]:
    """The paths of the pictures that a page shows."""
    return re.findall(r"!\[.+\]\((.+)\)", page)


@pytest.fixture
def console() -> Console:
    return Console(file=StringIO())


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps for each model, on a few pictures, clips, stories and sentences."""
    # Two steps of a long warm-up: steps at the full rate would leave weights that float32 rounds coarsely.
    short = {"eval_interval_steps": 2, "warmup_steps": 1000, "batch_tokens": 400}
    exhibits = [
        dataclasses.replace(exhibit, max_steps=2, settings=exhibit.settings | short) for exhibit in EXHIBITS
    ]

    monkeypatch.setattr(gallery, "EXHIBITS", exhibits)
    monkeypatch.setattr(gallery, "run_command", few_examples.run)


@pytest.mark.slow  # eight trainings and exports
def test_every_model_is_trained_once_and_the_page_shows_all_of_them(few_steps, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gallery", "--runs", str(tmp_path)])
    assert main() == 0, capsys.readouterr().err
    path = Path(capsys.readouterr().out.strip())
    assert path == tmp_path / "gallery.md"
    page = path.read_text()
    assert headings(page) == HEADINGS
    assert shown(page) == [f"gallery/{name}.png" for name in PICTURES]
    for picture in shown(page):
        Image.open(tmp_path / picture).verify()
    hard, soft = (
        RunFolder(tmp_path / "runs" / f"captioner-{name}").read_config() for name in ("hard", "soft")
    )
    assert "steps: 2;" in hard.parent
    assert soft.corpus_sha256 in hard.parent

    monkeypatch.setattr(gallery, "run_command", lambda *_: pytest.fail("a finished step is repeated"))
    other = tmp_path / "other"
    monkeypatch.setattr(sys, "argv", ["gallery", "--runs", str(tmp_path), "--out", str(other)])
    assert main() == 0, capsys.readouterr().err
    assert (other / "gallery.md").read_text() == page
    assert sorted((other / "gallery").iterdir()) == sorted(other / picture for picture in shown(page))


@pytest.fixture
def echoed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command only prints itself, so that nothing is trained or exported."""
    monkeypatch.setattr(sys, "executable", "/bin/echo")


@pytest.mark.usefixtures("echoed")
@pytest.mark.parametrize(
    ("is_finished", "first"), [(False, "training train demo --out {run} --resume"), (True, "export {run} ")]
)
def test_a_stopped_training_goes_on_and_a_finished_one_is_not_repeated(
    is_finished, first, tmp_path, console, monkeypatch
):
    monkeypatch.setattr(gallery, "EXHIBITS", [Exhibit("begun", "Begun", "demo", 7, {})])
    run = RunFolder(tmp_path / "runs" / "begun")
    run.path.mkdir(parents=True)
    run.config_file.touch()
    if is_finished:
        run.summary_file.touch()
    with pytest.raises(RuntimeError, match="begun failed"):
        make_bundles(tmp_path, console)
    log = (tmp_path / "runs" / "begun.log").read_text()
    assert log.startswith(f"-m {first.format(run=run.path)}")


@pytest.mark.usefixtures("echoed")
def test_a_model_starts_with_the_weights_of_its_parent_or_not_at_all(tmp_path, console, monkeypatch):
    parent = Exhibit("parent", "Parent", "captioner", 7, {})
    child = Exhibit("child", "Child", "captioner", 3, {}, "parent")
    monkeypatch.setattr(gallery, "EXHIBITS", [parent, child])
    run, log = tmp_path / "runs" / "parent", tmp_path / "runs" / "child.log"
    with pytest.raises(RuntimeError, match="parent failed"):
        make_bundles(tmp_path, console)
    assert not log.exists()

    run.mkdir()
    RunFolder(run).summary_file.touch()
    (tmp_path / "bundles" / "parent").mkdir(parents=True)
    (tmp_path / "bundles" / "parent" / MANIFEST_FILE).touch()
    with pytest.raises(RuntimeError, match="child failed"):
        make_bundles(tmp_path, console)
    assert f"--from {run} --max-steps 3" in log.read_text()
