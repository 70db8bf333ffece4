"""The page on attention says what its code prints, and shows pictures that are there."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "attention.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCK = re.compile(r"```.*?```", flags=re.DOTALL)


def test_every_output_is_what_the_code_above_it_prints():
    # In a process of its own: the page sets torch's seed and how it prints.
    command = [sys.executable, "-W", "error", "-m", "docs.page", str(PAGE), "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_decimal_of_the_prose_stands_in_a_block():
    blocks = "\n".join(BLOCK.findall(TEXT))
    prose = re.sub(r"(arXiv:|section )[0-9.]+", "", BLOCK.sub("", TEXT))
    numbers = re.findall(r"\d+\.\d+", prose)
    assert numbers
    assert [number for number in numbers if number not in blocks] == []


def test_every_picture_and_link_leads_to_a_file():
    links = re.findall(r"\]\(([^)#]+)", TEXT)
    assert len(links) > 3
    for link in links:
        assert (PAGE.parent / link).is_file(), link
