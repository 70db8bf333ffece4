"""The pages on attention say what their code prints."""

from pathlib import Path

import pytest
import torch

from docs.page import main

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted((ROOT / "docs").glob("attention*.md"))


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_every_output_is_what_the_code_above_it_prints(page, capsys):
    try:
        with torch.random.fork_rng():
            is_different = main([str(page), "--check"])
    finally:
        torch.set_printoptions(profile="default")
    assert not is_different, capsys.readouterr().err
