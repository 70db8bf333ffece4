"""Computes the size of a bundle's runner on this machine before the runner is created."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.adapters import Places
from seq2seq_serve.bundle.files import read_small_file
from seq2seq_serve.bundle.manifest import Bundle, Manifest, TensorSpec, Variant, load_bundle
from seq2seq_serve.bundle.names import Axis, Precision, Role, Verb
from seq2seq_serve.bundle.tokenizer import Tokenizer
from seq2seq_serve.server.config import ProviderPolicy, RunnerConfig, Speculation
from seq2seq_serve.server.runner.buffers import COLUMNS, ROW_ROLES, num_copies
from seq2seq_serve.server.runner.device import CPU, Remark, choose, has_operators, operators_remarks
from seq2seq_serve.server.system.machine import usable_cpus

# What one runner on a CPU packs in fp32 beside the weights that all runners share. Where maps are the
# project's own operators, these are tables that are small, or that other operators read, too: once for steps,
# and once for many positions. Otherwise ONNX Runtime packs all weights of the decoder twice.
_MOST_PACKED_BYTES, _MOST_PACKED_COPIES = 2 * 2**24, 2
# Most rows of memory on a GPU beside those of the slots, for encode calls that are captured
_MOST_STAGED_ROWS = 64
_MOST_GRAPH_BYTES = 2**24
_PROCESS_BYTES = 64 * 2**20  # an instance's own process, with Python, numpy and ONNX Runtime: 50 MiB measured
_SMALL_BYTES = 2**25  # of weights: a turn of the engine is to a large part Python's


@dataclass(frozen=True)
class Sizing:
    """The sizes of each of a bundle's `num_instances` equal runners.

    Attributes:
        provider: Short name of the provider that runs the graphs.
        num_threads: Threads of a graph's run.
        has_processes: Whether each runner has a process of its own; otherwise the only one has a thread.
        max_source_length: The largest length of the source that memory depends on.
        sizes: Positions of the buffers' rows by axis.
        groups: The memory, cache and state tensors of all graphs, grouped by shape.
        slot_bytes: Memory, cache and state of a slot.
        weight_bytes: Size of the file of weights.
        packed_bytes: The most that each runner packs of it for itself.
        vocab_size: V.
        num_hops: The number of times that it attends to each position of memory for one token; 0 if it does
            not report its attention.
        num_alignment_heads: The number of heads whose attention it reports one by one, because they align
            targets with sounds; 0 if it reports their mean.
        num_adapters: The places for adapters; 0 if the graphs take none.
        max_rank: The largest rank of an adapter.
        adapter_bytes: The most that each runner takes for adapters.
        draft: The draft model, if there is one.
        remarks: Why CUDA or a draft model is not used, for the log of the caller.
    """

    provider: str
    precision: Precision
    num_instances: int
    num_threads: int
    has_processes: bool
    max_source_length: int
    sizes: dict[str, int]
    groups: tuple[tuple[TensorSpec, ...], ...]
    slot_bytes: int
    num_slots: int
    weight_bytes: int
    packed_bytes: int
    vocab_size: int
    num_hops: int
    num_alignment_heads: int = 0
    num_adapters: int = 0
    max_rank: int = 1
    adapter_bytes: int = 0
    draft: Draft | None = None
    remarks: tuple[Remark, ...] = ()

    @property
    def num_staged_rows(self) -> int:
        """The rows of memory on a GPU, after those of the slots, that captured encode calls write.

        A power of two, as are the numbers of rows of the largest captured calls.
        """
        return min(1 << (self.num_slots.bit_length() - 1), _MOST_STAGED_ROWS)

    @property
    def total_bytes(self) -> int:
        """The bytes of weights, slots and processes of all instances; on a GPU also logits and penalties."""
        if self.provider != CPU:
            slots_bytes = self.num_slots * self.slot_bytes
            columns_bytes = 2 * self.num_slots * self.vocab_size * np.dtype(np.float32).itemsize
            staged_bytes = self.num_staged_rows * self.slot_bytes  # at most: they have no cache
            runner_bytes = slots_bytes + columns_bytes + staged_bytes + self.adapter_bytes
            return self.num_instances * (self.weight_bytes + runner_bytes)
        process_bytes = _PROCESS_BYTES if self.has_processes else 0
        of_draft = 0 if self.draft is None else self.draft.sizing.model_bytes
        return self.model_bytes + of_draft + self.num_instances * process_bytes

    @property
    def model_bytes(self) -> int:
        """The bytes of weights, slots and adapters of all instances, without a draft model, on a CPU.

        The engine keeps one more copy of the adapters, for instances that are started again.
        """
        runner_bytes = self.packed_bytes + self.num_slots * self.slot_bytes + self.adapter_bytes
        return self.weight_bytes + self.adapter_bytes + self.num_instances * runner_bytes

    @property
    def limited_bytes(self) -> int:
        """The bytes that count against `max_models_size_bytes`; CUDA itself limits a GPU's memory."""
        return self.total_bytes if self.provider == CPU else 0


