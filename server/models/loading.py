"""Loads a bundle into a model that can be served."""

from __future__ import annotations

import logging
from pathlib import Path

from seq2seq_serve.bundle.manifest import load_bundle
from seq2seq_serve.server.config import ServerConfig
from seq2seq_serve.server.deliveries import Deliveries
from seq2seq_serve.server.engine.engine import Engine
from seq2seq_serve.server.engine.scheduler import SchedulerLimits
from seq2seq_serve.server.models.served import ServedModel, SourceSpec
from seq2seq_serve.server.runner.device import CPU, CUDA
from seq2seq_serve.server.runner.runner import OnnxRunner
from seq2seq_serve.server.runner.sizing import size_up, source_specs

_log = logging.getLogger(__name__)

# On a GPU, launching the kernels of an encode should take longer than encoding some thousand tokens. This is
# estimated from the number of kernels (about 150), not measured.
_LIMITS = {
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
    num_instances = config.runner.num_instances
    try:
        sizing = size_up(bundle, config.runner)
        num_bytes = sizing.limited_bytes
        if num_bytes and num_used_bytes + num_bytes > config.memory_limit_bytes:
            raise ValueError(
                f"it takes {num_bytes} bytes beside the {num_used_bytes} of loaded models, and the memory "
                f"limit is {config.memory_limit_bytes}: raise --memory-limit, lower --memory-budget, or "
                "unload a model first"
            )
        files = bundle.read_variant(sizing.precision)
        runners = [OnnxRunner(bundle, config.runner, sizing, files) for _ in range(num_instances)]
    except Exception as error:  # ONNX Runtime's errors do not have a common class
        raise ValueError(f"{path}: {error}") from error
    runner, num_slots = runners[0], sum(runner.num_slots for runner in runners)
    _log.info(
        "model %s: %s on %s%s, %d slots, %d threads%s",
        deliveries.model_name,
        runner.precision,
        runner.provider,
        f" ({device})" if (device := runner.describe_device()) else "",
        num_slots,
        sum(runner.num_threads for runner in runners),
        f", {num_instances} instances" if num_instances > 1 else "",
    )
    engines = tuple(
        Engine(
            runner,
            model_name=deliveries.model_name,
            deliver=deliveries.deliver,
            queue_limits=config.queue,
            limits=_LIMITS[runner.provider],
        )
        for runner in runners
    )
    try:
        for engine in engines:
            engine.start()
    except Exception as error:  # ONNX Runtime's errors do not have a common class
        for engine in engines:
            engine.stop()
        raise ValueError(f"{path}: the graphs do not run here: {error}") from error
    manifest = bundle.manifest
    return ServedModel(
        engines=engines,
        deliveries=deliveries,
        version=bundle.version,
        kind=manifest.kind,
        precision=runner.precision,
        provider=runner.provider,
        vocab_size=runner.vocab_size,
        cache_bytes=num_slots * runner.slot_bytes,
        num_bytes=num_bytes,
        source_vocab_size=manifest.source_vocab_size,
        pad_id=manifest.special_ids.pad_id,
        eos_ids=runner.eos_ids,
        frames=manifest.frames,
        choices=manifest.choices,
        generation=manifest.generation,
        timestamps=manifest.timestamps,
        queue_limits=config.queue,
        sources={
            spec.name: SourceSpec(manifest.sources[spec.name], spec, manifest.resampling)
            for spec in source_specs(manifest, runner.precision)
        },
        memory=manifest.memory,
        has_attention=runner.has_attention,
        num_hops=runner.num_hops,
        source_tokenizer=bundle.source_tokenizer,
        target_tokenizer=bundle.target_tokenizer,
        source_language=manifest.source_language,
        length_bound=manifest.length_bound,
        provenance=manifest.provenance,
    )
