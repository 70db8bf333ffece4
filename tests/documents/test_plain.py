from pathlib import Path

from seq2seq_serve.documents.plain import Plain
from tests.documents.answers import capitals, translated


def test_the_lines_of_a_text_are_translated_one_by_one():
    texts, content = translated("a.txt", "One two.\r\n\r\n  Three?\n---\nfour", capitals)
    assert texts == ["One two.", "Three?", "four"]
    assert content == "ONE TWO.\r\n\r\n  THREE?\n---\nFOUR"


def test_a_text_without_translations_stays_as_it_is():
    for content in ("", "a\rb\n\n", "\ufeffab\n"):
        assert Plain(content.encode(), Path("a.txt")).content() == content.encode()
