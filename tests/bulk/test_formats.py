import gzip
import json
from contextlib import closing

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seq2seq_serve.bulk import formats
from seq2seq_serve.bulk.formats import LineError, Reader, Target, Writer, check_formats, cut, format_of
from seq2seq_serve.bulk.plan import JobError, Shard


def read(*shards, field="text"):
    """The lines of some shards, by one reader."""
    with closing(Reader(field)) as reader:
        return [reader.read(shard) for shard in shards]


def read_all(path, shard_lines):
    return [text for lines in read(*cut(path, "x", shard_lines)) for text in lines.texts]


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "_BLOCK_BYTES", 7)
        shards = cut(path, "x", shard_lines)
        assert read_all(path, shard_lines) == lines
    assert [shard.first_line for shard in shards] == list(range(0, len(lines), shard_lines))
    assert sum(shard.num_lines for shard in shards) == len(lines)
    assert [shard.name for shard in shards] == [f"x-{number:05}" for number in range(len(shards))]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_shards_can_be_read_in_any_order(tmp_path, name):
    content = "".join(f"line {number}\n" for number in range(20)).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    shards = cut(tmp_path / name, "x", 4)
    chosen = (shards[3], shards[0], shards[4], shards[4])
    for shard, lines in zip(chosen, read(*chosen), strict=True):
        assert lines.texts == [f"line {shard.first_line + number}" for number in range(4)]


def test_a_line_ends_without_its_carriage_return(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\r\n")
    assert read_all(tmp_path / "a.txt", 10) == ["one", "two"]


def test_a_line_that_is_not_utf_8_is_an_error_of_this_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\nzw\xf6lf\nthree\n")
    assert read_all(tmp_path / "a.txt", 10) == [
        "one",
        LineError("INVALID_ARGUMENT", "not valid UTF-8 at byte 3"),
        "three",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "one"', "not JSON"),
        ('["one"]', "not a JSON object"),
        ('{"ko": "one"}', "no field 'text'"),
        ('{"text": 5}', "not a text: 5"),
        ('{"text": null}', "not a text: None"),
    ],
)
def test_a_record_without_a_text_is_an_error_of_its_line(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "zero"}}\n{line}\n')
    zero, error = read_all(tmp_path / "a.jsonl", 10)
    assert zero == "zero"
    assert message in error.message


def test_a_file_that_became_shorter_is_reported(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\nthree\n")
    (shard,) = cut(path, "x", 10)
    path.write_text("one\n")
    with pytest.raises(JobError, match="has changed since the run was planned"):
        read(shard)


def test_a_compressed_file_without_its_end_is_reported(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\n" * 1000)[:-9])
    with pytest.raises(JobError, match="not a whole file of gzip"):
        cut(tmp_path / "a.txt.gz", "x", 10)


def table_file(path, num_rows, rows_per_group):
    table = pyarrow.table({"id": range(num_rows), "text": [f"row {number}" for number in range(num_rows)]})
    pyarrow.parquet.write_table(table, path, row_group_size=rows_per_group)
    return table


@pytest.mark.parametrize("rows_per_group", [3, 10, 100])
@pytest.mark.parametrize("shard_lines", [1, 7, 25, 30])
def test_rows_are_cut_wherever_their_groups_end(tmp_path, rows_per_group, shard_lines):
    table = table_file(tmp_path / "a.parquet", 25, rows_per_group)
    shards = cut(tmp_path / "a.parquet", "x", shard_lines)
    found = read(*shards)
    assert pyarrow.concat_tables(lines.records for lines in found) == table
    assert [text for lines in found for text in lines.texts] == table["text"].to_pylist()


def test_a_missing_column_ends_the_run(tmp_path):
    table_file(tmp_path / "a.parquet", 3, 3)
    (shard,) = cut(tmp_path / "a.parquet", "x", 10)
    with pytest.raises(JobError, match="does not have a column 'ko', but id, text"):
        read(shard, field="ko")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.txt", "text"),
        ("a.ko", "text"),
        ("a.jsonl.gz", "jsonl"),
        ("a.ndjson", "jsonl"),
        ("a.parquet", "parquet"),
    ],
)
def test_the_name_of_a_file_says_its_format(tmp_path, name, expected):
    assert format_of(tmp_path / name) == expected


