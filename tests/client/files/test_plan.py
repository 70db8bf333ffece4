import dataclasses
import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from seq2seq_serve.client.files.plan import (
    PLAN_FILE,
    FileState,
    JobError,
    Plan,
    Shard,
    atomic_write,
    check_plan,
    locked,
    names_of,
    read_plan,
    remove_leftovers,
    state_of,
    write_plan,
)

ROOT = Path(__file__).parents[3]
INPUTS = {"/in/a.jsonl": FileState(5, 9, "a1")}
SETTINGS = {"bundle_version": "v1", "options": {"beam_size": 4}, "format": "jsonl", "shard_lines": 100}
SHARDS = (Shard("a-00000", "/in/a.jsonl", 0, 100, 0), Shard("a-00001", "/in/a.jsonl", 100, 7, 900))
PLAN = Plan(SETTINGS, INPUTS, SHARDS)


def test_a_plan_is_read_as_it_was_written(tmp_path):
    assert read_plan(tmp_path) is None
    write_plan(tmp_path / "new", PLAN)
    assert read_plan(tmp_path / "new") == PLAN
    check_plan(tmp_path, PLAN, dataclasses.replace(PLAN, shards=()), "")


def test_a_plan_is_written_only_where_it_changes(tmp_path):
    """The plan of a folder was written with each file of `--to`."""
    write_plan(tmp_path, PLAN)
    before = (tmp_path / PLAN_FILE).stat().st_ino
    write_plan(tmp_path, PLAN)
    assert (tmp_path / PLAN_FILE).stat().st_ino == before
    other = dataclasses.replace(PLAN, shards=())
    write_plan(tmp_path, other)
    assert read_plan(tmp_path) == other


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": {"/in/a.jsonl": FileState(5, 9, "b2")}}, "a.jsonl has changed"),
        ({"inputs": {"/in/b.jsonl": FileState(5, 9, "a1")}}, "a.jsonl is not given now; /in/b.jsonl"),
    ],
)
def test_a_folder_of_another_run_is_refused(tmp_path, change, message):
    with pytest.raises(JobError, match=f"{tmp_path} .*{message}.*start anew"):
        check_plan(tmp_path, PLAN, dataclasses.replace(PLAN, **change), "start anew")


def test_a_plan_of_the_last_release_is_read(tmp_path):
    content = (
        '{"settings": {"bundle_version": "v1", "options": {"beam_size": 4}, "format": "jsonl", '
        '"shard_lines": 100, "inputs": {"/in/a.jsonl": [5, 9, "a1"]}}, "shards": '
        '[["a-00000", "/in/a.jsonl", 0, 100, 0], ["a-00001", "/in/a.jsonl", 100, 7, 900]]}'
    )
    (tmp_path / PLAN_FILE).write_text(content)
    assert read_plan(tmp_path) == PLAN


def test_a_file_is_the_same_by_its_content_whatever_its_time_is(tmp_path):
    """Machines that share a file system, such as by SMB, may see other times."""
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = state_of(path)
    os.utime(path, ns=(5, 5))
    after = state_of(path, before)
    assert (after, after.changed_ns) == (before, 5)
    path.write_text("two")
    assert state_of(path, after) != before


def test_a_file_of_the_known_size_and_time_is_not_read(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    known = dataclasses.replace(state_of(path), sha256="as it was")
    assert state_of(path, known) is known


@pytest.mark.parametrize(
    "content",
    ["", "{}", '{"settings": {}, "shards": []}', "[1]", '{"settings": {"inputs": 5}}', "[" * 200_000],
    ids=lambda content: content[:30],
)
def test_a_file_that_is_not_a_plan_is_refused(tmp_path, content):
    (tmp_path / PLAN_FILE).write_text(content)
    with pytest.raises(JobError, match="is not a plan of this command"):
        read_plan(tmp_path)


def test_outputs_have_the_names_of_their_inputs_below_the_folder_that_all_share():
    assert names_of([Path("/c/a.txt.gz")]) == ["a"]
    assert names_of([Path("/c/de/a.txt"), Path("/c/en/a.txt")]) == ["de/a", "en/a"]
    assert names_of([Path("/c/news.2020.txt"), Path("/c/news.ko.GZ")]) == ["news.2020", "news.ko"]
    with pytest.raises(JobError, match="2 inputs would have the output a"):
        names_of([Path("/c/a.txt"), Path("/c/a.jsonl")])
    for name in ("/c/_errors/a.txt", "/c/.txt", "/c/_a.txt"):
        with pytest.raises(JobError, match="readers skip such names"):
            names_of([Path("/c/a.txt"), Path(name)])


def test_a_file_system_that_cannot_link_or_synchronize_a_folder_is_enough(tmp_path, monkeypatch):
    """As SMB and FUSE; a plan needed a hard link."""

    def fsync(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):  # noqa: PTH112
            raise OSError(errno.EINVAL, "it is a folder")

    monkeypatch.setattr(os, "link", None)
    monkeypatch.setattr(os, "fsync", fsync)
    write_plan(tmp_path / "out", PLAN)
    assert read_plan(tmp_path / "out") == PLAN


def test_a_file_system_without_locks_of_folders_is_enough(tmp_path, monkeypatch, caplog):
    """Each command on NFS began with a warning."""

    def flock(_descriptor, _operation):
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path / "out"):
        assert (tmp_path / "out").is_dir()
    assert not caplog.records


def test_a_system_without_locks_is_enough(tmp_path):
    """As Windows, where no command of the client could be started."""
    script = """
import sys
from pathlib import Path
sys.modules["fcntl"] = None
import seq2seq_serve.client.__main__
from seq2seq_serve.client.files.plan import locked
with locked(Path(sys.argv[1])), locked(Path(sys.argv[1])):
    print("locked")
"""
    command = [sys.executable, "-c", script, tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "locked\n", "")


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
