import pytest

from seq2seq_serve.bundle.tokenizer import Tokenizer
from seq2seq_serve.training.data.encoded import passing_pairs
from seq2seq_serve.training.data.filters import CorpusFilters
from seq2seq_serve.training.data.sources import STORIES
from seq2seq_serve.training.data.text_files import SentencePair
from seq2seq_serve.training.data.tokenizer import train_tokenizer, train_word_tokenizer


def test_filters_count_what_they_drop() -> None:
    tokenizer = train_tokenizer([], 260)  # a token a byte
    pairs = [
        SentencePair("good", "fine"),
        SentencePair("good", "fine"),
        SentencePair("good", "well"),
        SentencePair(" ", "fine"),
        SentencePair("good", ""),
        SentencePair("a" * 10, "b" * 9),
        SentencePair("a" * 9, "b" * 10),
        SentencePair("a" * 9, "b" * 9),
        SentencePair("a", "b" * 7),
        SentencePair("a", "b" * 6),
    ]
    # Lengths count eos: nine letters are ten tokens, and "a" with seven letters is 2 to 8.
    kept, report = passing_pairs(pairs, tokenizer, CorpusFilters(10, 10, max_length_ratio=3.5))
    assert kept == [pairs[0], pairs[2], pairs[7], pairs[9]]
    assert {reason: count for reason, count in report.dropped.items() if count} == {
        "empty": 2,
        "duplicate": 1,
        "too long": 2,
        "length ratio": 1,
    }
    assert (report.num_given, report.num_kept) == (10, 4)
    counts = [line.split()[-1] for line in report.table().splitlines()]
    assert counts == ["10", "2", "0", "0", "2", "1", "1", "4"]
    kept, report = passing_pairs(pairs, tokenizer, CorpusFilters(10, 10))
    assert report.dropped["length ratio"] == 0
    assert pairs[8] in kept


def test_a_question_without_a_story_is_empty() -> None:
    """It passed, and the first evaluation or training step failed."""
    texts = ["Sam is in the garden.", "Where is Sam?", "garden"]
    pairs = [
        SentencePair("where is sam?", "garden"),
        SentencePair("sam is in the garden. where is sam?", "garden"),
        SentencePair("???", "garden"),
    ]
    tokenizer = train_word_tokenizer(texts, 100)
    kept, report = passing_pairs(pairs, tokenizer, CorpusFilters(10, 10), STORIES)
    assert kept == [pairs[1]]
    assert report.dropped["empty"] == 2


@pytest.mark.parametrize("text", ["nul \0", "escape \x1b[0m", "mojibake \x92", "undecoded \ufffd", "\uffff"])
def test_broken_characters_are_dropped_on_either_side(text: str) -> None:
    filters = CorpusFilters(100, 100)
    assert filters.text_reason(SentencePair(text, "fine")) == "broken characters"
    assert filters.text_reason(SentencePair("fine", text)) == "broken characters"


@pytest.mark.parametrize("text", ["tab\t", "\x0b\x0c\x85 white space", "soft\u00adhyphen", "\u200bzero"])
def test_white_space_and_invisible_characters_are_not_broken_ones(text: str) -> None:
    assert CorpusFilters(100, 100).text_reason(SentencePair(text, text)) is None


def test_what_is_far_too_long_is_never_cut_into_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    filters = CorpusFilters(10, 20)
    tokenizer, seen = train_tokenizer([], 260), list[str]()
    monkeypatch.setattr(
        Tokenizer, "encode_batch", lambda _, texts: [[5] for _ in seen.extend(texts) or texts]
    )
    long, short = SentencePair("x" * 161, "y"), SentencePair("a", "b")
    assert passing_pairs([long, short], tokenizer, filters)[0] == [short]
    assert seen == ["b"]
    assert filters.text_reason(SentencePair("x" * 160, "y" * 320)) is None
    assert filters.text_reason(SentencePair("x" * 161, "y")) == "too long"
    assert filters.text_reason(SentencePair("x", "y" * 321)) == "too long"
