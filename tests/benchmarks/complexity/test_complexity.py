import json

import pytest

from benchmarks.complexity import __main__ as complexity
from benchmarks.complexity.__main__ import Case, main
from benchmarks.complexity.layers import LAYER_TYPES


@pytest.mark.slow
def test_the_command_ends_with_its_report_and_writes_it_and_the_picture(tmp_path, monkeypatch, capsys):
    def small_cases():
        for kind in LAYER_TYPES:
            grids = {"n": (512, 1024), "d": (64, 128)} | {
                axis: (3, 5) for axis in "kr" if axis in kind.orders
            }
            for axis, sizes in grids.items():
                for size in sizes:
                    values = {"n": 64, "d": 64, "width": min(kind.width or 0, 5)}
                    values |= {axis if axis in "nd" else "width": size}
                    yield Case(kind, axis, size, **values)

    monkeypatch.setattr(complexity, "all_cases", small_cases)
    monkeypatch.setattr("os.sched_setaffinity", lambda *_: None)  # of the tests themselves
    out, plot = tmp_path / "results" / "complexity.json", tmp_path / "complexity.png"
    assert main(["--rounds", "1", "--out", str(out), "--plot", str(plot)]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out.splitlines()[-1])
    assert report == json.loads(out.read_text(encoding="utf-8"))
    assert [layer["name"] for layer in report["layers"]] == [kind.name for kind in LAYER_TYPES]
    crossed = [layer["layers_to_cross_65_positions"] for layer in report["layers"]]
    assert crossed == [1, 1, 1, 64, 8]
    assert "| restricted self-attention | O(r·n·d) |" in printed.err
    assert plot.read_bytes().startswith(b"\x89PNG")
