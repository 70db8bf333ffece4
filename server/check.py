"""Checks settings, files and bundles without serving them: `python -m server … --check`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from seq2seq_serve.bundle.manifest import Bundle, load_bundle
from seq2seq_serve.server.config import ServerConfig
from seq2seq_serve.server.models.folders import ModelFolders, Version
from seq2seq_serve.server.runner.device import CPU, describe_device
from seq2seq_serve.server.runner.sizing import Sizing, size_up
from seq2seq_serve.server.service.access import Access
from seq2seq_serve.server.service.tls import server_credentials

_log = logging.getLogger(__name__)


def check(bundles: Sequence[Path], config: ServerConfig) -> Iterator[str]:
    """Yields a line for each model that a server would serve.

    As at a start, the newest usable version of a repository's model is chosen; the log has the errors of the
    newer ones.

    Raises:
        OSError: A file cannot be read.
        ValueError: A model whose own folder was given, every model of the repository, the access file or the
            memory limit is wrong.
    """
    server_credentials(config)
    Access(config.access_file)
    folders, num_used_bytes, is_any = ModelFolders(bundles, config.repository, config.named_bundles), 0, False
    folders.check_names(config.models)
    problem: ValueError | None = None
    for name in folders.names:
        its_problem: ValueError | None = None
        for version in reversed(folders.versions(name)):
            try:
                bundle, sizing = _sized(version, config)
            except ValueError as error:
                its_problem = its_problem or error
                if version.version or not folders.is_given(name):  # otherwise the error ends the check
                    which = f": version {version.version}" * bool(version.version)
                    _log.error("model %s%s cannot be served: %s", name, which, error)
                continue
            num_used_bytes += sizing.limited_bytes
            is_any = True
            bound = "at most" if sizing.provider == CPU else "on the GPU at least"
            yield (
                f"{name}: version {version.version or bundle.version}, {sizing.precision} on "
                f"{describe_device(sizing.provider, sizing.precision, config.runner.cuda_libraries)}, "
                f"{sizing.num_instances * sizing.num_slots} slots, {bound} "
                f"{sizing.total_bytes / 2**20:.0f} MiB"
                + (f", drafts by {sizing.draft.bundle.path}" if sizing.draft else "")
            )
            break
        else:
            if its_problem is not None and folders.is_given(name):
                raise its_problem
        problem = problem or its_problem
    if problem is not None and not is_any:
        raise problem
    if num_used_bytes > config.memory_limit_bytes:
        raise ValueError(
            f"together the models take {num_used_bytes / 2**20:.1f} MiB, and the memory limit is "
            f"{config.memory_limit_bytes / 2**20:.1f} MiB: raise --memory-limit, or lower --memory-budget"
        )


def _sized(version: Version, config: ServerConfig) -> tuple[Bundle, Sizing]:
    bundle = load_bundle(version.path)
    try:
        sizing = size_up(bundle, config.of_model(version.model_name).runner)
        if sizing.draft is not None:
            load_bundle(sizing.draft.bundle.path)  # all of its content
        return bundle, sizing
    except ValueError as error:
        raise ValueError(f"{version.path}: {error}") from error
