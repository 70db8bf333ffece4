"""Documents that a small file makes large or slow."""

from __future__ import annotations

import gzip
import io
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_TIME = "1\n0:01,0 --> 0:02,0\n"
_VTT = "WEBVTT\n\n00:01.000 --> 00:02.000\n"
_PO = 'msgid ""\nmsgstr ""\n"Plural-Forms: nplurals={};\\n"\n\n'
_MESSAGE = 'msgid ""\n{}msgstr ""\n'
_PLURAL = 'msgid "%d file"\nmsgid_plural "%d files"\nmsgstr[0] ""\n'
_NAMESPACE = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_PICTURES = "http://schemas.openxmlformats.org/drawingml/2006/wordprocessingDrawing"
_FIELD = '<w:r><w:fldChar w:fldCharType="{}"/></w:r>'
_FIELD_END, _RUN = _FIELD.format("end"), "<w:r><w:t>x </w:t></w:r>"
_EVENT = "[Events]\nDialogue: 0,0:00:01.00,0:00:02.00,Default,,0,0,0,,"
_UNIT = "<xliff><trans-unit><source>"
_MEMORY = (
    "<tmx><header srclang='en'/><body><tu><tuv lang='en'><seg>x</seg></tuv>"
    "<tuv lang='ko'><seg>y</seg></tuv></tu>"
)
_ENTITIES = '<!DOCTYPE w [<!ENTITY a "{}">{}]>'.format(
    "ha " * 100,
    "".join(f'<!ENTITY {name} "{f"&{of};" * 100}">' for of, name in zip("abcd", "bcde", strict=True)),
)


@dataclass(frozen=True)
class Attack:
    """A kind of document.

    Attributes:
        suffix: The end of its file's name.
        make: Returns one of about this number of bytes, before compression.
        is_refused: Whether it must be refused; all others are translated.
    """

    suffix: str
    make: Callable[[int], bytes]
    is_refused: bool = False


def word_file(paragraphs: str, *, before: str = "", others: Sequence[tuple[str, bytes]] = ()) -> bytes:
    """Returns a Word file.

    Args:
        paragraphs: The markup of its body.
        before: What the markup begins with.
        others: The names and contents of other parts.
    """
    body = f'<w:document xmlns:w="{_NAMESPACE}"><w:body>{paragraphs}</w:body></w:document>'
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", f"{before}{body}")
        for name, content in others:
            archive.writestr(name, content)
    return stream.getvalue()


