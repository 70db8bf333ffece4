"""Marks of a list that are typed before a text: they stay, in documents of every kind."""

import io
import re
import zipfile
from pathlib import Path

import pytest

from seq2seq_serve.documents.kinds import FILES
from seq2seq_serve.documents.segments import begin_of, software_text, with_tags
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateResponse, Hypothesis
from tests.documents.answers import backwards, translated
from tests.documents.large import document_of


@pytest.mark.parametrize(
    "begin",
    [
        "☐ ",
        "☐",
        "•",
        " •\u3000",
        "- ",
        "– ",
        "* ",
        "※ ",
        "ㅇ ",
        "① ",
        "✔️ ",
        "[x] ",
        "( ) ",
        "- [ ] ",
        "2) ",
        "(a) (iv) ",
    ],
)
def test_the_marks_of_a_list_before_a_text_are_its_begin(begin):
    assert begin_of(f"{begin}one two") == begin


@pytest.mark.parametrize(
    "text",
    [
        "-5 degrees",
        "–he said",
        "-v or --verbose",
        "*one* two",
        "+one",
        "①과 ②를",
        "○○ 씨",
        "(one) two",
        "(2020) one",
        "1. Januar",
        "3.5 one",
        "A one",
        "[one] two",
        "- or -",
        "♪ la la ♪",
        "- 5",
        "[x] ",
        "one - two",
    ],
)
def test_what_belongs_to_the_words_is_no_mark_of_a_list(text):
    assert begin_of(text) == ""


_WORD = '<w:r>{}<w:t xml:space="preserve">{}</w:t></w:r>'
_BOLD = "<w:rPr><w:b/></w:rPr>"


@pytest.mark.parametrize(
    ("name", "paragraph", "expected"),
    [
        (
            "a.docx",
            f"<w:p>{_WORD.format('', '☐  one two')}</w:p>",
            f"<w:p>{_WORD.format('', '☐  TWO ONE')}</w:p>",
        ),
        (
            "a.docx",
            f"<w:p>{_WORD.format(_BOLD, '•')}{_WORD.format('', ' one two')}</w:p>",
            f"<w:p>{_WORD.format(_BOLD, '•')}{_WORD.format('', ' TWO ONE')}</w:p>",
        ),
        (
            "a.docx",
            f"<w:p><w:hyperlink>{_WORD.format('', '- ')}</w:hyperlink>{_WORD.format('', 'one two')}</w:p>",
            f"<w:p><w:hyperlink>{_WORD.format('', '- ')}</w:hyperlink>{_WORD.format('', 'TWO ONE')}</w:p>",
        ),
        ("a.xlsx", "<si><t>☐ one two</t></si>", '<si><t xml:space="preserve">☐ TWO ONE</t></si>'),
        (
            "a.xlsx",
            "<si><t>– one two&#10;-5 one two</t></si>",
            "<si><t>– TWO ONE&#10;TWO ONE -5</t></si>",
        ),
        (
            "a.pptx",
            "<a:p><a:r><a:t>– one two</a:t></a:r></a:p>",
            "<a:p><a:r><a:t>– TWO ONE</a:t></a:r></a:p>",
        ),
        (
            "a.odt",
            "<text:p>•<text:s/><text:span>one</text:span> two</text:p>",
            "<text:p>•<text:s/>TWO <text:span>ONE</text:span></text:p>",
        ),
        ("a.txt", "- one two\n", "- TWO ONE\n"),
        ("a.html", "<p>• one <b>two</b>", "<p>• <b>TWO</b> ONE"),
        ("a.html", "<p><code>- </code>one two", "<p>TWO ONE <code>- </code>"),
        ("a.md", "| a |\n|-|\n| ☐ one two |", "| A |\n|-|\n| ☐ TWO ONE |"),
        ("a.json", '["- one <b>two</b>"]', '["- <b>TWO</b> ONE"]'),
    ],
)
def test_a_mark_of_a_list_stays_where_it_is(name, paragraph, expected):
    """It was sent with the text, and stood where the model put it."""
    suffix = name[1:]
    is_archive = suffix in (".docx", ".xlsx", ".pptx", ".odt")
    content = document_of(suffix, paragraph) if is_archive else paragraph
    texts, written = translated(name, content, backwards)
    if is_archive:
        with zipfile.ZipFile(io.BytesIO(written)) as archive:
            found = [archive.read(part).decode() for part in archive.namelist()]
        assert any(expected in part for part in found), found
    else:
        assert written == expected
    assert not any(re.match("[☐•–]|- ", text) for text in texts) or "<code>" in paragraph


def test_a_mark_of_a_list_stays_before_a_text_that_is_sent_with_its_tags():
    targets = {"one <b>two</b>": "<b>x</b> y", "<b>- one</b> two": "y <b>- z</b>"}
    document = FILES[".json"](b'[" - one <b>two</b> ", "<b>- one</b> two"]', Path("a.json"))
    for segment in document.segments:
        sent = with_tags(software_text(segment.text, segment.with_tags))
        segment.translate(GenerateResponse(hypotheses=[Hypothesis(text=targets[sent])]))
    assert document.content() == b'[" - <b>x</b> y ", "y <b>- z</b>"]'
