"""The built-in corpus of texts: it is the published one, and its held-out sentences are new."""

import re

import pytest

from seq2seq_serve.training.data.corpus import Corpus, built_in_corpus


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return built_in_corpus()


def test_the_corpus_is_the_one_of_the_published_scores(corpus):
    assert corpus.sha256() == "4512e36514b0d6ae328a14b48dfb966ec3c98a41849448c43dfb3ad56527df35"


@pytest.mark.parametrize("side", [0, 1])
def test_no_side_of_a_held_out_pair_is_in_another_part(corpus, side):
    train, dev, test = ({pair[side] for pair in part} for part in (corpus.train, corpus.dev, corpus.test))
    assert not train & (dev | test)
    assert not dev & test


def test_every_english_word_of_a_held_out_pair_is_in_training(corpus):
    def words(pairs):
        return {word for pair in pairs for word in re.findall(r"[A-Za-z']+", pair.target)}

    assert words(corpus.dev + corpus.test) <= words(corpus.train)