@dataclass(frozen=True)
class Draft:
    """The bundle of a draft model, and the sizes of its runners."""

    bundle: Bundle
    sizing: Sizing

    def __str__(self) -> str:
        cut = f", {self.bundle.manifest.kept_tokens}" * self.bundle.manifest.drafts_only
        return f"{self.bundle.path} in {self.sizing.precision}{cut}"


def size_up(bundle: Bundle, config: RunnerConfig, *, is_draft: bool = False) -> Sizing:
    """Returns the sizes of each of the configured runners, of a model or of a draft model.

    Raises:
        ValueError: The bundle does not have graphs for an allowed provider, its step reads an unknown column,
            a limit does not fit the model, one slot is too large, there are more instances than
            threads, the draft model does not fit, or the bundle is only for drafts.
    """
    manifest = bundle.manifest
    if manifest.drafts_only and not is_draft:
        raise ValueError("it selects some of the tokens only: it is not served, but the --draft of a model")
    provider, precision, remarks = choose(bundle, config.provider, config.precision, config.cuda_libraries)
    try:
        return _size_up(bundle, config, provider, precision, remarks)
    except ValueError as error:
        reasons = "".join(f" ({remark})" for level, remark in remarks if level == logging.WARNING)
        raise ValueError(f"{error}{reasons}") from error


