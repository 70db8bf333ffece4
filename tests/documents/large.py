"""Documents of any size, whose texts are as dense as in files of every day."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import cycle

from tests.documents.attacks import archive_of, word_file

_SENTENCES = (
    "The committee met on Tuesday to discuss the budget for the coming year.",
    "Nobody had expected so many visitors, and the hall was too small for them.",
    "Save the file before you close the window.",
    "He opened the letter, read it twice, and laughed.",
)
_W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_DRAWING = "http://schemas.openxmlformats.org/drawingml/2006/main"
_SHEET = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_TEXT = "urn:oasis:names:tc:opendocument:xmlns:text:1.0"
_OFFICE = "urn:oasis:names:tc:opendocument:xmlns:office:1.0"
_TABLE = "urn:oasis:names:tc:opendocument:xmlns:table:1.0"


def _kinds(name: str, kind: str) -> str:
    return f'<Types><Override PartName="/{name}" ContentType="a.{kind}+xml"/></Types>'


def _slides(slide: str) -> bytes:
    name = "ppt/slides/slide1.xml"
    parts = {"[Content_Types].xml": _kinds(name, "slide"), "ppt/presentation.xml": "<p/>"}
    return archive_of(parts | {name: f'<p xmlns:a="{_DRAWING}">{slide}</p>'})


def _tables(strings: str) -> bytes:
    name = "xl/sharedStrings.xml"
    parts = {"[Content_Types].xml": _kinds(name, "sharedStrings"), "xl/workbook.xml": "<w/>"}
    return archive_of(parts | {name: f'<sst xmlns="{_SHEET}">{strings}</sst>'})


def _book(body: str) -> bytes:
    return archive_of(
        {
            "META-INF/container.xml": '<c><rootfile full-path="a.opf"/></c>',
            "a.opf": '<p><item href="a.xhtml" media-type="application/xhtml+xml"/></p>',
            "a.xhtml": f'<html xmlns="http://www.w3.org/1999/xhtml"><body>{body}</body></html>',
        }
    )


def _open_document(inside: str) -> bytes:
    names = f'xmlns:text="{_TEXT}" xmlns:office="{_OFFICE}" xmlns:table="{_TABLE}"'
    return archive_of({"content.xml": f"<o {names}>{inside}</o>"})


def _text(before: str = "", after: str = "") -> Callable[[str], bytes]:
    return lambda units: f"{before}{units}{after}".encode()


# The repeated unit, where N is its number and S a sentence, and what makes a file of units.
_UNITS: dict[str, tuple[str, Callable[[str], bytes]]] = {
    ".srt": ("N\n00:00:01,000 --> 00:00:02,500\nS\n<i>S</i>\n\n", _text()),
    ".vtt": ("01:00.000 --> 01:02.000\n<v Mary>S\n\n", _text("WEBVTT\n\n")),
    ".ass": (
        "Dialogue: 0,0:00:01.00,0:00:02.00,Default,,0,0,0,,S\n"
        "Dialogue: 0,0:00:01.00,0:00:02.00,Default,,0,0,0,,{\\i1}S{\\i0}\\N S\n",
        _text("[Events]\n"),
    ),
    ".html": (
        '<div class="row"><h2>S</h2>\n<p>S <b>Bold words</b> and <a href="/pages/N">a link</a>. S</p>\n'
        '<ul><li>S</li><li><em>S</em></li></ul><img alt="A red cat" src="cat.png"></div>\n',
        _text("<!DOCTYPE html>\n<html><body>", "</body></html>"),
    ),
    ".md": (
        "## Heading N\n\nS **Bold words** and [a link](https://example.org/N). S\nS\n\n- S\n- *S*\n\n",
        _text(),
    ),
    ".po": ('#: file.c:N\nmsgid "S"\nmsgstr ""\n\n', _text('msgid ""\nmsgstr ""\n"Language: de\\n"\n\n')),
    ".xliff": (
        '<trans-unit id="N"><source>S</source></trans-unit>\n'
        '<trans-unit id="aN"><source>S <g id="1">bold words</g> follow.</source></trans-unit>\n',
        _text('<xliff version="1.2"><file><body>', "</body></file></xliff>"),
    ),
    ".ts": (
        '<message><location line="N"/><source>S</source><translation type="unfinished"/></message>\n',
        _text("<TS><context>", "</context></TS>"),
    ),
    ".tmx": (
        '<tu><tuv xml:lang="en"><seg>S</seg></tuv></tu>\n',
        _text(
            '<tmx><header srclang="en"/><body><tu><tuv xml:lang="en"><seg>x</seg></tuv>'
            '<tuv xml:lang="de"><seg>y</seg></tuv></tu>',
            "</body></tmx>",
        ),
    ),
    ".xml": (
        '<string name="nameN">S</string>\n<string name="bN">S <b>bold words</b> follow.</string>\n',
        _text("<resources>", "</resources>"),
    ),
    ".resx": ('<data name="nameN"><value>S</value></data>\n', _text("<root>", "</root>")),
    ".properties": ("key.N = S\n", _text()),
    ".strings": ('/* A comment */\n"keyN" = "S";\n', _text()),
    ".stringsdict": ("<key>one</key><string>S</string>\n", _text("<plist><dict>", "</dict></plist>")),
    ".json": ('"keyN": "S",\n', _text("{", '"end": ""}')),
    ".yaml": ("keyN: S\nquotedN: 'S'\n", _text()),
    ".docx": (
        '<w:p><w:pPr><w:pStyle w:val="Text"/></w:pPr><w:r><w:t xml:space="preserve">S </w:t></w:r>'
        "<w:r><w:rPr><w:b/></w:rPr><w:t>Bold words</w:t></w:r><w:r><w:t>: S</w:t></w:r></w:p>",
        word_file,
    ),
    ".pptx": (
        '<a:p><a:r><a:rPr lang="en-US"/><a:t>S</a:t></a:r><a:r><a:rPr b="1"/><a:t> S</a:t></a:r></a:p>',
        _slides,
    ),
    ".xlsx": ("<si><t>S</t></si><si><r><t>S </t></r><r><rPr><b/></rPr><t>S</t></r></si>", _tables),
    ".odt": (
        '<text:p text:style-name="P1">S <text:span text:style-name="T1">S</text:span></text:p>',
        _open_document,
    ),
    ".ods": (
        '<table:table-cell office:value-type="string" office:string-value="S"><text:p>S</text:p>'
        "</table:table-cell>",
        _open_document,
    ),
    ".epub": ("<p>S <b>Bold words</b> and <i>others</i>. S</p>\n", _book),
}
SUFFIXES = tuple(_UNITS)


def document_of(suffix: str, inside: str) -> bytes:
    """Returns a document of a kind, with this markup where its texts are."""
    return _UNITS[suffix][1](inside)


def large(suffix: str, num_bytes: int) -> tuple[bytes, int]:
    """Returns a document of a kind, and its size in bytes: of an archive that of its texts, unpacked."""
    unit, _ = _UNITS[suffix]
    units, size, sentences = list[str](), 0, cycle(_SENTENCES)
    parts = re.split(r"\b(S)\b|(?<!\\)(N)(?![A-Z])", unit)
    while size < num_bytes:
        values = {"S": lambda: next(sentences), "N": lambda: str(len(units))}
        units.append("".join(values[part]() if part in values else part or "" for part in parts))
        size += len(units[-1])
    return document_of(suffix, "".join(units)), size
