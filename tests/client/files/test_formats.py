import dataclasses
import gzip
import json
import tracemalloc
from contextlib import closing
from datetime import date

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seq2seq_serve.client.errors import ClientError
from seq2seq_serve.client.files import formats
from seq2seq_serve.client.files.formats import (
    Reader,
    Writer,
    check_formats,
    format_of,
    split_into_shards,
)
from seq2seq_serve.client.files.plan import JobError, Shard
from seq2seq_serve.client.rpcs import Translated
from seq2seq_serve.documents.segments import WrongFile
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateResponse, Hypothesis


def read(*shards, field="text"):
    """The lines of some shards, by one reader."""
    with closing(Reader(field)) as reader:
        return [reader.read(shard) for shard in shards]


def read_all(path, shard_lines):
    return [text for lines in read(*split_into_shards(path, "x", shard_lines)) for text in lines.texts]


@given(
    lines=st.lists(st.text(st.characters(exclude_characters="\n\r", codec="utf-8"), max_size=9)),
    ends_with_break=st.booleans(),
    shard_lines=st.integers(1, 5),
    is_compressed=st.booleans(),
)
def test_the_shards_of_a_file_have_each_line_once_and_in_order(
    tmp_path_factory, lines, ends_with_break, shard_lines, is_compressed
):
    if lines and not ends_with_break:
        lines[-1] += "."  # without its break, an empty last line is no line
    content = "\n".join(lines).encode() + b"\n" * (ends_with_break and bool(lines))
    path = tmp_path_factory.mktemp("lines") / ("a.txt.gz" if is_compressed else "a.txt")
    path.write_bytes(gzip.compress(content) if is_compressed else content)
    shards = split_into_shards(path, "x", shard_lines)
    assert read_all(path, shard_lines) == lines
    assert [shard.first_line for shard in shards] == list(range(0, len(lines), shard_lines))
    assert sum(shard.num_lines for shard in shards) == len(lines)
    assert [shard.name for shard in shards] == [f"x-{number:05}" for number in range(len(shards))]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_shards_can_be_read_in_any_order(tmp_path, name):
    content = "".join(f"line {number}\n" for number in range(20)).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    shards = split_into_shards(tmp_path / name, "x", 4)
    chosen = (shards[3], shards[0], shards[4], shards[4])
    for shard, lines in zip(chosen, read(*chosen), strict=True):
        assert lines.texts == [f"line {shard.first_line + number}" for number in range(4)]