def test_several_formats_need_a_choice_and_parquet_is_written_from_parquet(tmp_path):
    text, rows = tmp_path / "a.txt", tmp_path / "a.parquet"
    with pytest.raises(JobError, match="parquet and text: choose the output's --format"):
        check_formats([text, rows], None)
    assert check_formats([text, rows], "jsonl") == "jsonl"
    assert check_formats([rows], None) == "parquet"
    with pytest.raises(JobError, match="only inputs in Parquet"):
        check_formats([text], "parquet")


HYPOTHESES = ({"text": "eins", "score": -0.5}, {"text": "ein", "score": -1.5})
ANSWERS = [Target("eins", -0.5, HYPOTHESES), LineError("INVALID_ARGUMENT", "too long"), Target("")]


def written(tmp_path, input_path, output_format, answers=ANSWERS, *, target_field="target", several=False):
    shard = Shard("part/a-00002", str(input_path), 40, 3, 0)
    (start,) = cut(input_path, "x", 10)
    writer = Writer(tmp_path / "out", output_format, target_field, has_hypotheses=several)
    assert not writer.is_done(shard)
    writer.write(shard, *read(start), answers)
    assert writer.is_done(shard)
    errors = tmp_path / "out" / "_errors" / "part" / "a-00002.jsonl"
    if errors.exists():
        (error,) = map(json.loads, errors.read_text().splitlines())
        assert error == {
            "input": str(input_path),
            "line": 42,
            "code": "INVALID_ARGUMENT",
            "message": "too long",
        }
    return writer.path(shard)


@pytest.fixture
def three_records(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"id": n, "text": f"n{n}"}) + "\n" for n in range(3)))
    return path


def test_records_keep_their_fields(tmp_path, three_records):
    path = written(tmp_path, three_records, "jsonl")
    assert list(map(json.loads, path.read_text().splitlines())) == [
        {"id": 0, "text": "n0", "target": "eins", "target_score": -0.5},
        {"id": 1, "text": "n1", "target": None, "target_score": None},
        {"id": 2, "text": "n2", "target": "", "target_score": None},
    ]


def test_records_have_all_hypotheses_if_there_are_several(tmp_path, three_records):
    path = written(tmp_path, three_records, "jsonl", several=True)
    first, second, third = map(json.loads, path.read_text().splitlines())
    assert first["target_hypotheses"] == list(HYPOTHESES)
    assert (second["target_hypotheses"], third["target_hypotheses"]) == (None, [])


def test_text_has_one_line_for_each_line(tmp_path, three_records):
    answers = [Target("one\ntwo\u2028three", -1.0), *ANSWERS[1:]]
    assert written(tmp_path, three_records, "text", answers).read_text() == "one two three\n\n\n"


def test_a_record_with_half_a_character_is_written_as_it_was(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "title": "\\ud800"}\n')
    content = written(tmp_path, path, "jsonl", ANSWERS[:1]).read_text()
    assert json.loads(content)["title"] == "\ud800"


def test_rows_get_columns_of_equal_types_in_every_shard(tmp_path):
    table_file(tmp_path / "a.parquet", 3, 3)
    failed = [LineError("INTERNAL", "x")] * 3
    for several in (False, True):
        some = written(tmp_path / f"1{several}", tmp_path / "a.parquet", "parquet", several=several)
        none = Writer(tmp_path / f"2{several}", "parquet", "target", has_hypotheses=several)
        (shard,) = cut(tmp_path / "a.parquet", "x", 10)
        none.write(shard, *read(shard), failed)
        assert pyarrow.parquet.read_schema(some) == pyarrow.parquet.read_schema(none.path(shard))
    assert pyarrow.parquet.read_table(some).to_pylist()[0] == {
        "id": 0,
        "text": "row 0",
        "target": "eins",
        "target_score": -0.5,
        "target_hypotheses": list(HYPOTHESES),
    }


@pytest.mark.parametrize("field", ["target", "target_score"])
def test_a_field_of_the_input_is_not_replaced(tmp_path, field):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "one", field: "eins"}) + "\n")
    with pytest.raises(JobError, match=f"already has a field '{field}': choose another --target-field"):
        written(tmp_path, path, "jsonl", ANSWERS[:1])
    written(tmp_path, path, "jsonl", ANSWERS[:1], target_field="de")