def archive_of(parts: dict[str, str | bytes]) -> bytes:
    """Returns an archive of parts."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return stream.getvalue()


def _slides(inside: str, before: str = "", others: dict[str, str | bytes] | None = None) -> bytes:
    drawing = "http://schemas.openxmlformats.org/drawingml/2006/main"
    kinds = '<Types><Override PartName="/ppt/slides/slide1.xml" ContentType="a.slide+xml"/></Types>'
    return archive_of(
        {
            "[Content_Types].xml": kinds,
            "ppt/presentation.xml": "<p/>",
            "ppt/slides/slide1.xml": f'{before}<p xmlns:a="{drawing}">{inside}</p>',
        }
        | (others or {})
    )


def _tables(strings: str, num_columns: int = 0) -> bytes:
    sheet = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    overrides = '<Override PartName="/xl/sharedStrings.xml" ContentType="a.sharedStrings+xml"/>'
    overrides += '<Override PartName="/xl/table1.xml" ContentType="a.table+xml"/>' * (1 + num_columns)
    return archive_of(
        {
            "[Content_Types].xml": f"<Types>{overrides}</Types>",
            "xl/workbook.xml": "<w/>",
            "xl/sharedStrings.xml": f'<sst xmlns="{sheet}">{strings}</sst>',
            "xl/table1.xml": "<table>" + '<tableColumn name="a"/>' * num_columns + "</table>",
        }
    )


def _book(package: str, page: str = "", num_packages: int = 1) -> bytes:
    return archive_of(
        {
            "META-INF/container.xml": "<c>" + '<rootfile full-path="a.opf"/>' * num_packages + "</c>",
            "a.opf": f'<p><item href="a.xhtml" media-type="application/xhtml+xml"/>{package}</p>',
            "a.xhtml": f'<html xmlns="http://www.w3.org/1999/xhtml"><body>{page}</body></html>',
        }
    )


def _open_text(inside: str, before: str = "") -> bytes:
    namespace = "urn:oasis:names:tc:opendocument:xmlns:text:1.0"
    return archive_of({"content.xml": f'{before}<o xmlns:text="{namespace}">{inside}</o>'})


def _repeated(suffix: str, unit: str, before: str = "", after: str = "") -> Attack:
    return Attack(suffix, lambda size: f"{before}{unit * (size // len(unit))}{after}".encode())


def _nested(
    suffix: str, begin: str, end: str, before: str = "", after: str = "", inside: str = "x"
) -> Attack:
    def make(size: int) -> bytes:
        number = size // len(begin + end)
        return f"{before}{begin * number}{inside}{end * number}{after}".encode()

    return Attack(suffix, make)


def _field(instruction: str) -> str:
    """Returns the markup of Word that begins a field with a result."""
    code = f"<w:r><w:instrText> {instruction} </w:instrText></w:r>"
    return f"{_FIELD.format('begin')}{code}{_FIELD.format('separate')}"


def _word(unit: str, before: str = "", after: str = "", end: str = "") -> Attack:
    def make(size: int) -> bytes:
        number = size // len(unit + end)
        return word_file(before + unit * number + end * number + after)

    return Attack(".docx", make)


def _open(unit: str, end: str = "") -> Attack:
    def make(size: int) -> bytes:
        number = size // len(unit + end)
        return _open_text(f"<text:p>{unit * number}{end * number}</text:p>")

    return Attack(".odt", make)


def _false_size(size: int) -> bytes:
    """Returns a Word file whose part says that it is far smaller than it is."""
    name, content = "word/media/a.png", bytes(100 * size)
    whole = word_file("<w:p/>", others=[(name, content)])
    return whole.replace(len(content).to_bytes(4, "little"), (1000).to_bytes(4, "little"))


ATTACKS = {
    "tags that do not end, in a subtitle": _repeated(".srt", "<b>x ", _TIME),
    "a subtitle of many tags": _repeated(".srt", "<b>x</b> y ", _TIME),
    "a subtitle with half a tag": _repeated(".srt", "<b ", _TIME + "x"),
    "a subtitle of many lines": _repeated(".srt", "x <b>y</b>\n", _TIME),
    "marks within a word of a subtitle": _repeated(".srt", "!", f"{_TIME}<b>q</b> x", "x"),
    "half a time of subtitles": _repeated(".srt", "1", "1:1."),
    "half a position of subtitles": _repeated(".srt", "{\\", f"{_TIME}x"),
    "a number in a subtitle": _repeated(".vtt", "1", f"{_VTT}x &#", ";"),
    "tags that do not end": _repeated(".html", "<b>x "),
    "blocks that do not end": _repeated(".html", "<div>x "),
    "half a tag": _repeated(".html", "<a "),
    "half an attribute": _repeated(".html", "<a b='"),
    "half a comment": _repeated(".html", "<!-- x "),
    "half a declaration": _repeated(".html", "<![x"),
    "half an end": _repeated(".html", "</b"),
    "half a script": _repeated(".html", "<script>x"),
    "many attributes": _repeated(".html", "a=x ", "<p ", ">x"),
    "ends of other tags": _repeated(".html", "</i>", "<b>" * 2_000 + "x"),
    "a paragraph of many tags": _repeated(".html", "x <b>y</b> "),
    "notes of a page": _repeated(".html", "x.<sup><a href=#n>[1]</a></sup> "),
    "fields within a sentence": _repeated(".html", "x <select><option>x y</select> "),
    "objects that do not end": _repeated(".html", "x <object> "),
    "notes that do not end": _repeated(".html", "<sup>1<a href=#n>", "x"),
    "notes between tags": _repeated(".html", "x <b><sup>1</sup><sup>2</sup> ", "x "),
    "readings that do not end": _repeated(".html", "<ruby>x<rt>", "x "),
    "a number in a page": _repeated(".html", "1", "x &#", ";"),
    "a charset that decodes slowly": _repeated(".html", "x", "<meta charset=punycode>"),
    "a billion plural forms": Attack(
        ".po", lambda size: (_PO.format(10**9) + _PLURAL + "\n" * size).encode(), is_refused=True
    ),
    "a number of plural forms with many digits": Attack(
        ".po", lambda size: (_PO.format("1" * size) + _PLURAL).encode(), is_refused=True
    ),
    "a message of many lines": _repeated(".po", '"a\\n"\n', _PO.format(2) + 'msgid ""\n', 'msgstr ""\n'),
    "a message in many parts": _repeated(".po", '"a"\n', _PO.format(2) + 'msgid ""\n', 'msgstr ""\n'),
    "half a placeholder": _repeated(".po", "0", _PO.format(2) + 'msgid "a %', '"\nmsgstr ""\n'),
    "a message of escapes": _repeated(".po", "\\\\", _PO.format(2) + 'msgid "a', '"\nmsgstr ""\n'),
    "a header of many languages": _repeated(
        ".po", '"Language: \\n"\n', _PO.format(2).rstrip() + "\n", '\n\nmsgid "a"\nmsgstr ""\n'
    ),
    "spaces of a header": _repeated(
        ".po", " ", 'msgid ""\nmsgstr ""\n"Language:', 'ko"\n\nmsgid "a"\nmsgstr ""\n'
    ),
    "a catalog that is a path": Attack(".po", lambda _: b"/dev/zero", is_refused=True),
    "runs that do not end": _word("<w:r><w:t>x </w:t>", "<w:p>", "</w:p>", end="</w:r>"),
    "paragraphs in paragraphs": _word("<w:p>", end="</w:p>"),
    "a paragraph of many runs": _word("<w:r><w:t>x </w:t></w:r>", "<w:p>", "</w:p>"),
    "a run of many properties": _word("<w:rPr/>", "<w:p><w:r>", "<w:t>x</w:t></w:r></w:p>"),
    "links in links of Word": _word(_field("HYPERLINK a") + _RUN, "<w:p>", "</w:p>", _FIELD_END),
    "fields in fields": _word(_field("PAGE") + _RUN, "<w:p>", "</w:p>", _FIELD_END),
    "fields side by side": _word(_RUN + _field("PAGE") + _RUN + _FIELD_END, "<w:p>", "</w:p>"),
    "fields that do not end": _word(_RUN + _field("HYPERLINK a"), "<w:p>", "</w:p>"),
    "simple links in simple links": _word(
        f"<w:fldSimple w:instr='HYPERLINK a'>{_RUN}", "<w:p>", "</w:p>", "</w:fldSimple>"
    ),
    "boxes in boxes": _word(
        f"<w:r><w:pict><w:txbxContent><w:p>{_RUN}",
        "<w:p>",
        "</w:p>",
        "</w:p></w:txbxContent></w:pict></w:r>",
    ),
    "controls in controls": _word(
        f"<w:sdt><w:sdtContent>{_RUN}", "<w:p>", "</w:p>", "</w:sdtContent></w:sdt>"
    ),
    "readings in readings": _word(
        "<w:r><w:ruby><w:rt/><w:rubyBase>",
        "<w:p>",
        f"</w:p><w:p>{_RUN}</w:p>",
        "</w:rubyBase></w:ruby></w:r>",
    ),
    "symbols within a sentence": _word(f"{_RUN}<w:r><w:sym/></w:r>", "<w:p>", "</w:p>"),
    "deletions within a sentence": _word(f"{_RUN}<w:del>{_RUN}</w:del>", "<w:p>", "</w:p>"),
    "bookmarks without words": _word(f"<w:bookmarkStart/>{_RUN}", "<w:p>", "</w:p>", "<w:bookmarkEnd/>"),
    "boxes within a sentence": _word(
        f"{_RUN}<w:r><w:pict><w:txbxContent><w:p>{_RUN}</w:p></w:txbxContent></w:pict></w:r>",
        "<w:p>",
        "</w:p>",
    ),
    "pictures with descriptions in pictures": _word(
        f"<w:r><w:drawing><p:docPr xmlns:p='{_PICTURES}' descr='x'/>",
        f"<w:p>{_RUN}",
        "</w:p>",
        "</w:drawing></w:r>",
    ),
    "runs in elements without a text": _word(
        "<w:hyperlink><w:commentReference/>", f"<w:p>{_RUN}", "</w:p>", "</w:hyperlink>"
    ),
    "pictures in pictures": _word("<w:r><w:pict>", f"<w:p>{_RUN}", "</w:p>", "</w:pict></w:r>"),
    "a list of many texts": _repeated(".json", '"a",', "[", '"a"]'),
    "lists in lists": _nested(".json", "[", "]", inside='"x"'),
    "a string of escapes": _repeated(".json", r"\\", '["a', '"]'),
    "a string of many lines": _repeated(".json", r"a\n", '["', '"]'),
    "half a string": Attack(".json", lambda size: b'["' + b"a" * size, is_refused=True),
    "choices within strings": _repeated(".json", "{a, ", '["', '"]'),
    "lines that go on": _repeated(".properties", "a\\\n", "a="),
    "keys without values": _repeated(".properties", "a\\ "),
    "comments that do not end": _repeated(".strings", "/* x"),
    "names without values": _repeated(".strings", '"a"'),
    "aliases of aliases": Attack(
        ".yaml",
        lambda size: "".join(
            f"a{number}: &a{number} [x{f', *a{number - 1}' * 9 * (number > 0)}]\n"
            for number in range(size // 70)
        ).encode(),
    ),
    "many anchors": Attack(
        ".yaml", lambda size: "".join(f"a{number}: &a{number} x\n" for number in range(size // 15)).encode()
    ),
    "a list in brackets": _repeated(".yaml", "a, ", "[", "b]"),
    "brackets in brackets": Attack(".yaml", lambda size: b"[" * size + b"]" * size, is_refused=True),
    "a block of many lines": _repeated(".yaml", " a\n\n", "a: >\n"),
    "a literal of many lines": _repeated(".yaml", " a\n", "a: |\n"),
    "spaces in quotes": _repeated(".yaml", " \n", "a: 'x", "y'"),
    "questions": _repeated(".yaml", "? a\n"),
    "elements of XLIFF in elements": _nested(
        ".xliff", "<g>x ", "</g>", _UNIT, "</source></trans-unit></xliff>"
    ),
    "groups in groups": _nested(".xliff", "<group>", "</group>", "<xliff>", "</xliff>", inside=""),
    "a unit of many elements": _repeated(".xliff", "x <g>y</g> ", _UNIT, "</source></trans-unit></xliff>"),
    "spaces before a state": _repeated(".xliff", " ", _UNIT + "x</source><target", "/></trans-unit></xliff>"),
    "a text of XLIFF in CDATA": _repeated(".xliff", "<![CDATA[x]]>", _UNIT, "</source></trans-unit></xliff>"),
    "a source for many forms": Attack(
        ".ts",
        lambda size: (
            f"<TS><message><source>{'x ' * (size // 4)}</source><translation>"
            f"{'<numerusform/>' * (size // 28)}</translation></message></TS>"
        ).encode(),
        is_refused=True,
    ),
    "units of a memory": _repeated(
        ".tmx", "<tu><tuv lang='en'><seg>x</seg></tuv></tu>", _MEMORY, "</body></tmx>"
    ),
    "numbers of notes of a string": _repeated(
        ".xml", "xyz<sup>1</sup> ", "<resources><string>", "</string></resources>"
    ),
    "strings in strings": _nested(".xml", "<string>x", "</string>", "<resources>", "</resources>"),
    "backslashes of a string": _repeated(".xml", "\\", "<resources><string>x", "</string></resources>"),
    "breaks of a string": _repeated(".xml", r"\nx", "<resources><string>", "</string></resources>"),
    "values in values": _nested(".resx", "<data><value>", "</value></data>", "<root>", "</root>"),
    **{
        f"entities of a billion in {suffix}": Attack(
            suffix, lambda _, root=root: f"{_ENTITIES}<{root}>&e;</{root}>".encode(), is_refused=True
        )
        for suffix, root in {
            ".xliff": "xliff",
            ".ts": "TS",
            ".tmx": "tmx",
            ".xml": "resources",
            ".resx": "root",
            ".stringsdict": "plist",
        }.items()
    },
    "codes that do not end": _repeated(".ass", "{", f"{_EVENT}x"),
    "styles that do not end": _repeated(".ass", "{\\i1}x", _EVENT),
    "styles that end": _repeated(".ass", "{\\i1}x{\\i0} ", _EVENT),
    "breaks of an event": _repeated(".ass", "x \\N", _EVENT),
    "speakers of an event": _repeated(".ass", "- x\\N", _EVENT, "- x"),
    "brackets of Markdown": _repeated(".md", "["),
    "pictures that do not end": _repeated(".md", "!["),
    "links in links": _repeated(".md", "[a]("),
    "quotations in quotations": _repeated(".md", "> "),
    "emphasis of two kinds": _repeated(".md", "*_"),
    "emphases in emphases": _nested(".md", "*x ", " x*", "x "),
    "emphases over line breaks": _repeated(".md", "**x<br>*y<br>z*** ", "x "),
    "footnotes in footnotes of Markdown": _repeated(".md", "^[x ", "x "),
    "numbers of notes of Markdown": _repeated(".md", "xyz[1](#n)<sup>2</sup> ", "x "),
    "pictures of links": _repeated(".md", "[![a](b) ", "x "),
    "definitions in definitions": _repeated(".md", ": ", "x\n"),
    "footnotes of Markdown": _repeated(".md", "x.[^1] **y**[^2] ", "x "),
    "readings that do not end in Markdown": _repeated(".md", "<ruby>x<rt>", "x "),
    "code that does not end": _repeated(".md", "`a``b```"),
    "cells of a table": _repeated(".md", "|"),
    "half a front matter": _repeated(".md", "---\na\n"),
    "text that is struck out": _repeated(".md", "~~a~"),
    "rows of a table": _repeated(".md", "|c|d|\n", "|a|b|\n|-|-|\n"),
    "lists in lists of Markdown": Attack(
        ".md", lambda size: "".join("  " * level + "- a\n" for level in range(int(size**0.5))).encode()
    ),
    "half a title": _repeated(".md", '[a](b "'),
    "titles of links": _repeated(".md", '[a](b "c") '),
    "titles of references": Attack(
        ".md", lambda size: "".join(f'[{number}]: b "c"\n' for number in range(size // 13)).encode()
    ),
    "quotes in a title": _repeated(".md", ' "', "[a]: b '", "'"),
    "half a formula": _repeated(".md", "$a ", "x "),
    "half a shortcode": _repeated(".md", "{{< x ", "x "),
    "tags of HTML in tags in Markdown": _nested(".md", "<kbd>x", "</kbd>", "x "),
    "tags of HTML that do not end in Markdown": _repeated(".md", "<b>x </i>", "x "),
    "lines that are half code": _repeated(".md", "x\n{{ a }} b\n::: c\n"),
    "a path in a catalogue": _repeated(".json", "a/", '["', 'é"]'),
    "tags of a string that do not end": _repeated(".json", "x <b>x</i><wbr>", '["', '"]'),
    "tags of a string that cross": _repeated(".json", "<b><i>x</b>", '["', '"]'),
    "references and tags of a string": _repeated(".json", "&lt;b <c>&amp;", '["', '"]'),
    "properties of CSS": _repeated(".json", "color: x;", '["', '}"]'),
    "half a placeholder in a catalogue": _repeated(".json", "%({a, date", '["', '"]'),
    "runs of a slide": Attack(
        ".pptx", lambda size: _slides(f"<a:p>{'<a:r><a:t>x </a:t></a:r>' * (size // 24)}</a:p>")
    ),
    "paragraphs in paragraphs of a slide": Attack(
        ".pptx", lambda size: _slides("<a:p>" * (size // 11) + "</a:p>" * (size // 11))
    ),
    "a slide of entities": Attack(
        ".pptx", lambda _: _slides("<a:p><a:r><a:t>&e;</a:t></a:r></a:p>", _ENTITIES), is_refused=True
    ),
    "a slide bomb": Attack(".pptx", lambda size: _slides("<a:p></a:p>" * (100 * size)), is_refused=True),
    "a picture bomb": Attack(
        ".pptx", lambda size: _slides("", others={"a.png": bytes(2000 * size)}), is_refused=True
    ),
    "strings of a table": Attack(".xlsx", lambda size: _tables("<si><t>x</t></si>" * (size // 17))),
    "runs of a string": Attack(
        ".xlsx", lambda size: _tables(f"<si>{'<r><t>x </t></r>' * (size // 16)}</si>")
    ),
    "lines of runs of a string": Attack(
        ".xlsx",
        lambda size: _tables(
            f"<si><r><rPr><b/></rPr><t>{'x&#10;' * (size // 6)}</t></r><r><t>x</t></r></si>"
        ),
    ),
    "lines of a run of many properties": Attack(
        ".xlsx",
        lambda size: _tables(
            f"<si><r><rPr>{'<b/>' * (size // 8)}</rPr><t>{'x&#10;' * (size // 12)}</t></r><r><t>x</t></r>"
            "</si>"
        ),
    ),
    "columns that are listed often": Attack(".xlsx", lambda size: _tables("<si><t>x</t></si>", size // 80)),
    "a string bomb": Attack(
        ".xlsx", lambda size: _tables("<si><t>x</t></si>" * (60 * size)), is_refused=True
    ),
    "packages that are listed often": Attack(
        ".epub", lambda size: _book("<x/>" * (size // 8), num_packages=size // 60)
    ),
    "a page of many elements": Attack(".epub", lambda size: _book("", "x <b>y</b> " * (size // 11))),
    "elements of a page in elements": Attack(
        ".epub", lambda size: _book("", "<i>x" * (size // 8) + "</i>" * (size // 8))
    ),
    "pictures within a sentence of a page": Attack(
        ".epub", lambda size: _book("", "x <img/> " * (size // 9))
    ),
    "notes of a book": Attack(
        ".epub", lambda size: _book("", "x.<sup><a href='#n'>[1]</a></sup> " * (size // 32))
    ),
    "elements without letters in elements": Attack(
        ".epub", lambda size: _book("", "<a href='#n'>1" * (size // 18) + "</a>" * (size // 18))
    ),
    "readings of a book": Attack(".epub", lambda size: _book("", "<ruby>x <rt>y</rt></ruby>" * (size // 26))),
    "pictures and code within a sentence": Attack(
        ".epub", lambda size: _book("", "x <code>1</code> <img/> " * (size // 24))
    ),
    "elements in other languages in elements": Attack(
        ".epub", lambda size: _book("", "x " + "<i lang='fr'>x" * (size // 18) + "</i>" * (size // 18))
    ),
    "a page bomb": Attack(".epub", lambda size: _book("", "<p>x</p>" * (120 * size)), is_refused=True),
    "spans of OpenDocument": Attack(
        ".odt", lambda size: _open_text(f"<text:p>{'<text:span>x </text:span>' * (size // 25)}</text:p>")
    ),
    "spans in spans": Attack(
        ".odp",
        lambda size: _open_text(
            f"<text:p>{'<text:span>x ' * (size // 25)}{'</text:span>' * (size // 25)}</text:p>"
        ),
    ),
    "cells of OpenDocument in cells": Attack(
        ".ods",
        lambda size: _open_text("<text:c><text:p>x" * (size // 36) + "</text:p></text:c>" * (size // 36)),
    ),
    "notes in notes of OpenDocument": _open("<text:note><text:p>x", "</text:p></text:note>"),
    "notes within a sentence": _open("x <text:note><text:p>x</text:p></text:note>"),
    "spaces within a sentence": _open("x<text:s text:c='9999'/>"),
    "readings in readings of OpenDocument": _open("<text:ruby>x", "</text:ruby>"),
    "entities of OpenDocument": Attack(
        ".odt", lambda _: _open_text("<text:p>&e;</text:p>", _ENTITIES), is_refused=True
    ),
    "a bomb of OpenDocument": Attack(
        ".odt", lambda size: _open_text("<text:p/>" * (100 * size)), is_refused=True
    ),
    "a media bomb": Attack(
        ".docx",
        lambda size: word_file("<w:p/>", others=[("word/media/a.png", bytes(2000 * size))]),
        is_refused=True,
    ),
    "a text bomb": Attack(".docx", lambda size: word_file("<w:p/>" * (100 * size)), is_refused=True),
    "a part of a false size": Attack(".docx", _false_size, is_refused=True),
    "entities of a billion": Attack(
        ".docx",
        lambda _: word_file("<w:p><w:r><w:t>&e;</w:t></w:r></w:p>", before=_ENTITIES),
        is_refused=True,
    ),
    "a compressed bomb": Attack(".srt.gz", lambda size: gzip.compress(bytes(1000 * size)), is_refused=True),
}
