"""Checks settings, files and bundles without serving them: `python -m server … --check`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from seq2seq_serve.bundle.manifest import Bundle, load_bundle
from seq2seq_serve.server.config import ServerConfig
from seq2seq_serve.server.models.adapters import AdapterFolders, read_adapter
from seq2seq_serve.server.models.folders import ModelFolders, Version
from seq2seq_serve.server.runner.device import CPU, describe_device
from seq2seq_serve.server.runner.sizing import Sizing, errors_of_draft, size_up
from seq2seq_serve.server.service.access import Access
from seq2seq_serve.server.service.tls import server_credentials

_log = logging.getLogger(__name__)


def check(bundles: Sequence[Path], config: ServerConfig) -> Iterator[str]:
    """Yields a line for each model, and each adapter of it, that a server would serve.

    As at a start, the newest usable version of each model is chosen.

    Raises:
        OSError: A file cannot be read.
        ValueError: A model cannot be served, or only in an older version, an adapter fits none of them, or
            the access file or the memory limit is wrong.
    """
    server_credentials(config)
    Access(config.access_file)
    folders = ModelFolders(bundles, config.repository, config.named_bundles)
    folders.check_names(config.models)
    adapters = AdapterFolders(config.named_adapters, config.adapters)
    num_used_bytes, problems = 0, list[str]()
    unfit: dict[Path, list[str]] = {}  # why an adapter does not fit the models that were tried
    fit = set[Path]()
    for name in folders.names:
        for version in reversed(folders.versions(name)):
            try:
                bundle, sizing = _sized(version, config)
            except ValueError as error:
                which = f": version {version.version}" * bool(version.version)
                problems.append(f"model {name}{which} cannot be served: {error}")
                continue
            num_used_bytes += sizing.limited_bytes
            bound = "at most" if sizing.provider == CPU else "on the GPU at least"
            yield (
                f"{name}: version {version.version or bundle.version}, {sizing.precision} on "
                f"{describe_device(sizing.provider, sizing.precision, config.runner.cuda_libraries)}, "
                f"{sizing.num_instances * sizing.num_slots} slots, {bound} "
                f"{sizing.total_bytes / 2**20:.0f} MiB"
                + (f", drafts by {sizing.draft}" if sizing.draft else "")
            )
            for adapter in adapters.all([name]):
                try:
                    its = read_adapter(adapter.path, name, bundle.manifest, sizing.max_rank)
                except ValueError as error:
                    unfit.setdefault(adapter.path, []).append(str(error))
                else:
                    fit.add(adapter.path)
                    rank = its.manifest.rank
                    yield f"{adapter.model_name}: version {its.version}, an adapter of rank {rank}"
            break
    for path, texts in unfit.items():
        if path not in fit:
            problems.append(f"the adapter {path} cannot be served: {'; '.join(dict.fromkeys(texts))}")
    problems += [
        f"the adapter {given} cannot be served: its model is not served, or has another adapter of the name"
        for given, path in adapters.named.items()
        if path not in fit and path not in unfit
    ]
    if num_used_bytes > config.max_models_size_bytes:
        problems.append(
            f"together the models take {num_used_bytes / 2**20:.1f} MiB, and may take "
            f"{config.max_models_size_bytes / 2**20:.1f} MiB: raise --max-models-size, or lower "
            "--max-slots-size"
        )
    if problems:
        raise ValueError("\n".join(problems))


def _sized(version: Version, config: ServerConfig) -> tuple[Bundle, Sizing]:
    bundle = load_bundle(version.path)
    try:
        sizing = size_up(bundle, config.of_model(version.model_name).model_runner)
        for level, remark in sizing.remarks:
            _log.log(level, "%s", remark)
        if sizing.draft is not None:
            with errors_of_draft():
                load_bundle(sizing.draft.bundle.path)  # all of its content
        return bundle, sizing
    except ValueError as error:
        raise ValueError(f"{version.path}: {error}") from error
