import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seq2seq_serve.training.config import EOS_ID
from seq2seq_serve.training.data.corpus import SentencePair
from seq2seq_serve.training.data.encoded import encode_pairs
from seq2seq_serve.training.data.segmentation import BpeDropout, FreshlyCutPairs
from seq2seq_serve.training.data.tokenizer import train_tokenizer

PAIRS = [
    SentencePair("나는 학생이다", "I am a student."),
    SentencePair("오늘은 금요일입니다 🎉", "Today is Friday, isn't it? Yes."),
    SentencePair("", "nothing"),
] * 5
TOKENIZER = train_tokenizer([text for pair in PAIRS for text in pair], 400)


def freshly_cut(probability: float, seed: int = 0, max_length: int = 100) -> FreshlyCutPairs:
    return FreshlyCutPairs(
        PAIRS,
        TOKENIZER,
        probability,
        seed,
        max_source_length=max_length,
        max_target_length=max_length,
    )


@given(st.text())
def test_without_dropout_a_text_is_cut_as_the_tokenizer_does(text: str) -> None:
    whole = BpeDropout(TOKENIZER, 0.0)
    ids = [id_ for word in whole.words(text) for id_ in whole.cut(word, random.Random(0))]
    assert ids == TOKENIZER.encode(text)


@given(st.text(), st.integers(0, 3))
def test_however_it_is_cut_the_text_stays(text: str, seed: int) -> None:
    dropout = BpeDropout(TOKENIZER, 0.5)
    chance = random.Random(seed)
    ids = [id_ for word in dropout.words(text) for id_ in dropout.cut(word, chance)]
    assert TOKENIZER.decode(ids) == TOKENIZER.normalize(text)


def test_a_merge_is_left_out_as_often_as_was_asked() -> None:
    tokenizer = train_tokenizer(["ab"] * 3, 261)
    dropout = BpeDropout(tokenizer, 0.2)
    chance = random.Random(0)
    counts = Counter(len(dropout.cut("ab", chance)) for _ in range(4000))
    assert counts[2] / 4000 == pytest.approx(0.2, abs=0.03)
    assert counts[1] + counts[2] == 4000


def test_pairs_are_segmented_differently_in_each_pass_and_alike_in_one() -> None:
    cut = freshly_cut(0.3)
    first, second = cut(0), cut(1)
    assert first != second
    assert freshly_cut(0.3)(1) == second
    assert freshly_cut(0.3, seed=1)(1) != second
    assert len({tuple(pair.target_ids) for pair in first[::3]}) > 1  # the same sentence, cut differently
    assert [TOKENIZER.decode(pair.target_ids) for pair in first] == [pair.target for pair in PAIRS]
    assert [TOKENIZER.decode(pair.source_ids) for pair in first] == [pair.source for pair in PAIRS]
    assert all(pair.source_ids[-1] == EOS_ID and EOS_ID not in pair.target_ids for pair in first)


def test_a_side_over_its_limit_is_cut_as_the_tokenizer_does() -> None:
    whole = encode_pairs(PAIRS, TOKENIZER)
    longest = max(max(len(pair.source_ids), pair.target_length) for pair in whole)
    cut = freshly_cut(0.9, max_length=longest)(0)
    assert all(max(len(pair.source_ids), pair.target_length) <= longest for pair in cut)
    assert any(pair != other for pair, other in zip(cut, whole, strict=True))
    assert any(pair == other for pair, other in zip(cut, whole, strict=True))
