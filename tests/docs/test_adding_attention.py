"""The page docs/adding-attention.md is done as it says."""

import re
from pathlib import Path

import pytest

from seq2seq_serve.training.models.attention import FUNCTIONS
from seq2seq_serve.training.run import RunFolder

PAGE = Path(__file__).parents[2] / "docs" / "adding-attention.md"


def test_the_function_of_the_page_is_trained_exported_proved_and_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, object] = {"__name__": "__main__"}
    monkeypatch.setitem(FUNCTIONS, "cosine", FUNCTIONS["dot"])  # so that it is removed afterwards
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
    assert RunFolder(Path("runs/cosine")).read_config().model.attention == "cosine"
    attention = names["attention"]
    width = len(attention.source_tokens)
    assert sum(attention.weights[:width]) == pytest.approx(1, abs=1e-5)
    # Without the function, the run cannot be mistaken for one with another attention.
    monkeypatch.undo()
    with pytest.raises(ValueError, match="attention is 'cosine', and must be one of none, additive, dot"):
        RunFolder(tmp_path / "runs/cosine").read_config()
