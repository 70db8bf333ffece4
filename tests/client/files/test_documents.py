"""Documents whose texts are translated in their places, and the command that does so."""

import io
import re
from pathlib import Path

import docx
import polib
import pytest

from seq2seq_serve.client.files.documents import DOCUMENTS
from seq2seq_serve.client.files.lines import WrongFile
from seq2seq_serve.protos.seq2seq_v1_pb2 import (
    GenerateResponse,
    Hypothesis,
    Sentence,
    WordAlignment,
    WordLink,
)

SRT = """1
00:00:01,000 --> 00:00:02,500
{\\an8}One <i>two three</i> four,
five and six.

2
00:00:03,000 --> 00:00:04,000 X1:10 X2:20
- Who?
- I am.

3
00:00:05,000 --> 00:00:06,000
...
"""
VTT = """WEBVTT - a title

NOTE
Not shown

STYLE
::cue {color: red}

begin
01:00.000 --> 01:02.000 align:start line:0
<v.loud Mary>Fish &amp; <b>chips</b>
"""
HTML = """<!DOCTYPE html>
<html><head><title>The title</title><style>p {color: red}</style></head>
<body><h1>Big news</h1>
<p class="a">Go <b>to <i>sleep</i></b> now,<br>or <a href="x?a=1&amp;b=2">never</a>.</p>
<!-- a comment --><pre>as it is</pre><p translate="no">Brand</p>
<ul><li>one<ul><li>two</li></ul></li></ul><img alt="A red cat" src="cat.png"><p>  12 : 30 </p></body></html>
"""
PO = """msgid ""
msgstr ""
"Content-Type: text/plain; charset=UTF-8\\n"
"Plural-Forms: nplurals=3; plural=n;\\n"

#: a.py:3
msgid ""
"Hello, %s!\\n"
"\\n"
"Bye {name}"
msgstr ""

msgid "done"
msgstr "fertig"

msgid "%d file"
msgid_plural "%d files"
msgstr[0] ""
msgstr[1] ""
msgstr[2] ""
"""


def backwards(text: str) -> GenerateResponse:
    """The words in capitals and the other way round, each aligned with its source word."""
    words = text.split()
    links = [WordLink(source_word=len(words) - 1 - place, target_word=place) for place in range(len(words))]
    targets = [word.upper() for word in reversed(words)]
    alignment = WordAlignment(source_words=words, target_words=targets, links=links)
    return GenerateResponse(hypotheses=[Hypothesis(text=" ".join(targets), word_alignment=alignment)])


def capitals(text: str) -> GenerateResponse:
    """The same words in capitals, sentence by sentence as a text that was split."""
    sentences = []
    for sentence in re.split(r"(?<=[.,!?]) ", text):
        words = sentence.split()
        links = [WordLink(source_word=place, target_word=place) for place in range(len(words))]
        alignment = WordAlignment(source_words=words, target_words=[w.upper() for w in words], links=links)
        one = Hypothesis(text=sentence.upper(), word_alignment=alignment)
        sentences.append(Sentence(source_text=sentence, hypotheses=[one]))
    return GenerateResponse(hypotheses=[Hypothesis(text=text.upper())], sentences=sentences)


def translated(name: str, content: str | bytes, translate) -> tuple[list[str], str | bytes]:
    """The texts of a document, and its content after their translation."""
    is_text = isinstance(content, str)
    path = Path(name)
    document = DOCUMENTS[path.suffix](content.encode() if is_text else content, path)
    texts = [segment.text for segment in document.segments]
    for segment in document.segments:
        segment.translate(translate(segment.text))
    written = document.content()
    return texts, written.decode() if is_text else written


@pytest.mark.parametrize(
    ("name", "content"), [("a.srt", SRT), ("a.vtt", VTT), ("a.html", HTML), ("a.po", PO)]
)
def test_a_document_without_translations_is_as_it_was(name, content):
    path = Path(name)
    assert DOCUMENTS[path.suffix](content.encode(), path).content().decode() == content


def test_subtitles_keep_their_times_places_tags_and_speakers():
    texts, written = translated("a.srt", SRT, capitals)
    assert texts == ["One two three four, five and six.", "Who?", "I am."]
    expected = SRT.replace("One <i>two three</i> four,\nfive", "ONE <i>TWO THREE</i> FOUR,\nFIVE")
    expected = expected.replace(" and six.", " AND SIX.").replace("Who?", "WHO?").replace("I am", "I AM")
    assert written == expected


def test_tags_of_subtitles_follow_their_words():
    assert "{\\an8}SIX. AND FIVE FOUR,\n<i>THREE TWO</i> ONE\n" in translated("a.srt", SRT, backwards)[1]
    texts, written = translated("a.vtt", VTT, backwards)
    assert texts == ["Fish & chips"]
    before, after = "Fish &amp; <b>chips</b>", "<b>CHIPS</b></v> <v.loud Mary>&amp; FISH</v>"
    assert written == VTT.replace(before, after)
    marks = "1\r\n0:01,0 --> 0:02,0\r\n(Go <b>now</b>, <i>please</i>!)"
    assert translated("a.srt", marks, capitals)[1] == marks.replace("Go", "GO").replace(
        "<b>now</b>, <i>please</i>", "<b>NOW</b>, <i>PLEASE</i>"
    )


def test_html_keeps_its_elements_and_what_is_not_text():
    texts, written = translated("a.html", HTML, capitals)
    assert texts == ["The title", "Big news", "Go to sleep now,", "or never.", "one", "two", "A red cat"]
    expected = HTML
    for text in ("The title", "Big news", "Go ", "to ", "sleep", " now,", "or ", "never", "A red cat"):
        expected = expected.replace(text, text.upper())
    assert written == expected.replace(">one<", ">ONE<").replace(">two<", ">TWO<")


