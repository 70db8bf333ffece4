"""What a server would serve, without serving it: `python -m server … --check`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from bundle.manifest import load_bundle
from server.config import ServerConfig
from server.service.access import Access
from server.service.tls import server_credentials
from server.shelf import Shelf
from server.sizing import size_up


def check(bundles: Sequence[Path], config: ServerConfig) -> Iterator[str]:
    """A line for each model, once everything that can be checked beforehand is.

    Raises:
        OSError: A file cannot be read.
        ValueError: A bundle, the access file, or the memory limit does not fit; the message says which.
    """
    if config.tls is not None:
        server_credentials(config.tls)
    Access(config.access_file)
    shelf, num_used_bytes = Shelf(bundles, config.repository), 0
    shelf.check_names(config.models)
    for name in shelf.names:
        version = shelf.find(name)
        bundle = load_bundle(version.path)
        try:
            sizing = size_up(bundle, config.of_model(name).runner)
        except ValueError as error:
            raise ValueError(f"{version.path}: {error}") from error
        num_used_bytes += sizing.limited_bytes
        yield (
            f"{name}: version {version.version or bundle.version}, {sizing.precision} on {sizing.provider}, "
            f"{sizing.num_instances * sizing.num_slots} slots, at most {sizing.total_bytes / 2**20:.0f} MiB"
        )
    if num_used_bytes > config.memory_limit_bytes:
        raise ValueError(
            f"together they take {num_used_bytes} bytes, and the memory limit is "
            f"{config.memory_limit_bytes}: raise --memory-limit, or lower --memory-budget"
        )
