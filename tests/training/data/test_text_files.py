import gzip
import os
import re
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from seq2seq_serve.training.data import text_files
from seq2seq_serve.training.data.text_files import (
    STANDARD_INPUT,
    SentencePair,
    iterate_lines,
    iterate_parallel,
    iterate_tsv,
    pair_hash,
    read_lines,
    read_parallel,
    write_lines,
)


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


def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path: Path) -> None:
    assert read_lines(write(tmp_path / "a", b"\xef\xbb\xbfa\nb")) == ["a", "b"]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_bytes_that_are_not_utf8_are_reported_with_file_and_line(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, b"good\nbad \xff here\n")
    message = re.escape(f"{path}, line 2: not UTF-8 (byte 0xff at column 5)")
    with pytest.raises(ValueError, match=message):
        read_lines(path)


# Named: the bytes begin with the time, and processes that share the tests must agree on names.
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not gzip", ": its name ends in .gz, but it is not a gzip file"),
        (gzip.compress(b"line\n" * 1000)[:-9], ", after line 1000: not a whole gzip file"),
    ],
    ids=["not gzip", "cut off"],
)
def test_a_broken_gzip_file_is_reported(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{path}{message}")):
        read_lines(path)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_line_that_no_sentence_has_is_refused_before_it_fills_the_memory(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "_MAX_LINE_BYTES", 20)
    path = write(tmp_path / name, b"short\n" + b"x" * 19 + b"\n" + b"x" * 1000)
    with pytest.raises(ValueError, match=r"line 3: longer than 20 bytes, so it is not a sentence"):
        read_lines(path)


def test_lines_are_read_one_by_one(tmp_path: Path) -> None:
    lines = iterate_lines(write(tmp_path / "a", b"good\nbad \xff\n"))
    assert next(lines) == "good"
    pairs = iterate_parallel(write(tmp_path / "s", b"a\nb\n"), write(tmp_path / "t", b"c\n"))
    assert next(pairs) == ("a", "c")


def test_a_dash_is_standard_input_and_leaves_it_open(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = TextIOWrapper(BytesIO("하나\n둘".encode()))
    monkeypatch.setattr("sys.stdin", stream)
    assert read_lines(STANDARD_INPUT) == ["하나", "둘"]
    assert not stream.closed


def test_the_hash_of_a_pair_tells_its_sides_apart() -> None:
    pairs = [SentencePair("a", "b c"), SentencePair("a b", "c"), SentencePair("b c", "a")]
    assert len({pair_hash(pair) for pair in pairs}) == 3
    assert pair_hash(pairs[0]) == pair_hash(SentencePair("a", "b c"))


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
    with pytest.raises(ValueError, match=r"t has 2 lines and .*s has 3"):
        read_parallel(target, source)


def test_empty_files_are_refused(tmp_path: Path) -> None:
    empty = write(tmp_path / "e", b"")
    with pytest.raises(ValueError, match="have 0 lines: the corpus is empty"):
        read_parallel(empty, empty)
    with pytest.raises(ValueError, match="has 0 lines: the corpus is empty"):
        list(iterate_tsv(empty))


@pytest.mark.parametrize(("line", "count"), [("alone", 1), ("a\tb\tc", 3), ("", 1)])
def test_tsv_with_another_number_of_columns_is_refused(tmp_path: Path, line: str, count: int) -> None:
    path = write(tmp_path / "a.tsv", f"a\tb\n{line}\na\tb\n".encode())
    with pytest.raises(ValueError, match=f"line 2: expected 2 columns, source and target, found {count}"):
        list(iterate_tsv(path))
