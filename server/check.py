"""What a server would serve, without serving it: `python -m server … --check`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from bundle.manifest import Bundle, load_bundle
from server.config import ServerConfig
from server.device import CPU
from server.service.access import Access
from server.service.tls import server_credentials
from server.shelf import Shelf, Version
from server.sizing import Sizing, size_up

_log = logging.getLogger(__name__)


def check(bundles: Sequence[Path], config: ServerConfig) -> Iterator[str]:
    """A line for each model, once everything that can be checked beforehand is.

    As at a start, a model of the repository is served in its newest version that can be; the log says what is
    wrong with those that cannot.

    Raises:
        OSError: A file cannot be read.
        ValueError: A model that was asked for by its folder, every model of the repository, the access file,
            or the memory limit does not fit; the message says which.
    """
    if config.tls is not None:
        server_credentials(config.tls)
    Access(config.access_file)
    shelf, num_used_bytes, is_any = Shelf(bundles, config.repository), 0, False
    shelf.check_names(config.models)
    problem: ValueError | None = None
    for name in shelf.names:
        for version in reversed(shelf.versions(name)):
            try:
                bundle, sizing = _sized(version, config)
            except ValueError as error:
                problem = problem or error
                _log.error("model %s: version %s cannot be served: %s", name, version.version, error)
                continue
            num_used_bytes += sizing.limited_bytes
            is_any = True
            bound = "at most" if sizing.provider == CPU else "working memory and"
            yield (
                f"{name}: version {version.version or bundle.version}, {sizing.precision} on "
                f"{sizing.provider}, {sizing.num_instances * sizing.num_slots} slots, {bound} "
                f"{sizing.total_bytes / 2**20:.0f} MiB"
            )
            break
        else:
            if problem is not None and shelf.is_given(name):
                raise problem
    if problem is not None and not is_any:
        raise problem
    if num_used_bytes > config.memory_limit_bytes:
        raise ValueError(
            f"together they take {num_used_bytes} bytes, and the memory limit is "
            f"{config.memory_limit_bytes}: raise --memory-limit, or lower --memory-budget"
        )


def _sized(version: Version, config: ServerConfig) -> tuple[Bundle, Sizing]:
    bundle = load_bundle(version.path)
    try:
        return bundle, size_up(bundle, config.of_model(version.model_name).runner)
    except ValueError as error:
        raise ValueError(f"{version.path}: {error}") from error
