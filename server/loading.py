"""From a bundle's folder to a model that can be served."""

from __future__ import annotations

import logging
from pathlib import Path

from bundle.manifest import load_bundle
from server.config import ServerConfig
from server.deliveries import Deliveries
from server.device import CPU, CUDA
from server.engine import Engine
from server.models import ServedModel
from server.runner import OnnxRunner
from server.scheduler import SchedulerLimits
from server.sizing import size_up

_log = logging.getLogger(__name__)

# On a GPU, starting the kernels of an encode should take longer than encoding some thousand tokens: estimated
# from the number of kernels (about 150), not measured.
_LIMITS = {
    CPU: SchedulerLimits(),
    CUDA: SchedulerLimits(max_encode_tokens=4096, max_encode_tokens_beside=2048, max_align_tokens=256),
}


def load_model(
    path: Path, config: ServerConfig, deliveries: Deliveries, num_used_bytes: int = 0
) -> ServedModel:
    """Check a bundle, load its graphs, and start its engines over them, which run each of them once.

    Args:
        path: The bundle's folder.
        config: The server's.
        deliveries: What the engines deliver to.
        num_used_bytes: Of what is loaded already.

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
                f"it takes {num_bytes} bytes beside the {num_used_bytes} of what is loaded, and the memory "
                f"limit is {config.memory_limit_bytes}: raise --memory-limit, lower --memory-budget, or "
                "unload a model first"
            )
        files = bundle.read_variant(sizing.precision)
        runners = [OnnxRunner(bundle, config.runner, sizing, files) for _ in range(num_instances)]
    except Exception as error:  # ONNX Runtime's errors have no class of their own in common
        raise ValueError(f"{path}: {error}") from error
    runner, num_slots = runners[0], sum(runner.num_slots for runner in runners)
    _log.info(
        "model %s: %s on %s, %d slots, %d threads%s",
        deliveries.model_name,
        runner.precision,
        runner.provider,
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
    except Exception as error:  # ONNX Runtime's errors have no class of their own in common
        for engine in engines:
            engine.stop()
        raise ValueError(f"{path}: the graphs do not run here: {error}") from error
    return ServedModel(
        engines=engines,
        deliveries=deliveries,
        version=bundle.version,
        kind=bundle.manifest.kind,
        precision=runner.precision,
        provider=runner.provider,
        vocab_size=runner.vocab_size,
        cache_bytes=num_slots * runner.slot_bytes,
        num_bytes=num_bytes,
        pad_id=bundle.manifest.special_ids.pad_id,
        eos_id=runner.eos_id,
        queue_limits=config.queue,
        source_tokenizer=bundle.source_tokenizer,
        target_tokenizer=bundle.target_tokenizer,
        source_language=bundle.manifest.source_language,
        length_bound=bundle.manifest.length_bound,
        provenance=bundle.manifest.provenance,
    )
