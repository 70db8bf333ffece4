import json
from io import StringIO

import pytest
from rich.console import Console

from benchmarks.complexity import __main__ as complexity
from benchmarks.complexity.__main__ import Case, main, measure, summarise
from benchmarks.complexity.layers import LAYER_TYPES


def test_every_case_is_timed_once_a_round_and_its_median_is_told():
    kind = LAYER_TYPES[0]
    cases = [Case(kind, "n", n, n, 64, 0) for n in (8, 16)] + [Case(kind, "d", d, 8, d, 0) for d in (64, 128)]
    measure(cases, 3, Console(file=StringIO()))
    assert all(len(case.seconds) == 3 and min(case.seconds) > 0 for case in cases)
    for case in cases:
        case.seconds[:] = [9.0, 1e-3 * case.size, 1e-6]
    growth = summarise(kind, cases)["growth"]
    assert growth["n"]["seconds"] == [0.008, 0.016]
    assert growth["n"]["multiply_adds"] == [2 * 8**2 * 64, 2 * 16**2 * 64]
    assert growth["n"]["counted_exponent"] == pytest.approx(2)
    assert growth["n"]["measured_exponent"] == pytest.approx(1)
    assert growth["n"]["measured_exponent_at_the_end"] == pytest.approx(1)


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
