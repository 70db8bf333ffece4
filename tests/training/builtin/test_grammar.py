"""The built-in corpus: its size, its splits, and that its sentences are right in both languages."""

import hashlib
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from itertools import combinations

import pytest

from seq2seq_serve.training.builtin import grammar
from seq2seq_serve.training.builtin.grammar import BuiltinCorpus, Pair, build_corpus
from seq2seq_serve.training.builtin.patterns import Content

DIGEST = "9a0d07f9bca880ecf5faf7570d439ac2391748855603c4e593f42d2c772cd71a"
PROGRAM = """
from seq2seq_serve.training.builtin.grammar import build_corpus
from tests.training.builtin.test_grammar import digest

print(digest(build_corpus()))
"""


def digest(corpus: BuiltinCorpus) -> str:
    """A checksum of all sentences and their order."""
    parts = [
        [(pair.source, pair.target) for pair in part] for part in (corpus.train, corpus.dev, corpus.test)
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@pytest.fixture(scope="module")
def corpus(built_in) -> BuiltinCorpus:
    return built_in(0)


@pytest.fixture(scope="module")
def other_contents() -> list[Content]:
    """What the corpus of another seed is chosen from."""
    return grammar._draw_contents(seed=1)


@pytest.fixture(scope="module")
def other_corpus(other_contents: list[Content]) -> BuiltinCorpus:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar, "_draw_contents", lambda seed: other_contents)  # which takes most of the time
        return build_corpus(seed=1)


@pytest.fixture(scope="module")
def pairs(corpus: BuiltinCorpus) -> tuple[Pair, ...]:
    return corpus.train + corpus.dev + corpus.test


def _filler_pairs(pair: Pair) -> set[frozenset[str]]:
    return {frozenset(two) for two in combinations(pair.fillers, 2)}


def test_training_is_large_and_varied(corpus):
    assert 30_000 <= len(corpus.train) <= 37_000
    assert 400 <= len(corpus.dev) <= 700
    assert 900 <= len(corpus.test) <= 1300
    assert len({pair.pattern for pair in corpus.train}) >= 25
    assert len({pair.pattern for pair in corpus.test}) >= 25


def test_training_holds_the_sentences_of_the_readme_whatever_the_seed(corpus, other_corpus):
    sentences = {
        ("오늘은 금요일입니다", "Today is Friday."),
        ("오늘은 금요일 입니다", "Today is Friday."),
        ("드디어 금요일이다", "It is finally Friday."),
        ("나는 학생이다", "I am a student."),
        ("나는 학생입니다", "I am a student."),
        ("저는 학생입니다.", "I am a student."),
    }
    for train in (corpus.train, other_corpus.train):
        assert sentences <= {(pair.source, pair.target) for pair in train}


def test_a_source_occurs_once(pairs):
    assert len({pair.source for pair in pairs}) == len(pairs)


def test_no_source_has_two_targets_even_before_the_splits_merge_equal_ones(other_contents):
    targets = defaultdict(set)
    for content in other_contents:
        for source in content.sources:
            targets[source].add(content.target)
    assert [source for source, found in targets.items() if len(found) > 1] == []


def test_the_corpus_is_the_published_one_whatever_the_hash_seed(corpus, other_corpus):
    """Published scores are of these sentences; whoever changes one writes its digest anew."""
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == digest(corpus) == DIGEST
    assert digest(other_corpus) != DIGEST


def test_no_side_of_a_held_out_pair_is_in_another_split(corpus):
    for part in ("source", "target"):
        train, dev, test = (
            {getattr(pair, part) for pair in split} for split in (corpus.train, corpus.dev, corpus.test)
        )
        assert not train & dev
        assert not train & test
        assert not dev & test


def test_a_held_out_pair_holds_two_fillers_that_training_never_sees_together(corpus, other_corpus):
    for built in (corpus, other_corpus):
        seen = set().union(*(_filler_pairs(pair) for pair in built.train))
        assert [pair for pair in built.dev + built.test if _filler_pairs(pair) <= seen] == []


def test_every_filler_is_trained_on(corpus, pairs):
    trained = Counter(filler for pair in corpus.train for filler in pair.fillers)
    assert {filler: trained[filler] for pair in pairs for filler in pair.fillers if trained[filler] < 8} == {}


def test_every_held_out_filler_is_trained_on_in_its_pattern(corpus):
    trained = Counter((pair.pattern, filler) for pair in corpus.train for filler in pair.fillers)
    rare = {
        (pair.pattern, filler)
        for pair in corpus.dev + corpus.test
        for filler in pair.fillers
        if trained[pair.pattern, filler] < 4
    }
    assert rare == set()


def test_every_english_word_of_a_held_out_pair_is_in_training(corpus):
    def words(pairs):
        return {word for pair in pairs for word in re.findall(r"[A-Za-z']+", pair.target)}

    assert words(corpus.dev + corpus.test) <= words(corpus.train)


def test_sentences_are_short_and_end_well(pairs):
    for pair in pairs:
        assert re.fullmatch(r"[A-Z][A-Za-z0-9 ':.-]*[.?]", pair.target), pair
        assert re.fullmatch(r"[가-힣]+( [가-힣]+)*[.?]?", pair.source), pair
        assert pair.source.endswith("?") == pair.target.endswith("?"), pair
        assert 3 <= len(pair.target.split()) <= 16, pair
