"""Calibration of int8: chooses the interval of each linear map's input that its 256 levels cover."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from seq2seq_serve.export.graphs.linear import ActivationRange
from seq2seq_serve.training.models.base import EncoderDecoder

_VALUES_PER_MAP = 100_000
_SHRINK_FACTORS = [1.0 - 0.05 * i for i in range(15)]  # of the observed interval, down to 0.3 of it


def calibrate(
    model: EncoderDecoder,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    max_values_per_pair: int | None = None,
) -> dict[str, ActivationRange]:
    """Run the model on pairs, and choose each map's interval for the least squared error.

    A few outliers would waste most levels on an almost empty part of the interval; cutting them off costs
    less than it saves (Migacz 2017, "8-bit inference with TensorRT"; here the criterion is the squared
    error).

    Args:
        model: In eval mode.
        pairs: An encoded source, and the target's token ids with the start token.
        max_values_per_pair: The most inputs of a map that are kept of a pair: the extreme ones and random
            others. None keeps all, which takes much memory for a large model.

    Returns:
        The range of each map, by its name in the family's file in `export/graphs/`.
    """
    seen: dict[str, list[Tensor]] = defaultdict(list)
    generator = torch.Generator().manual_seed(0)

    def keep(name: str, values: Tensor) -> None:
        values = values.flatten()
        if max_values_per_pair is not None and len(values) > max_values_per_pair:
            chosen = torch.randint(len(values), (max_values_per_pair,), generator=generator)
            values = torch.cat([values[chosen], torch.stack(values.aminmax())])
        seen[name].append(values)

    with torch.inference_mode(), _recording(model, keep):
        for source_ids, target_ids in pairs:
            source = model.source_kind.tensors([model.source_kind.inputs(source_ids)])
            memory = model.encode(*source)
            states = model.decode_states(torch.tensor([list(target_ids)]), memory, source[-1])
            keep("output", states)
    return {name: _range(torch.cat(values)) for name, values in seen.items()}


@contextmanager
def _recording(model: nn.Module, keep: Callable[[str, Tensor], None]) -> Iterator[None]:
    def record(name: str) -> torch.utils.hooks.RemovableHandle:
        module = model.get_submodule(name)
        return module.register_forward_pre_hook(lambda _, inputs: keep(name, inputs[0]))

    handles = [record(name) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _range(values: Tensor) -> ActivationRange:
    if len(values) > _VALUES_PER_MAP:
        chosen = random.Random(0).sample(range(len(values)), _VALUES_PER_MAP)
        sample = values[torch.tensor(chosen)]
    else:
        sample = values
    low, high = min(float(values.min()), 0.0), max(float(values.max()), 1e-6)
    candidates = [ActivationRange(low * factor, high * factor) for factor in _SHRINK_FACTORS]
    return min(candidates, key=lambda candidate: _squared_error(sample, candidate))


def _squared_error(values: Tensor, interval: ActivationRange) -> float:
    scale = (interval.high - interval.low) / 255
    zero_point = round(-interval.low / scale)
    levels = torch.clamp(torch.round(values / scale) + zero_point, 0, 255)
    return float(((levels - zero_point) * scale - values).square().mean())
