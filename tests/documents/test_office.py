"""Slides, tables, books and OpenDocument files: texts change, and other libraries read the rest as before."""

import io
import re
import warnings
import zipfile
from pathlib import Path

import ebooklib
import odf.dc
import odf.opendocument
import odf.table
import odf.text
import openpyxl
import openpyxl.comments
import openpyxl.worksheet.table
import pptx
import pytest
from ebooklib import epub
from hypothesis import given
from hypothesis import strategies as st
from openpyxl.cell.rich_text import CellRichText, TextBlock
from openpyxl.cell.text import InlineFont
from openpyxl.chart import BarChart, Reference
from PIL import Image
from pptx.chart.data import CategoryChartData
from pptx.enum.chart import XL_CHART_TYPE

from seq2seq_serve.documents.kinds import FILES
from seq2seq_serve.documents.segments import WrongFile
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateResponse
from tests.documents.answers import aligned, backwards, capitals, translated
from tests.documents.attacks import archive_of, word_file
from tests.documents.large import document_of, large


def saved(write) -> bytes:
    stream = io.BytesIO()
    write(stream)
    return stream.getvalue()


def slides() -> bytes:
    presentation = pptx.Presentation()
    slide = presentation.slides.add_slide(presentation.slide_layouts[1])
    slide.shapes.title.text = "The title"
    paragraph = slide.placeholders[1].text_frame.paragraphs[0]
    paragraph.add_run().text = "Go "
    run = paragraph.add_run()
    run.text = "to sleep"
    run.font.bold = True
    table = slide.shapes.add_table(1, 2, 0, 0, 100, 100).table
    table.cell(0, 0).text = "in a cell"
    data = CategoryChartData()
    data.categories = ["East"]
    data.add_series("sales", [1.5])
    chart = slide.shapes.add_chart(XL_CHART_TYPE.COLUMN_CLUSTERED, 0, 0, 100, 100, data).chart
    chart.has_title = True
    chart.chart_title.text_frame.text = "a chart"
    slide.notes_slide.notes_text_frame.text = "a note"
    return saved(presentation.save)


def tables() -> bytes:
    book = openpyxl.Workbook()
    sheet = book.active
    sheet.append(["Name", "sum"])
    sheet.append(["a cell", 1.5])
    sheet.append(["another & one", '=IF(B2>1,"yes","no")'])
    sheet["C2"] = " spaced "
    sheet["C2"].comment = openpyxl.comments.Comment("a comment", "me")
    sheet.add_table(openpyxl.worksheet.table.Table(displayName="T", ref="A1:B3"))
    chart = BarChart()
    chart.title = "a chart"
    chart.add_data(Reference(sheet, min_col=2, min_row=2))
    sheet.add_chart(chart, "E2")
    return saved(book.save)


def book(*others: tuple[str, str]) -> bytes:
    written = epub.EpubBook()
    written.set_title("The book")
    written.set_language("en")
    page = epub.EpubHtml(title="One", file_name="pages/one.xhtml")
    page.content = '<h1>First</h1><p id="x"><a id="y"/>Go <b>now</b>.<br/>Later.</p><pre>code</pre>'
    written.add_item(page)
    written.add_item(epub.EpubItem(file_name="style.css", media_type="text/css", content=b"p {color: red}"))
    written.toc = (epub.Link("pages/one.xhtml", "Chapter one", "one"),)
    written.spine = ["nav", page]
    written.add_item(epub.EpubNcx())
    written.add_item(epub.EpubNav())
    stream = io.BytesIO()
    epub.write_epub(stream, written)
    with zipfile.ZipFile(stream, "a") as archive:
        for name, content in others:
            archive.writestr(name, content)
    return stream.getvalue()


def open_text() -> bytes:
    document = odf.opendocument.OpenDocumentText()
    document.text.addElement(odf.text.H(outlinelevel=1, text="The title"))
    paragraph = odf.text.P(text="Go ")
    paragraph.addElement(odf.text.Span(text="to sleep"))
    document.text.addElement(paragraph)
    return saved(document.write)


