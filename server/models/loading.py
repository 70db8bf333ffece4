"""Loads a bundle into a model that can be served."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.manifest import Bundle, load_bundle
from seq2seq_serve.bundle.names import Verb
from seq2seq_serve.server.config import ServerConfig
from seq2seq_serve.server.engine.async_engine import AsyncEngine, CoreHandle
from seq2seq_serve.server.engine.result import Turn
from seq2seq_serve.server.engine.scheduler import SchedulerLimits
from seq2seq_serve.server.models.cores import CoreSpec, ThreadCore, started_core
from seq2seq_serve.server.models.process import ProcessCore, shared_memory
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.runner.device import CPU, CUDA, describe_device, read_files
from seq2seq_serve.server.runner.sizing import Sizing, errors_of_draft, size_up, without_tokenizers

_log = logging.getLogger(__name__)

# On an H100 an encode call takes 0.8 ms for 5 tokens and 1.5 ms for 4,000: launching its kernels takes longer
# than encoding.
LIMITS = {
    CPU: SchedulerLimits(),
    CUDA: SchedulerLimits(max_encode_tokens=4096, max_encode_tokens_beside=2048, max_align_tokens=256),
}


def load_model(
    path: Path,
    config: ServerConfig,
    model_name: str,
    record: Callable[[Turn], object] = lambda _: None,
    num_used_bytes: int = 0,
    version: str = "",
) -> ServedModel:
    """Check a bundle, read its graphs and weights, and create its engine, which is not started.

    Args:
        path: The bundle's folder.
        config: The server's settings for this model.
        model_name: The name that callers use.
        record: Is called with every turn of the engine, for metrics.
        num_used_bytes: Memory of the models that are loaded already.
        version: As for `ServedModel`.

    Raises:
        ValueError: The bundle cannot be used, or not on this machine; the message names it.
    """
    bundle = load_bundle(path, checks_content=False)  # `read_variant` does it for the precision that runs
    try:
        sizing = size_up(bundle, config.model_runner)
        for level, remark in sizing.remarks:
            _log.log(level, "%s", remark)
        num_bytes = sizing.limited_bytes
        if num_bytes and num_used_bytes + num_bytes > config.max_models_size_bytes:
            raise ValueError(
                f"it takes {num_bytes / 2**20:.1f} MiB beside the {num_used_bytes / 2**20:.1f} MiB of loaded "
                f"models, and together they may take {config.max_models_size_bytes / 2**20:.1f} MiB: raise "
                "--max-models-size, lower --max-slots-size, or unload a model first"
            )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    draft = sizing.draft
    num_instances, num_slots = sizing.num_instances, sizing.num_instances * sizing.num_slots
    _log.info(
        "model %s: %s on %s, %d slots, threads: %d%s",
        model_name,
        sizing.precision,
        describe_device(sizing.provider, sizing.precision, config.runner.cuda_libraries),
        num_slots,
        num_instances * sizing.num_threads,
        (f", {num_instances} instances" if num_instances > 1 else "")
        + (", a process of its own" if sizing.has_processes and num_instances == 1 else "")
        + (f", drafts by {draft}" if draft else ""),
    )
    engine = create_engine(bundle, sizing, config, model_name, record)
    return ServedModel(engine, bundle, sizing, version)


def create_engine(
    bundle: Bundle,
    sizing: Sizing,
    config: ServerConfig,
    model_name: str,
    record: Callable[[Turn], object],
) -> AsyncEngine:
    """Create the engine of a model: each core has a process, or the only one a thread of this process.

    In a thread, a turn of a small model waits after each graph until handlers release the interpreter. On
    two CPUs, shared with the callers, a process of its own made `tiny` 1.3 (unary) to 1.5 times (streams) as
    fast, and the p99 between tokens 0.4 times as long; on one CPU it took a fifth more processor time. A core
    on CUDA turns every millisecond or two, and the handlers run as much Python as it does. On an H100 that
    served `base` to 64 callers, a process of its own made it 1.6 times as fast. It also keeps captures apart:
    while a thread captures a run, no other thread of the process may use the device.

    Args:
        bundle: A checked bundle.
        sizing: Of each core.
        config: The server's settings for this model.
        model_name: For the log.
        record: As for `load_model`.

    Raises:
        ValueError: The bundle cannot be used here; the message names it.
    """
    draft = sizing.draft
    token_bytes = bundle.target_tokenizer.token_bytes
    is_text = names.SOURCE_IDS in bundle.manifest.sources
    shares_ids = is_text and bundle.source_tokenizer.token_bytes == token_bytes
    with ExitStack() as stack:
        num_models, has_processes = 1 if draft is None else 2, sizing.has_processes
        try:
            memories = [
                stack.enter_context(shared_memory()) if has_processes else None for _ in range(num_models)
            ]
        except OSError as error:
            problem = f"the memory of its engine's process cannot be made (memfd_create): {error}"
            raise ValueError(f"{bundle.path}: {problem}") from error
        all_files = [read_files(bundle, sizing.precision, sizing.provider, memories[0])]
        if draft is not None:
            with errors_of_draft():
                all_files.append(read_files(draft.bundle, draft.sizing.precision, CPU, memories[1]))
        spec = CoreSpec(
            model_name=model_name,
            bundle=without_tokenizers(bundle),
            runner=config.model_runner,
            sizing=sizing,
            graphs=tuple(files.graphs for files in all_files),
            limits=LIMITS[sizing.provider],
            copied_source=names.SOURCE_IDS if shares_ids else None,
            token_bytes=token_bytes,
            log_level=config.log_level,
            log_format=config.log_format,
        )
        cores: list[CoreHandle]
        if has_processes:
            descriptors = [memory for memory in memories if memory is not None]
            cores = [ProcessCore(spec, descriptors) for _ in range(sizing.num_instances)]
        else:
            contents = [files.weights for files in all_files]
            cores = [ThreadCore(sizing.num_slots, partial(started_core, spec, contents))]
    feeds_prefix = Verb.DECODE not in spec.graphs[0]
    return AsyncEngine(model_name, cores, config.queue, record, feeds_prefix=feeds_prefix)
