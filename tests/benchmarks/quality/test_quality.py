import shutil
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.quality import __main__ as quality
from benchmarks.quality.__main__ import measure, table
from seq2seq_serve.training.checkpoint import checkpoint_step, list_checkpoints
from seq2seq_serve.training.data.text_files import read_lines, write_lines
from seq2seq_serve.training.evaluation.comparison import MetricSettings
from seq2seq_serve.training.run import RunFolder


@pytest.mark.slow  # four exports and as many servers, which have tests of their own
def test_a_run_is_averaged_served_and_scored_in_both_precisions(
    trained_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "NUM_AVERAGED", (2, 10))
    monkeypatch.setattr(quality, "ALPHAS", (0.0, 0.6))
    run = tmp_path / "run"
    shutil.copytree(trained_run.run, run)
    dev = trained_run.corpus.dev
    files = {name: str(tmp_path / name) for name in ("source", "target")}
    for file, texts in zip(files.values(), zip(*dev, strict=True), strict=True):
        write_lines(Path(file), list(texts))
    metric = MetricSettings(tokenization="none", num_resamples=20)
    test_sets = [("test", files["source"], files["target"])]
    console = Console(file=StringIO())

    report = measure(run, test_sets, metric, console) | {"task": "numbers"}

    # The run keeps 2 checkpoints, of which the best is one: four candidates, two for each alpha.
    steps = [checkpoint_step(path) for path in list_checkpoints(RunFolder(run).checkpoints)]
    (best,) = {each["steps"] for each in report["dev"]} - {tuple(steps)}
    assert best[0] in steps
    chosen = [(each["steps"], each["alpha"]) for each in report["dev"]]
    assert chosen == [(best, 0.0), (best, 0.6), (tuple(steps), 0.0), (tuple(steps), 0.6)]
    assert report["search"]["steps"] in (best, tuple(steps))
    # By then greedy search makes no mistake, and beams find some short targets more probable.
    assert max(each["bleu"] for each in report["dev"]) > 50
    result = report["test"]["test"]
    assert result["sentences"] == len(dev)
    for precision in ("fp32", "int8"):
        bleu = result["scores"][precision]["BLEU"]
        assert bleu["score"] > 50
        assert "tok:none" in bleu["signature"]
        assert len(read_lines(run / f"test.{precision}.txt")) == len(dev)
    assert result["scores"]["int8"]["BLEU"]["p_value"] is not None
    parameters = sum(parameter.numel() for parameter in trained_run.trained.model.parameters())
    first, _, _, _, *rows = table(report).splitlines()
    assert first.startswith(f"numbers: {parameters:,} parameters, {max(steps)} steps, ")
    assert any(row.startswith("| test | BLEU | ") for row in rows)
