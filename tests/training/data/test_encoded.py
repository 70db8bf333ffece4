import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest

from seq2seq_serve.bundle.tokenizer import Tokenizer
from seq2seq_serve.training.data import encoded
from seq2seq_serve.training.data.encoded import EncodedCorpus, encode_pairs, passing_pairs, write_encoded
from seq2seq_serve.training.data.filters import CorpusFilters
from seq2seq_serve.training.data.sources import NOTHING
from seq2seq_serve.training.data.text_files import SentencePair
from seq2seq_serve.training.data.tokenizer import train_tokenizer

FILTERS = CorpusFilters(50, 50)
PAIRS = [SentencePair(f"문장 {i} 🎉", "a sentence " * (i % 2) + str(i)) for i in range(25)]


@pytest.fixture
def tokenizer() -> Tokenizer:
    return train_tokenizer(["문장 sentence"] * 3, 270)


def test_pairs_are_normalised_before_they_are_looked_at(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pairs = [
        SentencePair("오늘", "the day"),
        SentencePair(unicodedata.normalize("NFD", "오늘"), " the\u3000day\ufeff"),
        SentencePair("오늘", "\u200b"),
    ]
    report = write_encoded(tmp_path / "encoded", pairs, tokenizer, FILTERS)
    assert list(EncodedCorpus(tmp_path / "encoded").texts(tokenizer)) == pairs[:1]
    assert (report.dropped["duplicate"], report.dropped["empty"]) == (1, 1)
    assert passing_pairs(pairs[1:], tokenizer, FILTERS)[0] == pairs[:1]


def test_what_is_read_is_what_was_written(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoded, "_CHUNK_PAIRS", 10)
    report = write_encoded(tmp_path / "encoded", iter(PAIRS), tokenizer, FILTERS)
    corpus = EncodedCorpus(tmp_path / "encoded")
    expected = encode_pairs(PAIRS, tokenizer)
    assert (report.num_given, report.num_kept, len(corpus)) == (25, 25, 25)
    assert list(corpus) == expected
    assert corpus[3:5] == expected[3:5]
    assert corpus.source_lengths.tolist() == [len(pair.source_ids) for pair in expected]
    assert corpus.target_lengths.tolist() == [pair.target_length for pair in expected]
    assert list(corpus.texts(tokenizer)) == PAIRS
    assert not list(tmp_path.glob("*.tmp"))


def test_what_is_dropped_is_what_filters_drop_from_pairs_in_memory(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    too_long = SentencePair("x" * 60, "a")
    pairs = [*PAIRS, SentencePair("", "a"), too_long, SentencePair("\0", "a"), *PAIRS[3:9], too_long]
    report = write_encoded(tmp_path / "encoded", pairs, tokenizer, FILTERS)
    kept, in_memory = passing_pairs(pairs, tokenizer, FILTERS)
    assert list(EncodedCorpus(tmp_path / "encoded").texts(tokenizer)) == kept == PAIRS
    for found in (report, in_memory):
        assert {reason: count for reason, count in found.dropped.items() if count} == {
            "empty": 1,
            "broken characters": 1,
            "too long": 2,
            "duplicate": 6,
        }


def test_equal_pairs_are_written_once_with_the_positions_of_their_sources(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    pairs = [PAIRS[i // (8 + i % 3)] for i in range(200)]
    report = write_encoded(tmp_path / "encoded", pairs, tokenizer, FILTERS, NOTHING)
    corpus = EncodedCorpus(tmp_path / "encoded")
    assert list(corpus) == encode_pairs(list(dict.fromkeys(pairs)), tokenizer, NOTHING)
    assert corpus.source_lengths.tolist() == [1] * len(corpus)
    assert report.num_kept == len(corpus) < 200


def test_large_vocabularies_have_wide_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_tokenizer([], 260)
    monkeypatch.setattr(Tokenizer, "vocab_size", 70_000)
    monkeypatch.setattr(Tokenizer, "encode_batch", lambda *_: [[69_999]])
    write_encoded(tmp_path / "encoded", [SentencePair("a", "b")], tokenizer, FILTERS)
    (pair,) = EncodedCorpus(tmp_path / "encoded")
    assert pair.target_ids == [69_999]


def test_files_that_do_not_fit_each_other_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_encoded(tmp_path / "encoded", PAIRS, tokenizer, FILTERS)
    ids = tmp_path / "encoded" / "ids.uint16"
    ids.write_bytes(ids.read_bytes()[:-2])
    with pytest.raises(ValueError, match="encoded: damaged; remove it, and give the corpus again"):
        EncodedCorpus(tmp_path / "encoded")


def test_an_interrupted_writing_leaves_no_corpus(tmp_path: Path, tokenizer: Tokenizer) -> None:
    def broken() -> Iterator[SentencePair]:
        yield PAIRS[0]
        raise ValueError("cut off")

    with pytest.raises(ValueError, match="cut off"):
        write_encoded(tmp_path / "encoded", broken(), tokenizer, FILTERS)
    assert not (tmp_path / "encoded").exists()
    write_encoded(tmp_path / "encoded", PAIRS, tokenizer, FILTERS)
    assert len(EncodedCorpus(tmp_path / "encoded")) == 25
