"""Checkpoints of random models, written once a session."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.export.huggingface.checkpoints import DEEP, Depth, make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """The folder of a case, and the model as transformers reads it. Tests change copies only."""

    @functools.cache
    def checkpoint(case: str, depth: Depth = DEEP) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(case) / "checkpoint"
        return folder, make_checkpoint(case, folder, depth)

    return checkpoint
