"""The benchmark of terms on a small bundle."""

import json
import subprocess
import sys

from benchmarks.terms import _with_terms


def test_the_terms_are_present_and_other_requests_are_equal(bundle_path, tmp_path):
    sources, references = tmp_path / "sources.txt", tmp_path / "references.txt"
    sources.write_text("하나의 둘이서 하나의\n" * 3)
    references.write_text("one two three\n" * 3)
    command = [sys.executable, "-m", "benchmarks.terms", bundle_path, sources, references]
    flags = ["--threads", "1", "--pairs", "3", "--in-flight", "2"]
    # Apart, because all graphs of a process that serves share its threads
    done = subprocess.run([*command, *flags], capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["requests"] == 3
    assert figures["terms_present"] == 1
    assert all(one["are_equal"] for one in figures["others"].values())


def test_a_part_of_a_word_with_digits_is_no_term():
    [pair] = _with_terms(iter([("하나의 둘이서 열다섯15", "one two fifteen15")]))
    assert {term.source for term in pair.terms} == {"하나의", "둘이서"}
    assert {term.target for term in pair.terms} == {"one", "two"}
