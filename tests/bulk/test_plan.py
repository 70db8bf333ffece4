import dataclasses
import os
from pathlib import Path

import pytest

from seq2seq_serve.bulk.plan import (
    PLAN_FILE,
    JobError,
    Plan,
    Settings,
    Shard,
    atomic_write,
    names_of,
    read_plan,
    remove_leftovers,
    write_plan,
)

SETTINGS = Settings(
    "v1", "auto", None, None, {"beam_size": 4}, "text", "target", "jsonl", 100, {"/in/a.jsonl": [5, 9]}
)
PLAN = Plan(
    SETTINGS, (Shard("a-00000", "/in/a.jsonl", 0, 100, 0), Shard("a-00001", "/in/a.jsonl", 100, 7, 900))
)


def test_a_plan_is_read_as_it_was_written(tmp_path):
    assert read_plan(tmp_path, SETTINGS) is None
    write_plan(tmp_path / "new", PLAN)
    assert read_plan(tmp_path / "new", SETTINGS) == PLAN


@pytest.mark.parametrize(
    "change",
    [
        {"bundle_version": "v2"},
        {"precision": "int8"},
        {"max_source_length": 9},
        {"max_target_length": 9},
        {"options": {}},
        {"text_field": "ko"},
        {"target_field": "en"},
        {"format": "text"},
        {"shard_lines": 10},
        {"inputs": {"/in/a.jsonl": [5, 10]}},
        {"inputs": {"/in/b.jsonl": [5, 9]}},
    ],
)
def test_a_folder_of_another_run_is_refused(tmp_path, change):
    write_plan(tmp_path, PLAN)
    (name,) = change
    how = "(was .* and is .*|has changed|is new|is missing)"
    with pytest.raises(JobError, match=rf"other settings: {name}\b.* {how}\. Repeat the command"):
        read_plan(tmp_path, dataclasses.replace(SETTINGS, **change))


@pytest.mark.parametrize("content", ["", "{}", '{"settings": {}, "shards": []}', "[1]"])
def test_a_file_that_is_not_a_plan_is_refused(tmp_path, content):
    (tmp_path / PLAN_FILE).write_text(content)
    with pytest.raises(JobError, match="is not a plan of this command"):
        read_plan(tmp_path, SETTINGS)


def test_the_first_plan_of_a_folder_stays(tmp_path):
    other = dataclasses.replace(SETTINGS, format="text")
    for settings in (SETTINGS, other):
        write_plan(tmp_path, Plan(settings, PLAN.shards))
    assert read_plan(tmp_path, SETTINGS) == PLAN
    with pytest.raises(JobError, match="other settings: format was"):
        read_plan(tmp_path, other)


def test_outputs_have_the_names_of_their_inputs_below_the_folder_that_all_share():
    assert names_of([Path("/c/a.txt.gz")]) == ["a"]
    assert names_of([Path("/c/de/a.txt"), Path("/c/en/a.txt")]) == ["de/a", "en/a"]
    assert names_of([Path("/c/news.2020.txt"), Path("/c/news.ko.GZ")]) == ["news.2020", "news.ko"]
    with pytest.raises(JobError, match="2 inputs would have the output a"):
        names_of([Path("/c/a.txt"), Path("/c/a.jsonl")])
    for name in ("/c/_errors/a.txt", "/c/.txt", "/c/_a.txt"):
        with pytest.raises(JobError, match="readers skip names that begin so"):
            names_of([Path("/c/a.txt"), Path(name)])


def test_a_file_appears_when_it_is_whole(tmp_path):
    path = tmp_path / "out" / "a"
    with atomic_write(path) as file:
        file.write(b"content")
        assert not path.exists()
    assert path.read_bytes() == b"content"
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_was_begun_leaves_nothing(tmp_path):
    def begin():
        with atomic_write(tmp_path / "a") as file:
            file.write(b"half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        begin()
    assert list(tmp_path.iterdir()) == []


def test_old_leftovers_are_removed_and_files_that_are_being_written_stay(tmp_path):
    for name, age in ((".a.txt.1.tmp", 7200), (".b.txt.2.tmp", 10), ("c.txt", 7200)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    remove_leftovers(tmp_path, older_than=1e9 - 3600)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".b.txt.2.tmp", "c.txt"]
