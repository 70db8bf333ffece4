"""Checkpoints of random models, written once a session."""

import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.export.huggingface.checkpoints import DEEP, Depth, make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """The folder of a case, and the model as transformers reads it."""

    @functools.cache
    def checkpoint(case: str, depth: Depth = DEEP) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(case) / "checkpoint"
        return folder, make_checkpoint(case, folder, depth)

    return checkpoint


@pytest.fixture
def copied(checkpoint: Callable[..., tuple[Path, Any]], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a case's folder, which the test may change."""
    return lambda *case: shutil.copytree(checkpoint(*case)[0], Path(tempfile.mkdtemp(dir=tmp_path)) / "copy")
