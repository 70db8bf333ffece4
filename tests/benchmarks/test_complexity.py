import dataclasses
from io import StringIO

import pytest
from rich.console import Console

from benchmarks.complexity import Case, all_cases, exponent, measure, summarise
from benchmarks.complexity_layers import LAYER_TYPES


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0, 1.5])
def test_the_exponent_of_a_power_is_found_whatever_its_factor(power):
    sizes = [128, 256, 512, 1024]
    assert exponent(sizes, [3e-6 * size**power for size in sizes]) == pytest.approx(power, abs=1e-9)


def test_every_layer_grows_in_n_and_d_and_those_with_a_width_in_it():
    axes = {(case.kind.name, case.axis) for case in all_cases()}
    for kind in LAYER_TYPES:
        assert {axis for name, axis in axes if name == kind.name} == {"n", "d"} | kind.orders.keys()
    for case in all_cases():
        sizes = {"n": case.n, "d": case.d, "k": case.width, "r": case.width}
        assert sizes[case.axis] == case.size


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


def test_a_sum_of_two_orders_has_no_order_of_its_own():
    kind = LAYER_TYPES[1]
    case = Case(kind, "n", 8, 8, 64, 0, [1.0])
    growth = summarise(kind, [case, dataclasses.replace(case, size=16, n=16)])["growth"]
    assert growth["n"]["order"] is None
    assert 1 < growth["n"]["counted_exponent"] < 2
