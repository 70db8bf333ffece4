"""How large a runner of a bundle is on this machine, before it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bundle import names
from bundle.manifest import Bundle, TensorSpec
from bundle.names import Axis, Precision, Role
from server.device import CPU, ProviderPolicy, choose
from server.machine import usable_cpus

# Copies that the kernels of one runner pack for themselves: the encoder's weights once, the decoder's for a
# step and for many positions at once. All runners share the weights that were read.
_MOST_PACKED_COPIES = 2


@dataclass(frozen=True)
class RunnerConfig:
    """How graphs are run.

    Attributes:
        provider: What may run them.
        precision: None takes the fastest that the bundle has for the provider.
        num_threads: Of the CPU; None is those that this process may use.
        shares_threads: Whether all graphs of the process use one pool of threads, as a server's should.
        num_instances: How many runners like this one there are, which share threads, budget and slots.
        cuda_graphs: Whether steps on CUDA are captured and replayed.
        cuda_libraries: Folder with the libraries of CUDA and cuDNN; None searches this Python's packages.
        memory_budget_bytes: Of all slots' cache and memory.
        max_slots: The most sequences at once, however large the budget.
        max_source_length: Tokens; None is the manifest's limit, a lower one saves memory.
        max_target_length: Tokens; None is the manifest's limit, a lower one saves memory.
    """

    provider: ProviderPolicy = ProviderPolicy.PREFER
    precision: Precision | None = None
    num_threads: int | None = None
    shares_threads: bool = False
    num_instances: int = 1
    cuda_graphs: bool = True
    cuda_libraries: Path | None = None
    memory_budget_bytes: int = 1 << 30
    max_slots: int = 256
    max_source_length: int | None = None
    max_target_length: int | None = None

    def __post_init__(self) -> None:
        if self.provider not in tuple(ProviderPolicy):
            raise ValueError(f"provider is {self.provider!r}, and must be one of {', '.join(ProviderPolicy)}")
        for name in ("num_threads", "num_instances", "max_slots", "max_source_length", "max_target_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, and must be at least 1")
        if self.num_instances > self.max_slots:
            raise ValueError(
                f"num_instances is {self.num_instances}, and must be at most max_slots, {self.max_slots}"
            )


@dataclass(frozen=True)
class Sizing:
    """One runner of a bundle, of `num_instances` that are alike.

    Attributes:
        provider: What runs the graphs, by its short name.
        num_threads: Of a graph's run.
        num_pool_threads: Of the pool that all runners share.
        sizes: Positions of the buffers' rows by axis.
        groups: The memory and cache tensors of all graphs, those of like shape together.
        slot_bytes: Cache and memory of a slot.
        weight_bytes: Of the file of weights.
        vocab_size: V.
    """

    provider: str
    precision: Precision
    num_instances: int
    num_threads: int
    num_pool_threads: int
    sizes: dict[str, int]
    groups: tuple[tuple[TensorSpec, ...], ...]
    slot_bytes: int
    num_slots: int
    weight_bytes: int
    vocab_size: int

    @property
    def total_bytes(self) -> int:
        """Weights, caches and memory of all slots of all instances; on a GPU also logits and penalties."""
        slots_bytes = self.num_slots * self.slot_bytes
        if self.provider != CPU:
            columns_bytes = 2 * self.num_slots * self.vocab_size * np.dtype(np.float32).itemsize
            return self.num_instances * (self.weight_bytes + slots_bytes + columns_bytes)
        packed_bytes = _MOST_PACKED_COPIES * self.weight_bytes
        return self.weight_bytes + self.num_instances * (packed_bytes + slots_bytes)

    @property
    def limited_bytes(self) -> int:
        """What of it counts against a memory limit: a GPU's memory is its own, and says when it is full."""
        return self.total_bytes if self.provider == CPU else 0

    def row_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        """Of one row of a memory or cache tensor."""
        return _row_shape(spec, self.sizes)


def size_up(bundle: Bundle, config: RunnerConfig) -> Sizing:
    """The sizes of each of the runners that a configuration asks for.

    Raises:
        ValueError: The bundle has no graphs for what may run them, one slot does not fit the budget, or there
            are more instances than threads.
    """
    manifest = bundle.manifest
    provider, precision = choose(bundle, config.provider, config.precision, config.cuda_libraries)
    num_instances, num_threads = config.num_instances, config.num_threads or usable_cpus()
    if provider == CPU and num_instances > num_threads:
        raise ValueError(
            f"num_instances is {num_instances}, and there are {num_threads} threads: each needs its own"
        )
    sizes: dict[str, int] = {
        Axis.CACHE_CAPACITY: _limit(
            "max_target_length", config.max_target_length, manifest.max_target_length
        ),
        Axis.MEMORY_CAPACITY: _limit(
            "max_source_length", config.max_source_length, manifest.max_source_length
        ),
    }
    variant = manifest.variants[precision]
    groups: dict[tuple[Any, ...], dict[str, TensorSpec]] = {}
    for graph in variant.graphs.values():
        for spec in (*graph.inputs, *graph.outputs):
            if spec.role in (Role.MEMORY, Role.CACHE):
                twin = replace(spec, name=names.buffer_of(spec.name))
                groups.setdefault((spec.role, spec.axes, spec.dtype), {})[twin.name] = twin
    slot_bytes = sum(
        math.prod(_row_shape(spec, sizes)) * np.dtype(spec.storage).itemsize
        for specs in groups.values()
        for spec in specs.values()
    )
    num_slots = min(config.memory_budget_bytes // slot_bytes, config.max_slots) // num_instances
    if num_slots < 1:
        of_whom = f" of {num_instances} instances" if num_instances > 1 else ""
        raise ValueError(
            f"a slot takes {slot_bytes} bytes and the memory budget{of_whom} is "
            f"{config.memory_budget_bytes}: raise the budget, or lower max_source_length and "
            "max_target_length"
        )
    return Sizing(
        provider=provider,
        precision=precision,
        num_instances=num_instances,
        num_threads=max(num_threads // num_instances, 1),  # fewer than instances there can be on CUDA
        # Besides those of the pool each engine's own thread takes part in a run.
        num_pool_threads=max(num_threads - num_instances + 1, 1),
        sizes=sizes,
        groups=tuple(tuple(specs.values()) for specs in groups.values()),
        slot_bytes=slot_bytes,
        num_slots=num_slots,
        weight_bytes=variant.weights.size_bytes,
        vocab_size=manifest.sizes["vocab_size"],
    )


def _row_shape(spec: TensorSpec, sizes: dict[str, int]) -> tuple[int, ...]:
    return replace(spec, axes=spec.axes[1:]).shape(sizes)


def _limit(name: str, asked: int | None, manifest_limit: int) -> int:
    if asked is not None and asked > manifest_limit:
        raise ValueError(f"{name} is {asked}, and the model's limit is {manifest_limit}")
    return asked or manifest_limit