def _size_up(
    bundle: Bundle,
    config: RunnerConfig,
    provider: str,
    precision: Precision,
    remarks: tuple[Remark, ...],
) -> Sizing:
    """Returns the sizes for a provider and a precision; the errors are those of `size_up`."""
    manifest = bundle.manifest
    variant = manifest.variants[precision]
    weight_bytes = variant.weights.size_bytes
    num_instances, num_cpus = config.num_instances, usable_cpus()
    is_single = num_instances == 1 and provider == CPU
    # Otherwise its engine and the event loop of the callers would wait for each other's Python.
    is_apart = is_single and config.has_callers and num_cpus > 1 and weight_bytes <= _SMALL_BYTES
    is_apart = is_apart and hasattr(os, "memfd_create")  # Linux: two processes share the weights
    num_threads = config.num_threads or num_cpus - is_apart
    if provider == CPU and num_instances > num_threads:
        threads = "is 1 thread" if num_threads == 1 else f"are {num_threads} threads"
        raise ValueError(
            f"num_instances is {num_instances}, and there {threads}: each instance needs its own"
        )
    max_source_length = _limit("max_source_length", config.max_source_length, manifest.max_source_length)
    max_target_length = _limit("max_target_length", config.max_target_length, manifest.max_target_length)
    least = manifest.template.num_read_first
    if max_target_length < least:
        raise ValueError(
            f"max_target_length is {max_target_length}, and must be at least {least}: the model begins every "
            f"target with {least} tokens"
        )
    sizes: dict[str, int] = {
        Axis.CACHE_CAPACITY: max_target_length,
        Axis.MEMORY_CAPACITY: manifest.memory.memory_length({manifest.memory.source: max_source_length}),
    }
    for spec in variant.graphs[Verb.STEP].inputs:
        if spec.role is Role.TOKEN and spec.name not in COLUMNS:
            raise ValueError(
                f"the step of {precision} reads the column {spec.name!r}, and this server fills only "
                f"{', '.join(COLUMNS)}: export the run and serve it with the same version"
            )
    groups: dict[tuple[Any, ...], dict[str, TensorSpec]] = {}
    for graph in variant.graphs.values():
        for spec in (*graph.inputs, *graph.outputs):
            if spec.role in ROW_ROLES:
                twin = replace(spec, name=names.buffer_of(spec.name))
                groups.setdefault((spec.role, spec.axes, spec.dtype), {})[twin.name] = twin
    slot_bytes = sum(
        math.prod(row_shape(spec, sizes)) * np.dtype(spec.storage).itemsize * num_copies(spec.role)
        for specs in groups.values()
        for spec in specs.values()
    )
    num_slots = min(config.max_slots_size_bytes // slot_bytes, config.max_slots) // num_instances
    if num_slots < 1:
        of_all = f" of {num_instances} instances" if num_instances > 1 else ""
        raise ValueError(
            f"a slot takes {slot_bytes} bytes, and all slots{of_all} may take "
            f"{config.max_slots_size_bytes}: raise max_slots_size, or lower max_source_length and "
            "max_target_length"
        )
    num_hops, num_alignment_heads = _reported_attention(variant)
    packed_bytes = 0
    if precision is Precision.FP32:
        packed_bytes = _MOST_PACKED_COPIES * weight_bytes
        if has_operators() and _has_own_maps(bundle, variant):
            packed_bytes = min(packed_bytes, _MOST_PACKED_BYTES)
    num_adapters, max_rank = (config.max_adapters, config.max_rank) if config.has_adapters else (1, 1)
    if not manifest.adapted_maps:
        num_adapters, max_rank = 0, 1
    sizing = Sizing(
        provider=provider,
        precision=precision,
        num_instances=num_instances,
        num_threads=max(num_threads // num_instances, 1),  # on CUDA there may be more instances than threads
        has_processes=is_apart or not is_single,
        max_source_length=max_source_length,
        sizes=sizes,
        groups=tuple(tuple(specs.values()) for specs in groups.values()),
        slot_bytes=slot_bytes,
        num_slots=num_slots,
        weight_bytes=weight_bytes,
        packed_bytes=packed_bytes,
        vocab_size=manifest.target_vocab_size,
        num_hops=num_hops,
        num_alignment_heads=num_alignment_heads,
        num_adapters=num_adapters,
        max_rank=max_rank,
        adapter_bytes=Places(manifest.adapted_maps).num_bytes(num_adapters, max_rank),
        remarks=remarks + operators_remarks(bundle.path, provider),
    )
    if config.draft is None:
        return sizing
    reason = None
    if config.draft.resolve() == bundle.path.resolve():
        reason = "it is the draft model itself"
    elif config.speculative is Speculation.OFF:
        reason = "speculative is off"
    elif provider != CPU:
        reason = f"it runs on {provider}"
    elif not has_operators():
        reason = "the compiled operators are missing"
    if reason is not None:
        remark = logging.WARNING, f"{bundle.path}: {reason}, so a draft model is not used"
        return replace(sizing, remarks=(*sizing.remarks, remark))
    with errors_of_draft():
        draft_bundle = load_bundle(config.draft, checks_content=False)
    try:
        return replace(sizing, draft=_draft_of(bundle, sizing, config, draft_bundle))
    except ValueError as error:
        raise ValueError(f"the draft model {config.draft} does not fit: {error}") from error


@contextmanager
def errors_of_draft() -> Iterator[None]:
    """Adds to the errors of a bundle that it is the draft model's."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"the draft model: {error}") from error


def _draft_of(bundle: Bundle, sizing: Sizing, config: RunnerConfig, draft_bundle: Bundle) -> Draft:
    """Returns the draft model of a model; raises ValueError if it cannot draft for it."""
    model, draft = bundle.manifest, draft_bundle.manifest
    if draft_bundle.target_tokenizer.token_bytes != bundle.target_tokenizer.token_bytes or (
        (draft.target_vocab_size, draft.special_ids.eos_ids)
        != (model.target_vocab_size, model.special_ids.eos_ids)
    ):
        raise ValueError(
            "its targets have other tokens: distil one from the model's run, or take a smaller model of its "
            "family"
        )
    max_target_length = sizing.sizes[Axis.CACHE_CAPACITY]
    for side, limit, needed in (
        ("source", draft.max_source_length, sizing.max_source_length),
        ("target", draft.max_target_length, max_target_length),
    ):
        if limit < needed:
            raise ValueError(
                f"its {side}s have at most {limit} tokens, and the model's {needed}: "
                f"lower --max-{side}-length"
            )
    draft_sizing = size_up(
        draft_bundle,
        replace(
            config,
            draft=None,
            has_adapters=False,  # it drafts the same for all
            num_threads=sizing.num_instances * sizing.num_threads,
            provider=ProviderPolicy.CPU,
            # A wrong draft costs only time, and a step of one row takes as long as reading the weights.
            precision=Precision.INT4 if Precision.INT4 in draft.variants else None,
            max_slots=sizing.num_instances * sizing.num_slots,
            max_source_length=sizing.max_source_length,
            max_target_length=max_target_length,
        ),
        is_draft=True,
    )
    if _inputs(draft_bundle, draft_sizing) != _inputs(bundle, sizing):
        raise ValueError("it reads other sources")
    for each, precision in ((model, sizing.precision), (draft, draft_sizing.precision)):
        step = each.variants[precision].graphs[Verb.STEP]
        if names.CACHE_ROWS not in [spec.name for spec in step.inputs]:
            which = "the model" if each is model else "it"
            raise ValueError(f"{which} cannot read several tokens of a target in a step")
    if draft_sizing.num_slots < sizing.num_slots:
        raise ValueError(
            f"its slots take {draft_sizing.slot_bytes} bytes, so --max-slots-size has room for "
            f"{draft_sizing.num_slots} beside the {sizing.num_slots} of the model: raise it, or lower "
            "--max-slots"
        )
    return Draft(without_tokenizers(draft_bundle), draft_sizing)


def _inputs(bundle: Bundle, sizing: Sizing) -> tuple[object, ...]:
    """Returns what decides which sources a model reads, and how it counts them."""
    manifest = bundle.manifest
    specs = {spec.name: (spec.dtype, spec.axes) for spec in source_specs(manifest, sizing.precision)}
    tokens = bundle.source_tokenizer.token_bytes if names.SOURCE_IDS in specs else ()
    return specs, manifest.memory, manifest.source_vocab_size, tokens


def without_tokenizers(bundle: Bundle) -> Bundle:
    """Returns a bundle that a runner can use, and that is small."""
    none = Tokenizer.__new__(Tokenizer)
    return replace(bundle, source_tokenizer=none, target_tokenizer=none)


def _has_own_maps(bundle: Bundle, variant: Variant) -> bool:
    """Whether maps are the project's own operators; bundles of earlier versions have ONNX's."""
    step = bundle.path / variant.graphs[Verb.STEP].file.file
    try:
        return b"Linear" in read_small_file(step, _MOST_GRAPH_BYTES)
    except (OSError, ValueError):
        return False


def source_specs(manifest: Manifest, precision: Precision) -> list[TensorSpec]:
    """Returns the sources that the `encode` graph reads, without their lengths."""
    inputs = manifest.variants[precision].graphs[Verb.ENCODE].inputs
    return [spec for spec in inputs if spec.name in manifest.sources]


def row_shape(spec: TensorSpec, sizes: dict[str, int]) -> tuple[int, ...]:
    """Returns the shape of one row of a memory, cache or state tensor."""
    return replace(spec, axes=spec.axes[1:]).shape(sizes)


def _reported_attention(variant: Variant) -> tuple[int, int]:
    """Returns `num_hops` and `num_alignment_heads`: steps report hops, and `decode` reports heads."""
    for verb, graph in variant.graphs.items():
        for spec in graph.outputs:
            if spec.role is Role.ATTENTION:
                sizes = [axis for axis in spec.axes if isinstance(axis, int)]
                if verb is Verb.DECODE:
                    return 1, math.prod(sizes) if sizes else 0
                return math.prod(sizes), 0
    return 0, 0


def _limit(name: str, asked: int | None, manifest_limit: int) -> int:
    if asked is not None and asked > manifest_limit:
        raise ValueError(f"{name} is {asked}, and the model's limit is {manifest_limit}")
    return asked or manifest_limit