def test_a_line_that_is_not_utf_8_is_kept_apart_from_the_others(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\nzw\xf6lf\nthree\n")
    assert read_all(tmp_path / "a.txt", 10) == [
        "one",
        "zw\udcf6lf",
        "three",
    ]


def test_a_file_that_became_shorter_is_reported(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\nthree\n")
    (shard,) = split_into_shards(path, "x", 10)
    path.write_text("one\n")
    with pytest.raises(JobError, match="has changed since the run was planned"):
        read(shard)


def table_file(path, num_rows, rows_per_group):
    table = pyarrow.table({"id": range(num_rows), "text": [f"row {number}" for number in range(num_rows)]})
    pyarrow.parquet.write_table(table, path, row_group_size=rows_per_group)
    return table


@pytest.mark.parametrize("rows_per_group", [3, 10, 100])
@pytest.mark.parametrize("shard_lines", [1, 7, 25, 30])
def test_rows_are_cut_wherever_their_groups_end(tmp_path, rows_per_group, shard_lines):
    table = table_file(tmp_path / "a.parquet", 25, rows_per_group)
    shards = split_into_shards(tmp_path / "a.parquet", "x", shard_lines)
    found = read(*shards)
    assert pyarrow.concat_tables(lines.records for lines in found) == table
    assert [text for lines in found for text in lines.texts] == table["text"].to_pylist()


def test_a_field_that_no_record_has_ends_the_run(tmp_path):
    table_file(tmp_path / "a.parquet", 3, 3)
    (tmp_path / "a.jsonl").write_text('{"id": 1, "text": "one"}\n')
    for name in ("a.parquet", "a.jsonl"):
        (shard,) = split_into_shards(tmp_path / name, "x", 10)
        with pytest.raises(JobError, match="'ko', but id, text: give --field"):
            read(shard, field="ko")


def test_a_table_that_became_shorter_is_reported(tmp_path):
    table_file(tmp_path / "a.parquet", 10, 3)
    shards = split_into_shards(tmp_path / "a.parquet", "x", 5)
    table_file(tmp_path / "a.parquet", 4, 3)
    for shard in shards:
        with pytest.raises(JobError, match="has changed since the run was planned"):
            read(shard)


def test_files_that_are_not_what_their_name_says_are_reported(tmp_path):
    (tmp_path / "a.parquet").write_text("text")
    with pytest.raises(JobError, match=r"a.parquet is not a Parquet file"):
        split_into_shards(tmp_path / "a.parquet", "x", 10)
    content = bytearray(gzip.compress("\n".join(map(str, range(5000))).encode()))
    content[len(content) // 2] ^= 0xFF
    (tmp_path / "a.txt.gz").write_bytes(content)
    with pytest.raises(WrongFile, match="not a whole file of gzip"):
        split_into_shards(tmp_path / "a.txt.gz", "x", 10)


@pytest.mark.parametrize("name", ["a.zst", "a.txt.xz", "a.tsv.gz", "a.CSV", "a.tar.gz", "a.tgz"])
def test_files_that_cannot_be_read_are_refused_by_their_names(tmp_path, name):
    with pytest.raises(JobError, match=r"cannot be read: (write|decompress|unpack)"):
        format_of(tmp_path / name)


@pytest.mark.parametrize("name", ["a.xul", "a.md2.gz", "a.tex", "a.2"])
def test_a_file_of_an_unknown_kind_is_refused_with_those_that_are_known(tmp_path, name):
    """Its markup was translated as if it were text."""
    with pytest.raises(JobError, match=r"is not known: give --as text .* Known are .txt, .*\.docx"):
        check_formats([tmp_path / name], None)
    assert check_formats([tmp_path / name], None, is_text=True) == "text"


@pytest.mark.parametrize(
    ("name", "newer"), [("a.doc", "docx"), ("a.xls", "xlsx"), ("a.PPT", "pptx"), ("a.pdf", "docx")]
)
def test_a_file_of_another_program_is_refused_with_the_kind_to_save_it_as(tmp_path, name, newer):
    with pytest.raises(JobError, match=rf"is not known: save it as \.{newer}\. Known are"):
        check_formats([tmp_path / name], None)


@pytest.mark.parametrize("name", ["a", "a.txt", "a.TXT.gz", "a.ko", "news.pt_BR", "test.zho_Hans", "-"])
def test_lines_of_text_are_known_by_their_names(tmp_path, name):
    assert check_formats([tmp_path / name], None) == "text"


@pytest.mark.parametrize("name", ["a.srt", "a.jsonl"])
def test_a_file_of_a_known_kind_is_not_read_as_text(tmp_path, name):
    with pytest.raises(JobError, match="--as text is for files of unknown kinds"):
        check_formats([tmp_path / name], None, is_text=True)


def test_a_byte_order_mark_is_not_a_part_of_the_first_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\ntwo\n")
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\n{"text": "two"}\n')
    assert read_all(tmp_path / "a.txt", 1) == read_all(tmp_path / "a.jsonl", 1) == ["one", "two"]


def test_a_shard_ends_where_it_would_take_too_much_memory(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("five\n" * 10)
    monkeypatch.setattr(formats, "_MAX_BYTES", 12)
    shards = split_into_shards(tmp_path / "a.txt", "x", 4)
    assert [(shard.first_line, shard.num_lines) for shard in shards] == [(0, 3), (3, 3), (6, 3), (9, 1)]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl.gz"])
def test_a_line_that_is_too_long_is_named_and_not_read(tmp_path, monkeypatch, name):
    """A line of 300 MB took 5 GB."""
    monkeypatch.setattr("seq2seq_serve.client.files.lines.MAX_LINE_BYTES", 100)
    content = b"one\n" + b"x" * 99 + b"\n" + b"y" * 101
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(WrongFile, match="line 3 has more than 100 bytes"):
        split_into_shards(tmp_path / name, "x", 2)


def test_several_formats_need_a_choice_and_parquet_is_written_from_parquet(tmp_path):
    text, rows = tmp_path / "a.txt", tmp_path / "a.parquet"
    with pytest.raises(JobError, match=r"parquet and text: .*--format"):
        check_formats([text, rows], None)
    assert check_formats([text, rows], "jsonl") == "jsonl"
    assert check_formats([rows], None) == "parquet"
    with pytest.raises(JobError, match="only Parquet inputs"):
        check_formats([text], "parquet")


def target(text, score=None):
    return Translated("", GenerateResponse(hypotheses=[Hypothesis(text=text, score=score)]))


def failed(code, message):
    return Translated("", GenerateResponse(), ClientError(code, message))


HYPOTHESES = [{"text": "eins", "score": -0.5}, {"text": "ein", "score": -1.5}]
SEVERAL = GenerateResponse(hypotheses=[Hypothesis(**each) for each in HYPOTHESES])
BLANK = Translated("", GenerateResponse())
ANSWERS = [Translated("", SEVERAL), failed("INVALID_ARGUMENT", "too long"), BLANK]


def written(tmp_path, input_path, output_format, answers=ANSWERS, *, target_field="target", several=False):
    shard = Shard("part/a-00002", str(input_path), 40, 3, 0)
    (start,) = split_into_shards(input_path, "x", 10)
    writer = Writer(tmp_path / "out", output_format, target_field, 2 if several else 1)
    assert not writer.is_done(shard)
    writer.write(shard, *read(start), dict(enumerate(answers, shard.first_line + 1)))
    assert writer.is_done(shard)
    return writer.path(shard)


@pytest.fixture
def three_records(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"id": n, "text": f"n{n}"}) + "\n" for n in range(3)))
    return path


def test_errors_have_the_lines_number_and_go_with_the_try_that_had_them(tmp_path, three_records):
    errors = tmp_path / "out" / "_errors" / "part" / "a-00002.jsonl"
    path = written(tmp_path, three_records, "jsonl")
    assert json.loads(errors.read_text()) == {
        "input": str(three_records),
        "line": 42,
        "code": "INVALID_ARGUMENT",
        "message": "too long",
    }
    path.unlink()  # as if the process had been killed before it
    written(tmp_path, three_records, "jsonl", [target("eins")] * 3)
    assert not errors.exists()


def test_a_shard_that_is_written_again_is_never_beside_the_errors_of_another_try(
    tmp_path, three_records, monkeypatch
):
    """A kill between the two would make its blank lines final."""
    shard = Shard("a", str(three_records), 0, 3, 0)
    writer, [start] = Writer(tmp_path / "out", "jsonl", "target"), split_into_shards(three_records, "x", 10)

    def write(answers):
        writer.write(shard, *read(start), dict(enumerate(answers, 1)))

    def end(_path):
        raise OSError("killed")

    write([failed("INTERNAL", "x")] * 3)
    with monkeypatch.context() as patch:
        patch.setattr(formats, "atomic_write", end)
        with pytest.raises(OSError, match="killed"):
            write([target("eins")] * 3)
    assert not writer.is_done(shard)
    write([target("eins")] * 3)
    assert writer.is_done(shard)


def test_text_has_one_line_for_each_line(tmp_path, three_records):
    answers = [target("one\ntwo\u2028three", -1.0), *ANSWERS[1:]]
    assert written(tmp_path, three_records, "text", answers).read_text() == "one two three\n\n\n"


@pytest.mark.parametrize(
    "record",
    [
        '{"text": "one", "title": "\\ud800"}',
        '{"n": 1e400, "text":"one" , "n": 12345678901234567890.10 }',
        "{}",
    ],
)
def test_a_record_is_written_as_it_was_with_the_new_fields_behind_it(tmp_path, record):
    path = tmp_path / "a.jsonl"
    path.write_text(f"{record}\n")
    content = written(tmp_path, path, "jsonl", ANSWERS[:1]).read_text()
    begin = record[:-1].rstrip()
    comma = "" if begin == "{" else ", "
    assert content == f'{begin}{comma}"target": "eins", "target_score": -0.5}}\n'


def test_a_row_with_a_value_that_json_does_not_have_ends_the_run(tmp_path):
    for number, column in enumerate(([float("nan")], [b"\xff"])):
        path = tmp_path / f"{number}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": ["one"], "x": column}), path)
        with pytest.raises(JobError, match="--format parquet"):
            written(tmp_path, path, "jsonl", ANSWERS[:1])


