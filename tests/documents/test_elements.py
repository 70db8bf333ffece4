"""How XML is read: what its parts say, and how much work that is."""

from pathlib import Path

import pytest

from seq2seq_serve.documents import elements
from seq2seq_serve.documents.elements import TEXT, Event, events


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("a &amp; b &#99;", "a & b c"),
        ("a <![CDATA[& b]]> c", "a & b c"),
        ("<![CDATA[]]>a\r\nb&lt;", "a\nb<"),
    ],
)
def test_entities_and_cdata_are_one_text(markup, text):
    found = [*events(f"<x>{markup}<y/> </x>".encode(), Path("a.xml"))]
    texts = [(event.markup, event.text) for event in found if event.kind == TEXT]
    assert texts == [(markup, text), (" ", " ")]


def test_the_characters_written_for_a_text_grow_with_its_entities(monkeypatch):
    """Each entity wrote the text before it again."""
    num_written = 0

    class Counted(Event):
        def __setattr__(self, name, value):
            nonlocal num_written
            num_written += len(value) if name == "text" else 0
            super().__setattr__(name, value)

    monkeypatch.setattr(elements, "Event", Counted)
    [text] = [event for event in events(b"<x>" + b"&amp;" * 1000 + b"</x>", Path("a.xml")) if event.text]
    assert text.text == "&" * 1000
    assert num_written == 1000