def open_table() -> bytes:
    document = odf.opendocument.OpenDocumentSpreadsheet()
    table, row = odf.table.Table(name="sheet"), odf.table.TableRow()
    for attributes, text in (
        ({"valuetype": "string"}, "a cell"),
        ({"valuetype": "date", "datevalue": "2001-01-01"}, "1 January"),
        ({"valuetype": "string", "formula": 'of:=IF(1;"yes")'}, "yes"),
    ):
        cell = odf.table.TableCell(**attributes)
        cell.addElement(odf.text.P(text=text))
        row.addElement(cell)
    table.addElement(row)
    document.spreadsheet.addElement(table)
    return saved(document.write)


FILES_OF_OFFICES = {
    "a.pptx": slides,
    "a.xlsx": tables,
    "a.epub": book,
    "a.odt": open_text,
    "a.ods": open_table,
}


def parts(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.parametrize("name", FILES_OF_OFFICES)
def test_a_file_without_translations_has_the_same_parts(name):
    content = FILES_OF_OFFICES[name]()
    document = FILES[Path(name).suffix](content, Path(name))
    assert document.segments
    written = document.content()
    assert list(parts(written).items()) == list(parts(content).items())


def test_slides_keep_runs_tables_charts_and_notes():
    texts, written = translated("a.pptx", slides(), capitals)
    assert sorted(texts) == ["Go to sleep", "The title", "a chart", "a note", "in a cell"]
    presentation = pptx.Presentation(io.BytesIO(written))
    title, body, table, chart = presentation.slides[0].shapes
    assert (title.text, body.text_frame.text) == ("THE TITLE", "GO TO SLEEP")
    assert [run.text for run in body.text_frame.paragraphs[0].runs if run.font.bold] == ["TO SLEEP"]
    assert table.table.cell(0, 0).text == "IN A CELL"
    assert chart.chart.chart_title.text_frame.text == "A CHART"
    assert [*chart.chart.plots[0].categories] == ["East"]
    assert presentation.slides[0].notes_slide.notes_text_frame.text == "A NOTE"
    turned = pptx.Presentation(io.BytesIO(translated("a.pptx", slides(), backwards)[1]))
    runs = turned.slides[0].shapes[1].text_frame.paragraphs[0].runs
    assert [run.text.strip() for run in runs if run.font.bold] == ["SLEEP TO"]


def test_tables_keep_formulas_numbers_charts_and_names_of_columns():
    texts, written = translated("a.xlsx", tables(), capitals)
    assert sorted(texts) == ["a cell", "a chart", "a comment", "another & one", "spaced"]
    sheet = openpyxl.load_workbook(io.BytesIO(written)).active
    assert [[cell.value for cell in row] for row in sheet.iter_rows()] == [
        ["Name", "sum", None],
        ["A CELL", 1.5, " SPACED "],
        ["ANOTHER & ONE", '=IF(B2>1,"yes","no")', None],
    ]
    assert sheet["C2"].comment.text == "A COMMENT"
    assert [*sheet.tables["T"].column_names] == ["Name", "sum"]
    assert len(sheet._charts) == 1


def test_tables_keep_the_line_breaks_of_cells():
    book = openpyxl.Workbook()
    bold = TextBlock(InlineFont(b=True), "bold\nwords here")
    rows = [["A\nname"], ["two words\n\nand more "], ["name"], [CellRichText("see ", bold, " end")]]
    for row in rows:
        book.active.append(row)
    book.active.add_table(openpyxl.worksheet.table.Table(displayName="T", ref="A1:A4"))
    _, written = translated("a.xlsx", saved(book.save), backwards)
    sheet = openpyxl.load_workbook(io.BytesIO(written), rich_text=True).active
    values = [sheet.cell(row, 1).value for row in range(1, 5)]
    assert [str(value) for value in values] == [
        "A\nname",
        "WORDS TWO\n\nMORE AND ",
        "name",
        "BOLD SEE\nEND HERE WORDS",
    ]
    assert [part.text.strip() for part in values[3] if isinstance(part, TextBlock)] == [
        "BOLD",
        "",
        "HERE WORDS",
    ]


BOLD_RUN, PLAIN_RUN = (
    '<r><rPr><b/></rPr><t xml:space="preserve">{}</t></r>',
    '<r><t xml:space="preserve">{}</t></r>',
)


@pytest.mark.parametrize(
    ("string", "texts", "expected"),
    [
        (
            ["see ", "*bold\nwords here", " end"],
            ["see bold", "words here end"],
            ["*BOLD", " SEE", "*\n", "END ", "*HERE WORDS"],
        ),
        (["12\n", "*a &amp; b\r\n"], ["a & b"], ["12", "\n", "*B &amp; A", "*\r\n"]),
        (["12\n", "*13"], [], ["12\n", "*13"]),
        (["*one two\nthree"], ["one two", "three"], ["*TWO ONE\nTHREE"]),
    ],
)
def test_strings_in_several_formattings_are_translated_by_line(string, texts, expected):
    """Each run ended a text."""

    def written(runs: list[str]) -> str:
        return "".join(
            (BOLD_RUN if run[0] == "*" else PLAIN_RUN).format(run.removeprefix("*")) for run in runs
        )

    content = document_of(".xlsx", f"<si>{written(string)}</si>")
    assert parts(FILES[".xlsx"](content, Path("a.xlsx")).content()) == parts(content)
    found, changed = translated("a.xlsx", content, backwards)
    assert found == texts
    assert f"<si>{written(expected)}</si>" in parts(changed)["xl/sharedStrings.xml"].decode()


def replaced(content: bytes, name: str, before: str, after: str) -> bytes:
    """A file with another text in one of its parts."""
    found = parts(content)
    assert before in found[name].decode()
    return archive_of({**found, name: found[name].decode().replace(before, after)})


@st.composite
def runs(draw):
    """Runs in some formattings, a target of their words, and its alignment."""
    words = [f"w{number}" for number in range(draw(st.integers(1, 6)))]
    blank = draw(st.sampled_from(["", "\n "]))  # between the elements
    written, shown = "", ""
    for word in words:
        text = draw(st.sampled_from([f"{word} ", f"{word} ", f" {word}. ", f"{word} > "]))
        properties = draw(st.sampled_from(["", "", '<rPr b="1"><b/></rPr>', "<rPr><i/></rPr>"]))
        written += f"<r>{blank}{properties}{blank}<t>{text}</t>{blank}</r>{blank}"
        written += draw(st.sampled_from(["", "", "", f"<r>{properties}<t></t></r>"]))
        shown += text
    targets = draw(st.lists(st.sampled_from([*words, "v", "(v", "v.", "&"]), min_size=1, max_size=9))
    places = st.integers(0, len(shown.split()) - 1)
    links = draw(st.lists(places, min_size=len(targets), max_size=len(targets)))
    return written, " ".join(targets), " ".join(map(str, links)) if draw(st.booleans()) else ""


_SLIDES, _TABLES = slides(), tables()
_SLIDE, _SHEET = "ppt/slides/slide1.xml", "xl/worksheets/sheet1.xml"


@given(runs())
def test_each_run_has_one_text_and_other_libraries_read_the_target(case):
    """Runs with the same formatting became one with two texts, of which other programs lose one."""
    written, target, links = case

    def answer(text: str) -> GenerateResponse:
        return aligned(target, links)(text) if "w0" in text else capitals(text)

    drawn = re.sub("<(/?)", r"<\1a:", written.replace("<b/>", "").replace("<i/>", "<ln/>"))
    body = '<a:r><a:t>Go </a:t></a:r><a:r><a:rPr b="1"/><a:t>to sleep</a:t></a:r>'
    _, changed = translated("a.pptx", replaced(_SLIDES, _SLIDE, body, drawn), answer)
    check_runs(parts(changed)[_SLIDE].decode(), "a:")
    paragraph = pptx.Presentation(io.BytesIO(changed)).slides[0].shapes[1].text_frame.paragraphs[0]
    assert "".join(run.text for run in paragraph.runs).split() == target.split()
    _, changed = translated("a.xlsx", replaced(_TABLES, _SHEET, "<t>a cell</t>", written), answer)
    check_runs(parts(changed)[_SHEET].decode(), "")
    sheet = openpyxl.load_workbook(io.BytesIO(changed)).active
    assert sheet["A2"].value.split() == target.split()


FIELD = '<a:fld type="slidenum"><a:rPr/><a:t>3</a:t></a:fld>'
FORMULA_OF_SLIDE = (
    '<mc:AlternateContent xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006"><mc:Choice>'
    '<m:oMath xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"><m:t>x=1</m:t></m:oMath>'
    "</mc:Choice><mc:Fallback><a:r><a:t> </a:t></a:r></mc:Fallback></mc:AlternateContent>"
)


@pytest.mark.parametrize(("element", "shown"), [(FIELD, "3"), (FORMULA_OF_SLIDE, "x=1")])
def test_fields_and_formulas_stay_within_the_sentence_of_a_slide(element, shown):
    first = "<a:r><a:t>Go </a:t></a:r>"
    content = replaced(
        _SLIDES, _SLIDE, first, f"<a:r><a:t>On </a:t></a:r>{element}<a:r><a:t> go </a:t></a:r>"
    )
    texts, written = translated("a.pptx", content, backwards)
    assert f"On {shown} go to sleep" in texts
    body = f'<a:p><a:r><a:rPr b="1"/><a:t>SLEEP TO</a:t></a:r><a:r><a:t> GO </a:t></a:r>{element}'
    assert f"{body}<a:r><a:t> ON</a:t></a:r></a:p>" in parts(written)[_SLIDE].decode()


def check_runs(markup: str, prefix: str) -> None:
    """Checks that each run has one text, and no text is outside of runs."""
    run = f"<{prefix}r>(.*?)</{prefix}r>"
    for inside in re.findall(run, markup, re.DOTALL):
        assert inside.count(f"<{prefix}t") == inside.count(f"</{prefix}t>") == 1
    for outside in re.findall(f"</{prefix}r>([^<]*)<{prefix}r>", markup):
        assert not outside.strip()


def test_a_sheet_may_have_the_strings_of_its_cells():
    workbook = openpyxl.Workbook(write_only=True)
    workbook.create_sheet().append(["word"])
    content = saved(workbook.save)
    sheet = parts(content)["xl/worksheets/sheet1.xml"].replace(
        b' t="s"><v>0</v>', b' t="inlineStr"><is><t>word</t></is>'
    )
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, part in parts(content).items():
            archive.writestr(name, sheet if name == "xl/worksheets/sheet1.xml" else part)
    _, written = translated("a.xlsx", stream.getvalue(), capitals)
    assert openpyxl.load_workbook(io.BytesIO(written)).active["A1"].value == "WORD"


def test_a_reading_stays_with_the_words_of_the_source():
    string = '<si><t>one two</t><rPh sb="0" eb="1"><t>a reading</t></rPh><phoneticPr fontId="1"/></si>'
    content = archive_of(
        {
            "[Content_Types].xml": '<T><Override PartName="/s" ContentType="a.sharedStrings+xml"/></T>',
            "xl/workbook.xml": "<w/>",
            "s": f'<sst xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main">{string}</sst>',
        }
    )
    assert string in parts(FILES[".xlsx"](content, Path("a.xlsx")).content())["s"].decode()
    texts, written = translated("a.xlsx", content, backwards)
    assert texts == ["one two"]
    assert "<si><t" in parts(written)["s"].decode()
    assert re.sub(' xml:space="preserve"', "", parts(written)["s"].decode()).endswith(
        '<si><t>TWO ONE</t><phoneticPr fontId="1"/></si></sst>'
    )


@pytest.mark.parametrize(("title", "is_text"), [("My trip", True), ("PowerPoint Presentation", False)])
def test_the_title_of_a_file_and_descriptions_of_pictures_are_texts(title, is_text):
    presentation, picture = pptx.Presentation(), io.BytesIO()
    Image.new("RGB", (2, 2)).save(picture, "png")
    presentation.core_properties.title = title
    slide = presentation.slides.add_slide(presentation.slide_layouts[6])
    for description in ("a <cat>", "cat.png"):
        shape = slide.shapes.add_picture(picture, 0, 0)
        shape._element.nvPicPr.cNvPr.set("descr", description)
        shape._element.nvPicPr.cNvPr.attrib["name"] = "x descr='it'"  # another attribute, before it
    texts, written = translated("a.pptx", saved(presentation.save), capitals)
    assert sorted(texts) == ["My trip"] * is_text + ["a <cat>"]
    read = pptx.Presentation(io.BytesIO(written))
    assert read.core_properties.title == (title.upper() if is_text else title)
    shapes = read.slides[0].shapes
    assert [each._element.nvPicPr.cNvPr.get("descr") for each in shapes] == ["A <CAT>", "cat.png"]


def test_the_title_of_open_document_is_a_text():
    document = odf.opendocument.OpenDocumentText()
    document.meta.addElement(odf.dc.Title(text="My trip"))
    texts, written = translated("a.odt", saved(document.write), backwards)
    assert texts == ["My trip"]
    assert "TRIP MY" in str(odf.opendocument.load(io.BytesIO(written)).meta)


def test_books_keep_pages_styles_and_code():
    texts, written = translated("a.epub", book(), capitals)
    assert sorted({*texts}) == ["Chapter one", "First", "Go now.", "Later.", "One", "The book"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a future default of the library
        read = epub.read_epub(io.BytesIO(written))
    assert read.title == "THE BOOK"
    assert [link.title.strip() for link in read.toc] == ["CHAPTER ONE"]
    [page] = [item for item in read.get_items_of_type(ebooklib.ITEM_DOCUMENT) if "one" in item.file_name]
    assert b'<p id="x"><a id="y"/>GO <b>NOW</b>.<br/>LATER.</p><pre>code</pre>' in b"".join(
        map(bytes.strip, page.content.splitlines())
    )
    assert zipfile.ZipFile(io.BytesIO(written)).infolist()[0].filename == "mimetype"


def test_entities_that_books_have_from_html_are_texts():
    page = '<!DOCTYPE html PUBLIC "-//W3C//DTD XHTML 1.1//EN" "xhtml11.dtd">'
    page += '<html xmlns="http://www.w3.org/1999/xhtml"><body><p>The caf&eacute;{}</p></body></html>'
    item = '<item href="a.xhtml" media-type="application/xhtml+xml"/>'
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("META-INF/container.xml", '<c><rootfile full-path="a.opf"/></c>')
        archive.writestr("a.opf", f"<p>{item}</p>")
        archive.writestr("a.xhtml", page.format("&nbsp;is&mdash;&own;"))
    texts, written = translated("a.epub", stream.getvalue(), capitals)
    assert texts == ["The café is—"]
    assert parts(written)["a.xhtml"].decode().endswith("<p>THE CAFÉ IS—&own;</p></body></html>")


def test_open_document_keeps_spans_and_values():
    texts, written = translated("a.odt", open_text(), capitals)
    assert texts == ["The title", "Go to sleep"]
    text = odf.opendocument.load(io.BytesIO(written)).text
    assert [str(child) for child in text.childNodes] == ["THE TITLE", "GO TO SLEEP"]
    assert str(text.getElementsByType(odf.text.Span)[0]) == "TO SLEEP"
    texts, written = translated("a.ods", open_table(), capitals)
    assert texts == ["a cell"]
    sheet = odf.opendocument.load(io.BytesIO(written)).spreadsheet
    assert [str(cell) for cell in sheet.getElementsByType(odf.table.TableCell)] == [
        "A CELL",
        "1 January",
        "yes",
    ]


ODT = {
    "office": "urn:oasis:names:tc:opendocument:xmlns:office:1.0",
    "text": "urn:oasis:names:tc:opendocument:xmlns:text:1.0",
    "draw": "urn:oasis:names:tc:opendocument:xmlns:drawing:1.0",
    "dc": "http://purl.org/dc/elements/1.1/",
    "field": "urn:openoffice:names:experimental:ooo-ms-interop:xmlns:field:1.0",
}


def open_paragraph(paragraph: str) -> bytes:
    names = " ".join(f'xmlns:{prefix}="{name}"' for prefix, name in ODT.items())
    return archive_of({"content.xml": f"<o {names}><text:p>{paragraph}</text:p></o>"})


def paragraph_of(content: bytes) -> str:
    return re.search("<o [^>]*><text:p>(.*)</text:p></o>", parts(content)["content.xml"].decode())[1]


NOTE_OF_OPEN = (
    "<text:note><text:note-citation>a</text:note-citation><text:note-body><text:p>{}</text:p>"
    "</text:note-body></text:note>"
)
REMARK = "<office:annotation><dc:creator>Mina</dc:creator><text:p>{}</text:p></office:annotation>"
FRAME = "<draw:frame><draw:image/></draw:frame>"
NUMBER = "<text:page-number>3</text:page-number>"
START, END = '<text:bookmark-start text:name="b"/>', '<text:bookmark-end text:name="b"/>'
CITATION = (
    '<text:reference-mark-start text:name="ZOTERO_ITEM CSL a"/>(Kim-<text:span>2020</text:span>)'
    '<text:reference-mark-end text:name="ZOTERO_ITEM CSL a"/>'
)
CITATION_OF_WORD = (
    '<field:fieldmark-start field:type="vnd.oasis.opendocument.field.UNHANDLED"><field:param/>'
    "</field:fieldmark-start>(Kim-2020)<field:fieldmark-end/>"
)


@pytest.mark.parametrize(
    ("paragraph", "texts", "expected"),
    [
        (
            f"one {NOTE_OF_OPEN.format('in it')}two",
            ["in it", "one two"],
            f"TWO ONE {NOTE_OF_OPEN.format('IT IN')}",
        ),
        (
            f"one{NOTE_OF_OPEN.format('it')} two",
            ["it", "one two"],
            f"TWO ONE{NOTE_OF_OPEN.format('IT')}",
        ),
        (f"one{REMARK.format('a b')} two", ["a b", "one two"], f"TWO ONE{REMARK.format('B A')}"),
        (f"one {FRAME} two", ["one two"], f"TWO ONE {FRAME}"),
        (f"one {NUMBER} two", ["one 3 two"], f"TWO {NUMBER} ONE"),
        ("one<text:s/>two", ["one two"], "TWO<text:s/>ONE"),
        ('one<text:s text:c="3"/>two', ["one two"], "TWO ONE"),
        (' <text:s text:c="3"/>one two ', ["one two"], ' <text:s text:c="3"/>TWO ONE '),
        (
            "<text:ruby><text:ruby-base>one</text:ruby-base><text:ruby-text>a</text:ruby-text></text:ruby> b",
            ["one b"],
            "B ONE",
        ),
        (f"one {START}two{END}", ["one two"], f"{START}TWO{END} ONE"),
        (f"one {CITATION} two", ["one (Kim-2020) two"], f"TWO {CITATION} ONE"),
        (f"one {CITATION_OF_WORD} two", ["one (Kim-2020) two"], f"TWO {CITATION_OF_WORD} ONE"),
        (f"{START}{END}one two", ["one two"], f"{START}{END}TWO ONE"),
    ],
)
def test_elements_within_a_sentence_of_open_document_do_not_cut_it(paragraph, texts, expected):
    found, written = translated("a.odt", open_paragraph(paragraph), backwards)
    assert found == texts
    assert paragraph_of(written) == expected


@pytest.mark.parametrize(
    ("links", "expected"),
    [("0 1 2 3", "I agree#. Then"), ("0 1 1 3", "I agree.# Then"), ("0 3 3 3", "I# agree. Then")],
)
def test_notes_stay_right_after_a_word_or_mark(links, expected):
    note, reference = NOTE_OF_OPEN.format("1"), '<w:r><w:footnoteReference w:id="2"/></w:r>'
    answer = aligned("I agree|. Then", links, "Ich zustimme|. Dann")
    _, written = translated("a.odt", open_paragraph(f"Ich zustimme{note}. Dann"), answer)
    assert paragraph_of(written) == expected.replace("#", note)
    runs = "<w:r><w:t>Ich zustimme</w:t></w:r>#<w:r><w:t>. Dann</w:t></w:r>".replace("#", reference)
    _, written = translated("a.docx", word_file(f"<w:p>{runs}</w:p>"), answer)
    shown = parts(written)["word/document.xml"].decode().replace(reference, "#")
    assert re.sub("<[^>]*>", "", shown) == expected


@given(
    st.lists(
        st.sampled_from(
            [
                *("one ", "two", " three ", "<text:span>four </text:span>", "<text:s/>", " ", FRAME, NUMBER),
                *(NOTE_OF_OPEN.format("x"), REMARK.format("y"), START + "w " + END, START + END),
            ]
        ),
        min_size=1,
        max_size=9,
    )
)
def test_marks_of_open_document_stay_once_each_in_any_order(elements):
    content = open_paragraph("".join(elements))
    assert paragraph_of(FILES[".odt"](content, Path("a.odt")).content()) == "".join(elements)
    _, written = translated("a.odt", content, backwards)
    before, after = ("".join(elements), paragraph_of(written))
    for mark in (FRAME, NUMBER, NOTE_OF_OPEN.format("X"), REMARK.format("Y"), START, END):
        assert after.count(mark) == before.replace(">x<", ">X<").replace(">y<", ">Y<").count(mark)


def test_a_cell_with_a_text_has_no_other_value():
    """Programs show the value of a cell rather than its paragraph."""
    document = odf.opendocument.OpenDocumentSpreadsheet()
    table, row = odf.table.Table(name="sheet"), odf.table.TableRow()
    for kind, text in (("string", "a word"), ("float", "1 word"), ("string", "12")):
        cell = odf.table.TableCell(valuetype=kind, stringvalue=text)
        cell.addElement(odf.text.P(text=text))
        row.addElement(cell)
    table.addElement(row)
    document.spreadsheet.addElement(table)
    content = saved(document.write)
    texts, written = translated("a.ods", content, capitals)
    assert texts == ["a word"]
    before = b'<table:table-cell office:value-type="string" office:string-value="a word"><text:p>a word<'
    after = b'<table:table-cell office:value-type="string"><text:p>A WORD<'
    assert parts(written)["content.xml"] == parts(content)["content.xml"].replace(before, after)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("a.pptx", b'lang="en-US"', b'lang="de"'),
        ("a.epub", b"<dc:language>en<", b"<dc:language>de<"),
        ("a.epub", b'lang="en" xml:lang="en"', b'lang="de" xml:lang="de"'),
    ],
)
def test_a_file_says_in_which_language_it_is_now(name, before, after):
    content = FILES_OF_OFFICES[name]()
    if name == "a.pptx":
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as written:
            for part, its in parts(content).items():
                written.writestr(part, its.replace(b"<a:rPr b=", b'<a:rPr lang="en-US" b='))
        content = stream.getvalue()
    document = FILES[Path(name).suffix](content, Path(name))
    assert any(before in part for part in parts(document.content()).values())
    document.target_language = "de"
    changed = parts(document.content())
    assert any(after in part for part in changed.values())
    assert not any(before in part for name, part in changed.items() if "slides/" in name)


