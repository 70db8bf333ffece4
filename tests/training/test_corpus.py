import gzip
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from training.corpus import (
    Corpus,
    CorpusFiles,
    CorpusFilters,
    SentencePair,
    built_in_corpus,
    load_corpus,
    read_lines,
    read_parallel,
    read_tsv,
    write_lines,
)
from training.tokenizer import train_tokenizer


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_lines_are_read_plain_and_from_gzip(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, "하나\r\n둘 \n\n셋\n".encode())
    assert read_lines(path) == ["하나", "둘 ", "", "셋"]


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    lines = ["a\u2028b\x0cc\x85d", "e\rf"]
    write_lines(tmp_path / "a", lines)
    assert read_lines(tmp_path / "a") == lines


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    assert read_lines(write(tmp_path / "a", b"\xef\xbb\xbfa\nb")) == ["a", "b"]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_bytes_that_are_not_utf8_are_reported_with_file_and_line(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, b"good\nbad \xff here\n")
    message = re.escape(f"{path}, line 2: not UTF-8 (byte 0xff at column 5)")
    with pytest.raises(ValueError, match=message):
        read_lines(path)


# Named: the bytes begin with the time, and processes that share the tests must agree on names.
@pytest.mark.parametrize(
    "content", [b"not gzip", gzip.compress(b"line\n" * 1000)[:-9]], ids=["not gzip", "cut off"]
)
def test_a_broken_gzip_file_is_reported(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{path}: not a whole gzip file")):
        read_lines(path)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "a"))):
        read_lines(tmp_path / "a")
    with pytest.raises(IsADirectoryError, match=re.escape(str(tmp_path))):
        read_lines(tmp_path)


def test_a_pipe_can_be_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as executor:
        lines = executor.submit(read_lines, pipe)
        pipe.write_bytes(b"a\nb\n")
        assert lines.result() == ["a", "b"]


def test_files_of_unequal_length_are_refused_with_both_counts(tmp_path: Path) -> None:
    source, target = write(tmp_path / "s", b"a\nb\nc\n"), write(tmp_path / "t", b"a\nb\n")
    with pytest.raises(ValueError, match=r"s has 3 lines and .*t has 2"):
        read_parallel(source, target)


def test_empty_files_are_refused(tmp_path: Path) -> None:
    empty = write(tmp_path / "e", b"")
    with pytest.raises(ValueError, match="have 0 lines: the corpus is empty"):
        read_parallel(empty, empty)
    with pytest.raises(ValueError, match="has 0 lines: the corpus is empty"):
        read_tsv(empty)


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz"])
def test_tsv_has_a_pair_a_line(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, "하나\tone\n둘\ttwo\n".encode())
    assert read_tsv(path) == [("하나", "one"), ("둘", "two")]


@pytest.mark.parametrize(("line", "count"), [("alone", 1), ("a\tb\tc", 3), ("", 1)])
def test_tsv_with_another_number_of_columns_is_refused(tmp_path: Path, line: str, count: int) -> None:
    path = write(tmp_path / "a.tsv", f"a\tb\n{line}\na\tb\n".encode())
    with pytest.raises(ValueError, match=f"line 2: expected 2 columns, source and target, found {count}"):
        read_tsv(path)


def test_filters_count_what_they_drop(tmp_path: Path) -> None:
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
    kept, report = CorpusFilters(10, 10, max_length_ratio=3.5).apply(pairs, tokenizer)
    assert kept == [pairs[0], pairs[2], pairs[7], pairs[9]]
    assert report.dropped == {"empty": 2, "duplicate": 1, "too long": 2, "length ratio": 1}
    assert (report.num_given, report.num_kept) == (10, 4)
    assert [line.split()[-1] for line in report.table().splitlines()] == ["10", "2", "1", "2", "1", "4"]
    kept, report = CorpusFilters(10, 10).apply(pairs, tokenizer)
    assert report.dropped["length ratio"] == 0
    assert pairs[8] in kept


def test_a_corpus_of_files_with_dev_files(tmp_path: Path) -> None:
    train = write(tmp_path / "train.tsv", b"a\tb\nc\td\n")
    source, target = write(tmp_path / "s", b"e\n"), write(tmp_path / "t", b"f\n")
    corpus = load_corpus(CorpusFiles(tsv=str(train), dev_source=str(source), dev_target=str(target)), seed=0)
    assert corpus.train == (("a", "b"), ("c", "d"))
    assert corpus.dev == (("e", "f"),)
    assert corpus.test == ()


def test_held_out_pairs_share_no_side_with_training(tmp_path: Path) -> None:
    lines = [f"s{i % 90}\tt{i % 70}" for i in range(200)]
    files = CorpusFiles(tsv=str(write(tmp_path / "a.tsv", "\n".join(lines).encode())))
    corpus = load_corpus(files, seed=1)
    assert len(corpus.dev) == 10
    assert not {pair.source for pair in corpus.dev} & {pair.source for pair in corpus.train}
    assert not {pair.target for pair in corpus.dev} & {pair.target for pair in corpus.train}
    assert load_corpus(files, seed=1) == corpus
    assert load_corpus(files, seed=2) != corpus


def test_a_corpus_too_small_to_hold_out_wants_dev_files(tmp_path: Path) -> None:
    files = CorpusFiles(tsv=str(write(tmp_path / "a.tsv", b"a\tb\n")))
    with pytest.raises(ValueError, match="1 distinct pairs are too few to hold any out: give dev files"):
        load_corpus(files, seed=0)


def test_a_corpus_of_blank_lines_is_refused_with_the_reason(tmp_path: Path) -> None:
    files = CorpusFiles(tsv=str(write(tmp_path / "a.tsv", b" \t\na\t \n")))
    with pytest.raises(ValueError, match="all 2 pairs have an empty side: nothing to train on"):
        load_corpus(files, seed=0)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"source": "a"}, "source and target are given together"),
        ({"source": "a", "target": "b", "tsv": "c"}, "tsv is given instead of source and target"),
        ({"tsv": "a", "dev_target": "b"}, "dev_source and dev_target are given together"),
        ({"dev_tsv": "a"}, "dev files are given without a training corpus"),
    ],
)
def test_contradicting_files_are_refused(files: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CorpusFiles(**files)


def test_the_hash_tells_corpora_apart() -> None:
    a, b, c = SentencePair("a", "b"), SentencePair("c", "d"), SentencePair("e", "f")
    corpus = Corpus("one", (a, b), (c,))
    assert corpus.sha256() == Corpus("another name", (a, b), (c,)).sha256()
    others = [Corpus("", (b, a), (c,)), Corpus("", (a,), (b, c)), Corpus("", (a, b), (), (c,))]
    assert corpus.sha256() not in {other.sha256() for other in others}


def test_the_built_in_corpus_is_the_default_and_always_the_same() -> None:
    corpus = load_corpus(CorpusFiles(), seed=7)
    assert len(corpus.train) >= 30_000
    assert SentencePair("나는 학생이다", "I am a student.") in corpus.train
    assert corpus.sha256() == built_in_corpus().sha256()