def test_dates_of_rows_are_texts_in_json(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one"], "day": [date(2026, 11, 26)]}), path)
    content = written(tmp_path, path, "jsonl", ANSWERS[:1]).read_text()
    assert json.loads(content)["day"] == "2026-11-26"


def test_rows_get_columns_of_equal_types_in_every_shard(tmp_path):
    table_file(tmp_path / "a.parquet", 3, 3)
    all_failed = [failed("INTERNAL", "x")] * 3
    for several in (False, True):
        some = written(tmp_path / f"1{several}", tmp_path / "a.parquet", "parquet", several=several)
        none = Writer(tmp_path / f"2{several}", "parquet", "target", 2 if several else 1)
        (shard,) = split_into_shards(tmp_path / "a.parquet", "x", 10)
        none.write(shard, *read(shard), dict(enumerate(all_failed)))
        assert pyarrow.parquet.read_schema(some) == pyarrow.parquet.read_schema(none.path(shard))
    assert pyarrow.parquet.read_table(some).to_pylist()[0] == {
        "id": 0,
        "text": "row 0",
        "target": "eins",
        "target_score": -0.5,
        "target_hypotheses": HYPOTHESES,
    }


@pytest.mark.parametrize("field", ["target", "target_score"])
def test_a_field_of_the_input_is_not_replaced(tmp_path, field):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "one", field: "eins"}) + "\n")
    (shard,) = split_into_shards(path, "x", 10)
    (lines,) = read(shard)
    writer = Writer(tmp_path, "jsonl", "target")
    with pytest.raises(JobError, match=f"'{field}'.*--target-field"):
        writer.begin(lines)
    dataclasses.replace(writer, format="text").begin(lines)
    dataclasses.replace(writer, target_field="de").begin(lines)


def test_a_table_that_would_have_more_shards_than_a_plan_can_have_is_refused(tmp_path, monkeypatch):
    """The number of rows is a number in the file, which says nothing about its size."""
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"] * 5}), tmp_path / "a.parquet")
    monkeypatch.setattr(formats, "_MAX_SHARDS", 4)
    assert len(split_into_shards(tmp_path / "a.parquet", "x", 2)) == 3
    with pytest.raises(JobError, match=r"5 rows, .* 4 shards: .*--shard-lines"):
        split_into_shards(tmp_path / "a.parquet", "x", 1)


def test_records_of_a_shard_are_parsed_one_at_a_time(tmp_path):
    """A record can take twenty times the memory of its line."""
    line = json.dumps({"text": "x", "more": [[]] * 20_000})
    (tmp_path / "a.jsonl").write_text(f"{line}\n" * 20)
    [shard] = split_into_shards(tmp_path / "a.jsonl", "x", 20)
    tracemalloc.start()
    [lines] = read(shard)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert lines.texts == ["x"] * 20
    assert peak < 5 * 20 * len(line)