def strict(content: bytes) -> dict[str, bytes]:
    """The parts of a file as "Strict Open XML" has them."""
    names = re.compile(rb"http://schemas\.openxmlformats\.org/(\w+)/2006/")
    return {
        name: names.sub(rb"http://purl.oclc.org/ooxml/\1/", part) for name, part in parts(content).items()
    }


@pytest.mark.parametrize("suffix", [".docx", ".pptx", ".xlsx"])
def test_strict_open_xml_has_the_same_texts(suffix):
    """It had none, and stayed as it was."""
    content, _ = large(suffix, 1000)
    texts, written = translated(f"a{suffix}", content, backwards)
    found, changed = translated(f"a{suffix}", archive_of(strict(content)), backwards)
    assert found == texts != []
    assert parts(changed) == strict(written)


def archive(*names: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as written:
        for name in names:
            written.writestr(name, "<x/>")
    return stream.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pptx", b"PK", "the file is not a PowerPoint file (.pptx), or is damaged"),
        ("a.xlsx", archive("word/document.xml"), "the file is not an Excel file (.xlsx)"),
        ("a.odt", archive("a"), "the file is not an OpenDocument file"),
        (
            "a.epub",
            book(("META-INF/encryption.xml", '<x URI="EPUB/pages/one.xhtml"/>')),
            "the file is encrypted",
        ),
        (
            "a.pptx",
            archive("ppt/presentation.xml", "ppt/slides/slide1.xml")[:-30],
            "the file is not a PowerPoint",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(name, content, message):
    with pytest.raises(WrongFile) as caught:
        translated(name, content, capitals)
    assert caught.value.strerror.startswith(message)


PICTURE = '<img src="a.png" alt=""/>'
SPAN = '<span class="math inline"><em>x</em></span>'
FORMULA = '<math xmlns="http://www.w3.org/1998/Math/MathML"><mi>x</mi></math>'


@pytest.mark.parametrize(
    ("content", "texts", "answer", "expected"),
    [
        (f"Das {PICTURE} Bild hier", ["Das Bild hier"], "HIER BILD DAS", f"HIER BILD DAS {PICTURE}"),
        (f"Wenn {FORMULA} gilt", ["Wenn x gilt"], "GILT X WENN", f"GILT {FORMULA} WENN"),
        ("Das <input/> hier", ["Das hier"], "HIER DAS", "HIER DAS <input/>"),
        (f"{PICTURE}Ein Bild", ["Ein Bild"], "BILD EIN", f"{PICTURE}BILD EIN"),
        (f"Eins.{PICTURE}Zwei.", ["Eins.", "Zwei."], "", f"EINS.{PICTURE}ZWEI."),
        (f"Wenn {SPAN} gilt", ["Wenn x gilt"], "GILT X WENN", f"GILT {SPAN} WENN"),
    ],
)
def test_pictures_and_formulas_stay_once_within_the_sentence_of_a_book(content, texts, answer, expected):
    """They cut it into texts."""
    page = f'<html xmlns="http://www.w3.org/1999/xhtml"><body><p>{content}</p></body></html>'
    whole = archive_of(
        {
            "META-INF/container.xml": '<c><rootfile full-path="a.opf"/></c>',
            "a.opf": '<p><item href="a.xhtml" media-type="application/xhtml+xml"/></p>',
            "a.xhtml": page,
        }
    )
    found, written = translated("a.epub", whole, backwards if answer else capitals)
    assert found == texts
    shown = re.search("<p>(.*)</p>", parts(written)["a.xhtml"].decode())[1]
    assert " ".join(shown.split()) == expected


def test_elements_of_a_book_in_another_language_stay():
    page = (
        '<html xmlns="http://www.w3.org/1999/xhtml" lang="fr"><body lang="fr"><p>one <i lang="fr">deux</i> '
        'three</p><p xml:lang="fr">quatre</p><p lang="en-GB">five</p><p lang="">six</p></body></html>'
    )
    document = FILES[".xhtml"](page.encode(), Path("a.xhtml"))
    document.source_language = "en"
    assert [segment.text for segment in document.segments] == ["one deux three", "five", "six"]
    content = book()
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("one.xhtml")]
    document = FILES[".epub"](archive_of({**parts(content), name: page.encode()}), Path("a.epub"))
    document.source_language = "en"
    assert not any("quatre" in segment.text for segment in document.segments)
    assert any("five" in segment.text for segment in document.segments)
