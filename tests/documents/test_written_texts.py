"""Documents of every kind hold any text: a program that reads the kind gets the same text back."""

from pathlib import Path
from xml.etree import ElementTree

import polib
import pytest

from seq2seq_serve.documents.alignment import text_of
from seq2seq_serve.documents.kinds import FILES
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateResponse, Hypothesis

TARGETS = (
    "one\ntwo",
    "one\r\n\r\n  two\tthree",
    "one\u2028two\x85three\x0bfour\x07",
    "tab\tand | bar | too",
    "# one",
    "one # two",
    "- one: two",
    "1. one",
    "> one",
    "| one |",
    "`one` *two* _three_ [four](five)",
    "'one' \"two\"",
    '"',
    "it's",
    "back\\slash \\n \\t \\\\ \\u0041",
    "end\\",
    "  spaces  ",
    "@one ?two",
    "?one",
    "one: two, [three] {four}",
    "a & b < c > d &amp; &lt;",
    "=one",
    "!one",
    "one = two",
    "\u00a0one\u00a0two",
    "안녕 \U0001f600",
    "yes",
    "---",
    "one --- two ===",
)
_HEAD = '<?xml version="1.0" encoding="utf-8"?>\n'
_XLIFF = '<xliff version="1.2"><file source-language="en" target-language="ko"><body>{}</body></file></xliff>'
CONTENTS = {
    "paragraph.html": "<p>Hello</p>",
    "title.html": "<p title='Hello'>1</p>",
    "paragraph.md": "Hello\n\n1\n",
    "heading.md": "# Hello\n\n1\n",
    "item.md": "- 1\n- Hello\n\n1\n",
    "cell.md": "| 1 | 2 |\n| --- | --- |\n| Hello | 3 |\n",
    "string.json": '{"a": "Hello"}',
    "string.arb": '{"a": "Hello"}',
    "plain.yaml": "a: Hello\nb: 1\n",
    "single.yaml": "a: 'Hello'\nb: 1\n",
    "double.yaml": 'a: "Hello"\nb: 1\n',
    "literal.yaml": "a: |\n  Hello\n  1\nb: 1\n",
    "folded.yaml": "a: >-\n  Hello\nb: 1\n",
    "brackets.yaml": "a: [Hello, 1]\nb: {c: 1}\n",
    "a.properties": "a=Hello\nb=1\n",
    "a.strings": '"a" = "Hello";\n',
    "a.stringsdict": _HEAD + "<plist><dict><key>other</key><string>Hello</string></dict></plist>",
    "android.xml": _HEAD + '<resources><string name="a">Hello</string></resources>',
    "a.resx": _HEAD + '<root><data name="a"><value>Hello</value></data></root>',
    "a.srt": "1\n00:00:01,000 --> 00:00:02,000\nHello\n\n2\n00:00:03,000 --> 00:00:04,000\n1\n",
    "a.vtt": "WEBVTT\n\n00:01.000 --> 00:02.000\nHello\n\n00:03.000 --> 00:04.000\n1\n",
    "a.txt": "Hello\n1\n",
    "a.ass": "[Events]\nFormat: Layer, Text\nDialogue: 0,Hello\nDialogue: 0,1\n",
}


XML_UNITS = {
    "a.xlf": (_XLIFF.format('<trans-unit id="1"><source>Hello</source></trans-unit>'), "target"),
    "a.ts": ("<TS><context><message><source>Hello</source></message></context></TS>", "translation"),
    "a.tmx": (
        '<tmx version="1.4"><header srclang="en"/><body><tu><tuv xml:lang="en"><seg>One</seg></tuv>'
        '<tuv xml:lang="ko"><seg>1</seg></tuv></tu><tu><tuv xml:lang="en"><seg>Hello</seg></tuv></tu>'
        "</body></tmx>",
        "tuv/seg",
    ),
}
CASES = [*(f"{target} there" for target in TARGETS), *(f"Hello {target}" for target in TARGETS)]


def _shown(text: str) -> str:
    """A text as one line."""
    return " ".join(
        "".join(" " if ord(each) < 32 or 127 <= ord(each) < 160 else each for each in text).split()
    )


def _written(name: str, content: str, target: str) -> bytes:
    document = FILES[Path(name).suffix](content.encode(), Path(name))
    segment = document.segments[-1]
    segment.translate(GenerateResponse(hypotheses=[Hypothesis(text=target)]))
    return document.content()


@pytest.mark.parametrize("target", CASES)
@pytest.mark.parametrize("name", CONTENTS)
def test_each_reader_reads_what_its_writer_has_written(name, target):
    written = _written(name, CONTENTS[name], target)
    [segment] = FILES[Path(name).suffix](written, Path(name)).segments
    found, expected = _shown(text_of(segment.pieces)), _shown(target)
    if name.endswith(".ass"):  # which has no escapes
        expected = expected.replace("\\n", "/n").replace("{", "(").replace("}", ")")
    if name.endswith((".srt", ".vtt")):  # the first dash is that of a speaker
        found, expected = found.lstrip("- "), expected.lstrip("- ")
    assert found == expected


@pytest.mark.parametrize("target", CASES)
@pytest.mark.parametrize("name", XML_UNITS)
def test_a_translation_beside_its_text_is_read_back(name, target):
    content, path = XML_UNITS[name]
    root = ElementTree.fromstring(_written(name, content, target))
    texts = [element.text or "" for element in root.findall(f".//{path}")]
    assert _shown(texts[-1]) == _shown(target)


@pytest.mark.parametrize("target", CASES)
def test_a_message_of_gettext_is_read_back(target):
    written = _written("a.po", 'msgid "Hello"\nmsgstr ""\n', target).decode()
    assert _shown(polib.pofile(written)[0].msgstr) == _shown(target)
