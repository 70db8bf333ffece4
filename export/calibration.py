"""Which interval of every linear map's input its 256 int8 levels shall cover."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from export.linear import ActivationRange
from training.transformer import Transformer

_VALUES_PER_MAP = 100_000
_SHRINK_FACTORS = [1.0 - 0.05 * i for i in range(15)]  # of the interval seen, down to 0.3 of it


def calibrate(
    model: Transformer, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> dict[str, ActivationRange]:
    """Watch the model read sentence pairs, and choose each map's interval for the least squared error.

    A few far values would waste most levels on an empty stretch; cutting them off costs less than it saves
    (Migacz 2017, "8-bit inference with TensorRT"; here the criterion is the squared error).

    Args:
        model: In eval mode.
        pairs: `(source token ids, target token ids with the start token)`.

    Returns:
        A range by the name that `export.graphs` gives the map.
    """
    seen: dict[str, list[Tensor]] = defaultdict(list)
    with torch.inference_mode(), _watching(model, seen):
        for source_ids, target_ids in pairs:
            source_mask = torch.ones(1, len(source_ids), dtype=torch.bool)
            memory = model.encode(torch.tensor([list(source_ids)]), source_mask)
            states = model.decode_states(torch.tensor([list(target_ids)]), memory, source_mask)
            seen["memory"].append(memory.flatten())
            seen["output"].append(states.flatten())
    return {name: _range(torch.cat(values)) for name, values in seen.items()}


@contextmanager
def _watching(model: nn.Module, seen: dict[str, list[Tensor]]) -> Iterator[None]:
    def watch(name: str) -> torch.utils.hooks.RemovableHandle:
        module = model.get_submodule(name)
        return module.register_forward_pre_hook(lambda _, inputs: seen[name].append(inputs[0].flatten()))

    handles = [watch(name) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
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
