import pytest

from seq2seq_serve.bundle.errors import first_line


@pytest.mark.parametrize(
    ("text", "line"), [("one\ntwo", "one"), ("\nno sentencepiece\n", "no sentencepiece"), (" \n", "OSError")]
)
def test_the_first_line_of_an_error_is_one_with_text(text, line):
    """An ImportError of transformers begins with an empty line, and its reason was not told."""
    assert first_line(OSError(text)) == line
