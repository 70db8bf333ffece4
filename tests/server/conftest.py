"""Fixtures for tests of the server."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def toy_paths(made_once: Callable[[str, Callable[[Path], None]], Path]) -> dict[str, Path]:
    """The bundle of each kind of `tests.server.toys`, in a folder of the kind's name."""
    from tests.server.toys import KINDS, write_toy  # here, because only some tests need the exporter

    return {name: made_once(name, partial(write_toy, kind)) for name, kind in KINDS.items()}