def test_elements_of_html_follow_their_words():
    written = translated("a.html", HTML, backwards)[1]
    assert '<p class="a">NOW, <b><i>SLEEP</i></b><b> TO </b>GO<br>' in written
    assert '<a href="x?a=1&amp;b=2">NEVER</a>. OR</p>' in written


def test_pages_may_be_nested_more_deeply_than_calls():
    page = "<div>a <b>" * 3_000 + "word" + "</b></div>" * 3_000
    texts, written = translated("a.html", page, capitals)
    assert texts == ["a"] * 2_999 + ["a word"]
    assert written == page.replace("a <b>", "A <b>").replace("word", "WORD")


def test_an_empty_target_of_a_text_with_formatting_leaves_nothing_behind():
    empty = GenerateResponse(hypotheses=[Hypothesis(word_alignment=WordAlignment())])
    texts, written = translated("a.html", "<p>Go <b>away</b></p>", lambda _: empty)
    assert texts == ["Go away"]
    assert written == "<p><b></b></p>"


def test_what_only_looks_like_a_tag_is_text():
    less = "1\n0:01,0 --> 0:02,0\nx <3 and y> z"
    texts, written = translated("a.srt", less, capitals)
    assert texts == ["x <3 and y> z"]
    assert written == less.replace(texts[0], "X <3 AND Y> Z")
    times = "WEBVTT\n\n00:01.000 --> 00:02.000\none <00:01.500>two"
    assert translated("a.vtt", times, capitals)[0] == ["one two"]


def word_file() -> bytes:
    document = docx.Document()
    paragraph = document.add_paragraph("Go ")
    paragraph.add_run("to sleep").bold = True
    paragraph.add_run(" now\tor never")
    document.add_table(1, 1).cell(0, 0).text = "in a cell"
    document.sections[0].header.paragraphs[0].text = "at the top"
    document.add_paragraph("12 : 30")
    stream = io.BytesIO()
    document.save(stream)
    return stream.getvalue()


def test_word_keeps_runs_tables_and_headers():
    texts, written = translated("a.docx", word_file(), capitals)
    assert texts == ["Go to sleep now", "or never", "in a cell", "at the top"]
    document = docx.Document(io.BytesIO(written))
    assert [paragraph.text for paragraph in document.paragraphs] == ["GO TO SLEEP NOW\tOR NEVER", "12 : 30"]
    assert [run.text for run in document.paragraphs[0].runs if run.bold] == ["TO SLEEP"]
    assert document.tables[0].cell(0, 0).text == "IN A CELL"
    assert document.sections[0].header.paragraphs[0].text == "AT THE TOP"


def test_runs_of_word_follow_their_words():
    [paragraph, _] = docx.Document(io.BytesIO(translated("a.docx", word_file(), backwards)[1])).paragraphs
    assert paragraph.text == "NOW SLEEP TO GO\tNEVER OR"
    assert [run.text for run in paragraph.runs if run.bold] == ["SLEEP TO"]


def test_messages_keep_translations_and_a_lost_placeholder_is_fuzzy():
    texts, written = translated("a.po", PO, capitals)
    assert texts == ["Hello, %s!", "Bye {name}", "%d file", "%d files", "%d files"]
    first, done, files = polib.pofile(written)
    assert (first.msgstr, first.fuzzy) == ("HELLO, %S!\n\nBYE {NAME}", True)
    assert done.msgstr == "fertig"
    assert files.msgstr_plural == {0: "%D FILE", 1: "%D FILES", 2: "%D FILES"}
    _, written = translated("a.po", PO, lambda text: GenerateResponse(hypotheses=[Hypothesis(text=text)]))
    assert not any(entry.fuzzy for entry in polib.pofile(written))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.srt", b"\xff", "the file is not UTF-8: byte 1 is wrong"),
        ("a.docx", b"PK", "the file is not a Word document"),
        ("a.po", b"nothing", "the file is not a file of gettext"),
    ],
)
def test_a_damaged_document_is_refused(name, content, message):
    with pytest.raises(WrongFile) as caught:
        DOCUMENTS[Path(name).suffix](content, Path(name))
    assert caught.value.strerror.startswith(message)


def test_the_command_translates_a_document_and_keeps_what_fails(run, capsys, tmp_path):
    long = "x" * 99
    (tmp_path / "in.html").write_text(f"<p>One <b>two</b></p><p>{long}</p><p>three</p>")
    code, _, [line] = run("translate", "--input", "in.html", "--output", "out.html")
    assert code == 1
    assert line.startswith(f"error: text 2 ({long[:60]}): INVALID_ARGUMENT: the source has 100 tokens")
    assert line.endswith("or set --long-source")
    assert (tmp_path / "out.html").read_text() == (tmp_path / "in.html").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.html", "out.html"]
    with pytest.raises(SystemExit, match="2"):
        run("translate", "--input", "in.html", "--output", "out.html")
    assert "out.html exists" in capsys.readouterr().err
    assert run("translate", "--input", "in.html", "--output", "out.html", "--overwrite")[0] == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--output", "out.txt"], "in.srt is a document: give --output a name in .srt"),
        ([], "in.srt is a document: give --output a name in .srt"),
        (["--output", "out.srt", "--num-hypotheses", "2"], "are for lines, not for documents"),
    ],
)
def test_what_does_not_fit_a_document_is_one_line(run, capsys, tmp_path, flags, message):
    (tmp_path / "in.srt").write_text(SRT)
    with pytest.raises(SystemExit, match="2"):
        run("translate", "--input", "in.srt", *flags)
    [line, _] = capsys.readouterr().err.splitlines()
    assert message in line
