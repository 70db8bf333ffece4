"""The notebook docs/tour.ipynb: its cells run in order, and come to what its text says."""

import json
from pathlib import Path

import matplotlib as mpl
import pytest
from matplotlib import pyplot as plt

NOTEBOOK = Path(__file__).parent.parent / "docs" / "tour.ipynb"


def cells() -> list[tuple[str, str]]:
    """Each cell's code, and the text that the notebook shows below it."""
    content = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return [
        ("".join(cell["source"]), "".join("".join(output.get("text", "")) for output in cell["outputs"]))
        for cell in content["cells"]
        if cell["cell_type"] == "code"
    ]


@pytest.mark.slow  # it trains, exports and loads a model
def test_the_cells_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    mpl.use("Agg")
    names: dict[str, object] = {"__name__": "__main__"}
    outputs = []
    for number, (code, shown) in enumerate(cells(), start=1):
        exec(compile(code, f"cell {number}", "exec"), names)
        outputs.append((capsys.readouterr().out, shown))
    plt.close("all")
    # The notebook shows what was printed; the rest depends on the machine.
    assert outputs[0][0] == outputs[0][1]
    assert outputs[4][0].splitlines()[-1] == outputs[4][1].splitlines()[-1]
    assert names["num_right"] >= 36
    assert [sentence.source_text for sentence in names["answer"].sentences] == [
        "나는 빵을 산다.",
        "너는 물을 가져온다.",
        "여기서 우리는 의자를 찾는다.",
    ]
    assert "I buy some bread." in outputs[-1][0]
