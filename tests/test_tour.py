"""The notebook docs/tour.ipynb: its cells run in order, and come to what its text says."""

import json
from pathlib import Path

import matplotlib as mpl
import pytest
from matplotlib import pyplot as plt

NOTEBOOK = Path(__file__).parent.parent / "docs" / "tour.ipynb"


def cells() -> list[str]:
    content = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow  # it trains, exports and loads a model
def test_the_cells_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    mpl.use("Agg")
    names: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(cells(), start=1):
        exec(compile(cell, f"cell {number}", "exec"), names)
    plt.close("all")
    assert names["num_right"] >= 36
    assert [sentence.source_text for sentence in names["answer"].sentences] == [
        "나는 빵을 산다.",
        "너는 물을 가져온다.",
        "여기서 우리는 의자를 찾는다.",
    ]
    assert "I buy some bread." in capsys.readouterr().out
