"""Checkpoints of random models, written once a session."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.export.huggingface.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """The folder of a case, and the model as transformers reads it. Tests change copies only."""
    made: dict[str, tuple[Path, Any]] = {}

    def checkpoint(case: str) -> tuple[Path, Any]:
        if case not in made:
            folder = tmp_path_factory.mktemp(case) / "checkpoint"
            made[case] = folder, make_checkpoint(case, folder)
        return made[case]

    return checkpoint
