"""The pages on attention say what their code prints, and show pictures that are there."""

import re
from pathlib import Path

import pytest
import torch

from docs.page import main

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted((ROOT / "docs").glob("attention*.md"))
DECIMAL = re.compile(r"(?<![\d.])\d+\.\d+(?![\d.]*\d)")
BLOCK = re.compile(r"```.*?```", flags=re.DOTALL)


every_page = pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])


@every_page
def test_every_output_is_what_the_code_above_it_prints(page, capsys):
    try:
        with torch.random.fork_rng():
            is_different = main([str(page), "--check"])
    finally:
        torch.set_printoptions(profile="default")
    assert not is_different, capsys.readouterr().err


def test_every_decimal_of_the_prose_stands_in_a_block_of_its_section():
    num_found = 0
    for section in re.split(r"^## ", "".join(page.read_text(encoding="utf-8") for page in PAGES), flags=re.M):
        printed = set(DECIMAL.findall("\n".join(BLOCK.findall(section))))
        prose = re.sub(r"(arXiv:|section |CC BY )[0-9.]+", "", BLOCK.sub("", section))
        numbers = DECIMAL.findall(prose)
        assert set(numbers) <= printed, section.splitlines()[0]
        num_found += len(numbers)
    assert num_found


@every_page
def test_every_picture_and_link_leads_to_a_file(page):
    links = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
    assert links
    for link in links:
        assert (page.parent / link).is_file(), link
