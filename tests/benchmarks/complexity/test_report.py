import json
from pathlib import Path

from benchmarks.complexity.report import table

ROOT = Path(__file__).parents[3]
(RESULT,) = (ROOT / "benchmarks" / "results").glob("*-complexity-*.json")


def test_the_table_of_the_readme_is_that_of_the_result_beside_it():
    report = json.loads(RESULT.read_text(encoding="utf-8"))
    readme = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert table(report) in readme
    assert f"results/{RESULT.name}" in readme
    assert report["hardware"]["commit"] in readme
