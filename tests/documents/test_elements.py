"""How XML is read: what its parts say, and how much work that is."""

from pathlib import Path

import pytest

from seq2seq_serve.documents import elements
from seq2seq_serve.documents.elements import BEGIN, END, TEXT, Content, Event, Names, events
from seq2seq_serve.documents.markup import Flows, escaped_xml


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


def test_the_events_read_after_notes_grow_with_their_number():
    """Each note without a text after it read all that follows."""
    num_read = 0

    class Counted(list):
        def __getitem__(self, place):
            nonlocal num_read
            num_read += 1
            return super().__getitem__(place)

    text = Counted([Event(BEGIN, "x note"), Event(END, "x note")] * 1000)
    names = Names(notes=frozenset(["x note"]), has_raised=True)
    Content(Flows(escaped_xml), names).add_all(text)
    assert 2 * len(text) < num_read < 100 * len(text)
