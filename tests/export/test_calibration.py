"""The interval of every map's input is chosen from what the model really sees."""

import pytest
import torch
from torch import nn

from seq2seq_serve.export.calibration import _range, calibrate


def test_every_map_gets_the_interval_of_what_it_reads(random_trained):
    model = random_trained.model
    ranges = calibrate(model, [([5, 6, 7, 2], [1, 8, 9])])
    maps = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert ranges.keys() == maps | {"output"}
    for name, interval in ranges.items():
        assert interval.low <= 0 < interval.high, name
        if name.endswith("feed_forward.outer"):
            assert interval.low == 0, "behind a ReLU nothing is negative"
        else:
            assert interval.low < 0


def test_calibration_leaves_the_model_as_it_was(random_trained):
    calibrate(random_trained.model, [([5, 2], [1, 8])])
    assert not any(module._forward_pre_hooks for module in random_trained.model.modules())


def test_far_values_are_cut_off_where_that_costs_less():
    values = torch.linspace(0, 1, 100_000)
    assert _range(values).high == 1.0
    values[-1] = 3.0
    assert 1.0 < _range(values).high < 2.9


@pytest.mark.parametrize("values", [torch.zeros(5), torch.full((5,), -2.0), torch.full((5,), 2.0)])
def test_zero_is_always_inside(values):
    interval = _range(values)
    assert interval.low <= 0 < interval.high
