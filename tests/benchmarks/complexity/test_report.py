import json
from pathlib import Path

import pytest

from benchmarks.complexity.report import save_plot, table

ROOT = Path(__file__).parents[3]
(RESULT,) = (ROOT / "benchmarks" / "results").glob("*-complexity-*.json")


@pytest.fixture
def report():
    return json.loads(RESULT.read_text(encoding="utf-8"))


def test_the_table_of_the_readme_is_that_of_the_result_beside_it(report):
    readme = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert "\n".join(table(report)) in readme
    assert f"results/{RESULT.name}" in readme
    assert report["hardware"]["commit"] in readme


def test_the_picture_is_drawn_from_the_result(report, tmp_path):
    save_plot(report, tmp_path / "complexity.png")
    assert (tmp_path / "complexity.png").read_bytes().startswith(b"\x89PNG")
