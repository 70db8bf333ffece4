import gzip

import pytest

from seq2seq_serve.client.files.lines import count_lines, read_whole
from seq2seq_serve.documents.segments import WrongFile


@pytest.mark.parametrize("content", [b"", b"a", b"a\n", b"a\n\nb", b"\n" * 3 * 2**19])
def test_lines_are_counted_as_they_are_read(tmp_path, content):
    path = tmp_path / "in.txt"
    path.write_bytes(content)
    assert count_lines(path) == len(content.splitlines())
    (tmp_path / "in.GZ").write_bytes(gzip.compress(content))  # its own bytes were counted
    assert count_lines(tmp_path / "in.GZ") == len(content.splitlines())


def test_a_damaged_story_is_an_error_with_its_name(tmp_path):
    """It was a traceback."""
    path = tmp_path / "story.gz"
    path.write_bytes(gzip.compress(b"one two three " * 99)[:-9])
    with pytest.raises(WrongFile, match="not a whole file of gzip"):
        read_whole(path, 10_000)
