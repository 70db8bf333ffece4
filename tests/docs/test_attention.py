"""The page on attention says what its code prints, and shows pictures that are there."""

import re
from pathlib import Path

import torch

from benchmarks.complexity.layers import LAYER_TYPES
from docs.page import main

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "attention.md"
TEXT = PAGE.read_text(encoding="utf-8")
DECIMAL = re.compile(r"(?<![\d.])\d+\.\d+(?![\d.]*\d)")
BLOCK = re.compile(r"```.*?```", flags=re.DOTALL)


def test_every_output_is_what_the_code_above_it_prints(capsys):
    try:
        with torch.random.fork_rng():
            is_different = main([str(PAGE), "--check"])
    finally:
        torch.set_printoptions(profile="default")
    assert not is_different, capsys.readouterr().err


def test_every_decimal_of_the_prose_stands_in_a_block_of_its_section():
    num_found = 0
    for section in re.split(r"^## ", TEXT, flags=re.MULTILINE):
        printed = set(DECIMAL.findall("\n".join(BLOCK.findall(section))))
        prose = re.sub(r"(arXiv:|section |CC BY )[0-9.]+", "", BLOCK.sub("", section))
        numbers = DECIMAL.findall(prose)
        assert set(numbers) <= printed, section.splitlines()[0]
        num_found += len(numbers)
    assert num_found


def test_what_layers_cost_is_what_the_benchmark_has():
    rows = re.findall(r"^\| (.*?)(?:, r neighbours)? \| (.*) \| (.*) \| (.*) \|$", TEXT, flags=re.MULTILINE)
    found = {name: costs for name, *costs in rows if costs[0].startswith("O(")}
    expected = {
        kind.name.removesuffix(" (GRU)"): [kind.operations, kind.sequential, kind.path.partition(",")[0]]
        for kind in LAYER_TYPES
        if kind.orders
    }
    assert found.keys() == expected.keys()
    for name, costs in expected.items():
        assert [cost.partition(";")[0] for cost in found[name]] == [f"O({cost})" for cost in costs]


def test_every_picture_and_link_leads_to_a_file():
    links = re.findall(r"\]\(([^)#]+)", TEXT)
    assert len(links) > 3
    for link in links:
        assert (PAGE.parent / link).is_file(), link
