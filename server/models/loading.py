"""Loads a bundle into a model that can be served."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from seq2seq_serve.bundle.manifest import Bundle, load_bundle
from seq2seq_serve.server.config import ServerConfig
from seq2seq_serve.server.deliveries import Deliveries
from seq2seq_serve.server.engine.records import Request, Turn
from seq2seq_serve.server.engine.scheduler import SchedulerLimits
from seq2seq_serve.server.errors import ServerError
from seq2seq_serve.server.models.instance import (
    AnyEngine,
    EngineProcess,
    EngineSetup,
    Group,
    shared_memory,
    started_engine,
    without_tokenizers,
)
from seq2seq_serve.server.models.served import ServedModel, SourceSpec
from seq2seq_serve.server.runner.device import CPU, CUDA, describe_device
from seq2seq_serve.server.runner.sizing import Sizing, size_up, source_specs

_log = logging.getLogger(__name__)

# On an H100 an encode call takes 0.8 ms for 5 tokens and 1.5 ms for 4,000: launching its kernels takes longer
# than encoding.
LIMITS = {
    CPU: SchedulerLimits(),
    CUDA: SchedulerLimits(max_encode_tokens=4096, max_encode_tokens_beside=2048, max_align_tokens=256),
}


def load_model(
    path: Path, config: ServerConfig, deliveries: Deliveries, num_used_bytes: int = 0
) -> ServedModel:
    """Check a bundle, load its graphs, and start its engines, which warm up each graph.

    Args:
        path: The bundle's folder.
        config: The server's settings for this model.
        deliveries: Receives the engines' turns.
        num_used_bytes: Memory of the models that are loaded already.

    Raises:
        ValueError: The bundle cannot be used, or not on this machine; the message names it.
    """
    bundle = load_bundle(path)
    try:
        sizing = size_up(bundle, config.runner)
        num_bytes = sizing.limited_bytes
        if num_bytes and num_used_bytes + num_bytes > config.memory_limit_bytes:
            raise ValueError(
                f"it takes {num_bytes} bytes beside the {num_used_bytes} of loaded models, and the memory "
                f"limit is {config.memory_limit_bytes}: raise --memory-limit, lower --memory-budget, or "
                "unload a model first"
            )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    num_instances, num_slots = sizing.num_instances, sizing.num_instances * sizing.num_slots
    _log.info(
        "model %s: %s on %s, %d slots, %d threads%s",
        deliveries.model_name,
        sizing.precision,
        describe_device(sizing.provider, sizing.precision, config.runner.cuda_libraries),
        num_slots,
        num_instances * sizing.num_threads,
        f", {num_instances} instances" if num_instances > 1 else "",
    )
    engines = start_engines(
        bundle,
        sizing,
        config,
        model_name=deliveries.model_name,
        deliver=deliveries.deliver,
        refuse=deliveries.refuse,
    )
    manifest = bundle.manifest
    return ServedModel(
        engines=engines,
        deliveries=deliveries,
        version=bundle.version,
        kind=manifest.kind,
        precision=sizing.precision,
        provider=sizing.provider,
        vocab_size=sizing.vocab_size,
        cache_bytes=num_slots * sizing.slot_bytes,
        num_bytes=num_bytes,
        source_vocab_size=manifest.source_vocab_size,
        pad_id=manifest.special_ids.pad_id,
        eos_ids=manifest.special_ids.eos_ids,
        frames=manifest.frames,
        choices=manifest.choices,
        generation=manifest.generation,
        timestamps=manifest.timestamps,
        queue_limits=config.queue,
        sources={
            spec.name: SourceSpec(manifest.sources[spec.name], spec, manifest.resampling)
            for spec in source_specs(manifest, sizing.precision)
        },
        memory=manifest.memory,
        has_attention=sizing.num_hops > 0,
        num_hops=max(sizing.num_hops, 1),
        source_tokenizer=bundle.source_tokenizer,
        target_tokenizer=bundle.target_tokenizer,
        source_language=manifest.source_language,
        length_bound=manifest.length_bound,
        provenance=manifest.provenance,
    )


def start_engines(
    bundle: Bundle,
    sizing: Sizing,
    config: ServerConfig,
    *,
    model_name: str,
    deliver: Callable[[Turn], None],
    refuse: Callable[[Sequence[Request], ServerError], None],
) -> tuple[AnyEngine, ...]:
    """Start the engines of a model: one on a CPU in this process, all others in a process each.

    An engine on CUDA turns every millisecond or two, and the handlers run as much Python as the engine does.
    On an H100 that served `base` to 64 callers, a process of its own made it 1.6 times as fast. It also keeps
    captures apart: while a thread captures a run, no other thread of the process may use the device.

    Args:
        bundle: A checked bundle.
        sizing: Of each of its engines.
        config: The server's settings for this model.
        model_name: For the log.
        deliver: As for `EngineProcess`; called on several threads.
        refuse: As for `EngineProcess`; called on several threads.

    Raises:
        ValueError: The bundle cannot be used here; the message names it.
    """
    try:
        files = bundle.read_variant(sizing.precision)
    except ValueError as error:
        raise ValueError(f"{bundle.path}: {error}") from error
    setup = EngineSetup(
        model_name=model_name,
        bundle=without_tokenizers(bundle),
        runner=config.runner,
        sizing=sizing,
        graphs=files.graphs,
        queue_limits=config.queue,
        limits=LIMITS[sizing.provider],
        token_bytes=bundle.target_tokenizer.token_bytes,
        log_level=config.log_level,
        log_format=config.log_format,
    )
    engines: list[AnyEngine] = []
    try:
        if sizing.num_instances == 1 and sizing.provider == CPU:
            return (started_engine(setup, files.weights, deliver),)
        group = Group()
        with shared_memory(files.weights) as weights:
            for _ in range(sizing.num_instances):
                engines.append(EngineProcess(setup, weights, group, deliver=deliver, refuse=refuse))
        for engine in engines:
            engine.start()
    except BaseException:
        for engine in engines:
            engine.stop()
        raise
    return tuple(engines)
