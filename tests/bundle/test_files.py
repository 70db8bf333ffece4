import mmap
import os
import sys
from pathlib import Path

import pytest

from seq2seq_serve.bundle.files import give_back, new_memory, read_small_file
from seq2seq_serve.bundle.manifest import bundle_version, is_checkpoint


def test_a_file_is_read_up_to_the_limit_also_by_a_link(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    (tmp_path / "link").symlink_to(path)
    assert read_small_file(tmp_path / "link", 5) == b"12345"
    with pytest.raises(ValueError, match="has more than 4 bytes, the limit"):
        read_small_file(path, 4)


def test_what_is_not_a_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ValueError, match=f"{path.name} is not a regular file"):
            read_small_file(path, 5)
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(OSError):  # noqa: PT011 (the system's words)
            read_small_file(path, 5)


def test_pipes_in_a_folder_of_bundles_are_not_waited_for(tmp_path):
    """The list of versions, and the load of a folder without a manifest, waited for ever."""
    for name in ("manifest.json", "config.json"):
        os.mkfifo(tmp_path / name)
    assert bundle_version(tmp_path) == ""
    assert not is_checkpoint(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep the memory")
@pytest.mark.parametrize("is_shared", [False, True])
def test_memory_is_given_back_in_whole_pages(is_shared):
    page = mmap.PAGESIZE
    descriptor = os.memfd_create("test") if is_shared else None
    memory = new_memory(6 * page, descriptor)
    memory[:] = b"x" * len(memory)
    give_back(memory, page + 1, 4 * page + 1)
    left = b"x" * 2 * page, bytes(2 * page), b"x" * 2 * page
    if descriptor is not None:  # to read them would take new pages
        assert os.fstat(descriptor).st_blocks * 512 == 4 * page
        os.close(descriptor)
    assert memory == b"".join(left)
    give_back(memory, page + 1, 2 * page)
    give_back(memoryview(bytearray(9 * page)), 0, 9 * page)
    assert memory == b"".join(left)
