"""Word files: what is beside their texts stays, and what is not a Word file is refused."""

import io
import re
import zipfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import docx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from seq2seq_serve.documents.segments import WrongFile, begin_of
from seq2seq_serve.documents.word import WordDocument
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateResponse
from tests.documents.answers import aligned, backwards, capitals, translated
from tests.documents.attacks import archive_of, word_file


def body(content: bytes) -> str:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        text = archive.read("word/document.xml").decode()
    return re.search("<w:body>(.*)</w:body>", text, re.DOTALL)[1]


@pytest.mark.parametrize(
    ("paragraph", "same", "turned"),
    [
        (
            '<w:p><w:r><w:t xml:space="preserve">a </w:t></w:r><w:r><w:rPr><w:b/></w:rPr>'
            "<w:t>b</w:t></w:r></w:p>",
            '<w:p><w:r><w:t xml:space="preserve">A </w:t></w:r><w:r><w:rPr><w:b/></w:rPr>'
            '<w:t xml:space="preserve">B</w:t></w:r></w:p>',
            '<w:p><w:r><w:rPr><w:b/></w:rPr><w:t xml:space="preserve">B</w:t></w:r><w:r>'
            '<w:t xml:space="preserve"> A</w:t></w:r></w:p>',
        ),
        (
            '<w:p><w:pPr><w:x/></w:pPr><w:bookmarkStart w:id="1"/><w:r><w:t>a &lt; b</w:t></w:r><w:r/></w:p>',
            '<w:p><w:pPr><w:x/></w:pPr><w:bookmarkStart w:id="1"/><w:r>'
            '<w:t xml:space="preserve">A &lt; B</w:t></w:r><w:r/></w:p>',
            '<w:p><w:pPr><w:x/></w:pPr><w:bookmarkStart w:id="1"/><w:r>'
            '<w:t xml:space="preserve">B &lt; A</w:t></w:r><w:r/></w:p>',
        ),
        (
            "<w:p><w:r><w:t>a</w:t><w:tab/><w:t>b</w:t></w:r></w:p>",
            '<w:p><w:r><w:t xml:space="preserve">A</w:t><w:tab/>'
            '<w:t xml:space="preserve">B</w:t></w:r></w:p>',
            '<w:p><w:r><w:t xml:space="preserve">A</w:t><w:tab/>'
            '<w:t xml:space="preserve">B</w:t></w:r></w:p>',
        ),
    ],
)
def test_runs_follow_their_words(paragraph, same, turned):
    content = word_file(paragraph)
    assert body(WordDocument(content, Path("a.docx")).content()) == paragraph
    assert body(translated("a.docx", content, capitals)[1]) == same
    assert body(translated("a.docx", content, backwards)[1]) == turned


def run(text: str, properties: str = "") -> str:
    return f'<w:r>{properties}<w:t xml:space="preserve">{text}</w:t></w:r>'


BOLD, LINK = "<w:rPr><w:b/></w:rPr>", '<w:rPr><w:rStyle w:val="Hyperlink"/></w:rPr>'
RAISED = '<w:rPr><w:vertAlign w:val="superscript"/></w:rPr>'
NOTE = '<w:r><w:rPr><w:vertAlign/></w:rPr><w:footnoteReference w:id="2"/></w:r>'


@pytest.mark.parametrize(
    ("paragraph", "answer", "expected"),
    [
        (  # a link of two runs, in the translation in one piece, over a word of another source word
            run("Wir ")
            + '<w:hyperlink w:anchor="x">'
            + run("suchen ", LINK)
            + run("Leute", LINK)
            + "</w:hyperlink>"
            + run(" dringend."),
            ("We look urgently for people.", "0 1 3 1 2"),
            run("We ")
            + '<w:hyperlink w:anchor="x">'
            + run("look urgently for people", LINK)
            + "</w:hyperlink>"
            + run("."),
        ),
        (  # a word in a formatting of its own splits bold words, but no link
            '<w:hyperlink w:anchor="x">' + run("a b", LINK) + "</w:hyperlink>" + run(" c", BOLD),
            ("A C B", "0 2 1"),
            '<w:hyperlink w:anchor="x">'
            + run("A", LINK)
            + "</w:hyperlink>"
            + run(" C ", BOLD)
            + run("B", LINK),
        ),
        (  # a note within bold words, and one at the end
            run("Ich habe ") + run("das Buch", BOLD) + NOTE + run(" gelesen", BOLD) + run(".") + NOTE,
            ("I read the book.", "0 4 2 3"),
            run("I ") + run("read the book", BOLD) + NOTE + run(".") + NOTE,
        ),
        (  # the begin of a bookmark is before its words, and its end after them
            run("Er sah ") + '<w:bookmarkStart w:id="1"/>' + run("Anna") + '<w:bookmarkEnd w:id="1"/>',
            ("Anna he saw", "2 0 1"),
            '<w:bookmarkStart w:id="1"/>' + run("Anna") + '<w:bookmarkEnd w:id="1"/>' + run(" he saw"),
        ),
        (  # also if the words of the bookmark change places
            f'<w:bookmarkStart w:id="1"/>{run("a ")}{run("b", BOLD)}<w:bookmarkEnd w:id="1"/>{run(" c")}',
            ("B C A", "1 2 0"),
            f'{run("B", BOLD)}{run(" C ")}<w:bookmarkStart w:id="1"/>{run("A")}<w:bookmarkEnd w:id="1"/>',
        ),
        (  # and if there are none
            f'{run("a ")}{run("b", BOLD)}<w:bookmarkStart w:id="1"/><w:bookmarkEnd w:id="1"/>',
            ("B A", "1 0"),
            f'{run("B", BOLD)}{run(" A")}<w:bookmarkStart w:id="1"/><w:bookmarkEnd w:id="1"/>',
        ),
    ],
)
def test_links_stay_in_one_piece_and_notes_and_bookmarks_at_their_words(paragraph, answer, expected):
    content = word_file(f"<w:p>{paragraph}</w:p>")
    written = body(translated("a.docx", content, aligned(*answer))[1])
    written = re.sub('</w:t><w:t xml:space="preserve">', "", written)  # texts of one run
    assert written == f"<w:p>{expected}</w:p>"


COMMENT = '<w:commentReference w:id="0"/>'


@pytest.mark.parametrize(
    ("paragraph", "expected"),
    [
        (run("a.") + f"<w:r>{COMMENT}</w:r>" + run(" b."), run("A.") + f"<w:r>{COMMENT}</w:r>" + run(" B.")),
        (
            f"<w:r><w:t>a.</w:t>{COMMENT}</w:r>" + run(" b."),
            f'<w:r><w:t xml:space="preserve">A.</w:t>{COMMENT}</w:r>' + run(" B."),
        ),
        (
            run("a. ") + f"<w:r>{COMMENT}<w:t>b.</w:t></w:r>",
            f'<w:r><w:t xml:space="preserve">A. </w:t>{COMMENT}</w:r>' + run("B."),
        ),
        (  # an empty bookmark
            f'<w:bookmarkStart w:id="1"/><w:bookmarkEnd w:id="1"/>{run("a b", BOLD)}{run(" c")}',
            f'<w:bookmarkStart w:id="1"/><w:bookmarkEnd w:id="1"/>{run("A B", BOLD)}{run(" C")}',
        ),
        (
            f'{run("a ")}<w:bookmarkStart w:id="1"/><w:bookmarkStart w:id="2"/><w:bookmarkEnd w:id="1"/>'
            f'{run("b")}<w:bookmarkEnd w:id="2"/>',
            f'{run("A ")}<w:bookmarkStart w:id="1"/><w:bookmarkStart w:id="2"/><w:bookmarkEnd w:id="1"/>'
            f'{run("B")}<w:bookmarkEnd w:id="2"/>',
        ),
    ],
)
def test_marks_in_plain_runs_and_empty_bookmarks_stay_where_they_are(paragraph, expected):
    """They went to the end of the next sentence, or around its first word."""
    assert (
        body(translated("a.docx", word_file(f"<w:p>{paragraph}</w:p>"), capitals)[1])
        == f"<w:p>{expected}</w:p>"
    )


def field(instruction: str, *result: str) -> str:
    begin, separate, end = (
        f'<w:r><w:fldChar w:fldCharType="{kind}"/></w:r>' for kind in ("begin", "separate", "end")
    )
    code = f'<w:r><w:instrText xml:space="preserve"> {instruction} </w:instrText></w:r>'
    return begin + code + (separate + "".join(result) if result else "") + end


WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
SIMPLE = '<w:fldSimple w:instr=" REF x ">' + run("Bild 3") + "</w:fldSimple>"
PICTURE = '<w:r><w:drawing><a:x xmlns:a="a"/></w:drawing></w:r>'
PAGE, WEB, ENTRY = field("PAGEREF x", run("12")), 'HYPERLINK "http://a"', field('XE "a"')

NESTED = f"<w:fldSimple w:instr=' REF x '>{run('Bild ')}{PAGE}</w:fldSimple>"


@pytest.mark.parametrize(
    ("paragraph", "text", "answer", "expected"),
    [
        (  # the words around a field are one text, in which its own stay
            run("Siehe Seite ") + PAGE + run(" im Buch."),
            "Siehe Seite 12 im Buch.",
            ("In the book see page 12.", "3 4 4 0 1 2"),
            run("In the book see page ") + PAGE + run("."),
        ),
        (  # two with a space between them
            run("An ") + SIMPLE + run(" ") + PAGE + run(" hier."),
            "An Bild 3 12 hier.",
            ("To Bild 3 12.", "0 1 2 3"),
            run("To ") + SIMPLE + run(" ") + PAGE + run("."),
        ),
        (  # also if the target does not have them
            run("Siehe Seite ") + PAGE + run(" im Buch."),
            "Siehe Seite 12 im Buch.",
            ("In the book see page.", "3 4 4 0 1"),
            run("In the book see page") + run(" ") + PAGE + run("."),
        ),
        (
            run("Siehe ") + SIMPLE + run(" hier."),
            "Siehe Bild 3 hier.",
            ("Here see Bild 3.", "3 0 1 2"),
            run("Here see ") + SIMPLE + run("."),
        ),
        (
            run("Siehe ") + NESTED + run(" hier."),
            "Siehe Bild 12 hier.",
            ("Here see Bild 12.", "3 0 1 2"),
            run("Here see ") + NESTED + run("."),
        ),
        (  # marks beside it are in a run
            run("Siehe ") + SIMPLE + run(" hier."),
            "Siehe Bild 3 hier.",
            ("Here (Bild 3) see.", "3 1 2 0"),
            run("Here ") + run("(") + SIMPLE + run(") see."),
        ),
        (  # the words of a link are translated
            run("Lies ") + field(WEB, run("diese Seite", LINK)) + run(" bitte."),
            "Lies diese Seite bitte.",
            ("Please read this page.", "3 0 1 2"),
            run("Please read ") + field(WEB, run("this page", LINK)) + run("."),
        ),
        (
            run("Lies ") + f"<w:fldSimple w:instr=' {WEB} '>{run('diese Seite', LINK)}</w:fldSimple>",
            "Lies diese Seite",
            ("This page read", "1 2 0"),
            f"<w:fldSimple w:instr=' {WEB} '>{run('This page', LINK)}</w:fldSimple>" + run(" read"),
        ),
        (  # and what a user wrote into a form
            run("Das ") + field("FORMTEXT", run("alte ", BOLD), run("Buch")) + run(" hier."),
            "Das alte Buch hier.",
            ("Here the old book.", "3 0 1 2"),
            run("Here the ") + field("FORMTEXT", run("old ", BOLD), run("book")) + run("."),
        ),
        (  # but for a number
            run("Alter: ") + field("FORMTEXT", run("12")) + run(" Jahre"),
            "Alter: 12 Jahre",
            ("Age: years 12", "0 2 1"),
            run("Age: years ") + field("FORMTEXT", run("12")),
        ),
        (  # a raised number, which is that of a note
            run("Im Jahr 1999") + field("NOTEREF x", run("1", RAISED), run(",2", RAISED)) + run(" hier."),
            "Im Jahr 1999 hier.",
            ("Here in 1999.", "3 0 2"),
            run("Here in 1999") + field("NOTEREF x", run("1", RAISED), run(",2", RAISED)) + run("."),
        ),
        (  # a field within a link
            field(WEB, run("Seite ", LINK), PAGE) + run(" lesen"),
            "Seite 12 lesen",
            ("read page 12", "2 0 1"),
            run("read ") + field(WEB, run("page ", LINK), PAGE),
        ),
        (  # a hidden one
            run("Ein ") + ENTRY + run("Wort"),
            "Ein Wort",
            ("A word", "0 1"),
            run("A ") + ENTRY + run("word"),
        ),
        (
            run("Ein ") + PICTURE + run("Bild hier."),
            "Ein Bild hier.",
            ("Here a picture.", "2 0 1"),
            run("Here a ") + PICTURE + run("picture."),
        ),
        (  # one of several paragraphs
            run("Siehe") + '<w:r><w:fldChar w:fldCharType="begin"/></w:r>',
            "Siehe",
            ("See", "0"),
            run("See") + '<w:r><w:fldChar w:fldCharType="begin"/></w:r>',
        ),
    ],
)
def test_fields_and_pictures_stay_once_within_their_sentence(paragraph, text, answer, expected):
    """They cut it into texts."""
    texts, written = translated("a.docx", word_file(f"<w:p>{paragraph}</w:p>"), aligned(*answer))
    assert texts == [text]
    written = re.sub('</w:t><w:t xml:space="preserve">', "", body(written))
    assert written == f"<w:p>{expected}</w:p>"


def test_parts_may_have_numbers():
    """As in files of Word on the web, which were refused."""
    names = ("word/document.xml", "word/document2.xml"), ("word/footnotes.xml", "word/footnotes2.xml")
    note = f'<w:footnotes xmlns:w="{WORD}"><w:footnote><w:p>{run("a note")}</w:p></w:footnote></w:footnotes>'
    styles = f'<w:styles xmlns:w="{WORD}"><w:lang w:val="en-US"/></w:styles>'
    others = [(names[1][0], note.encode()), ("word/styles2.xml", styles.encode())]
    found = dict(names)
    with zipfile.ZipFile(io.BytesIO(word_file(f"<w:p>{run('a text')}</w:p>", others=others))) as archive:
        content = archive_of({found.get(name, name): archive.read(name) for name in archive.namelist()})
    document = WordDocument(content, Path("a.docx"))
    document.target_language = "de"
    assert [segment.text for segment in document.segments] == ["a text", "a note"]
    with zipfile.ZipFile(io.BytesIO(document.content())) as archive:
        assert b'<w:lang w:val="de"/>' in archive.read("word/styles2.xml")


MATH = "http://schemas.openxmlformats.org/officeDocument/2006/math"
FORMULA = f'<m:oMath xmlns:m="{MATH}"><m:r><m:t>x=1</m:t></m:r></m:oMath>'
SYMBOL = '<w:sym w:font="Wingdings" w:char="F04A"/>'
DELETED = '<w:del w:id="3"><w:r><w:rPr><w:del/></w:rPr><w:delText>alt</w:delText></w:r></w:del>'
MOVED = '<w:moveFrom w:id="4">' + run("hier ") + "</w:moveFrom>"
BOX = "<w:txbxContent><w:p>{}</w:p></w:txbxContent>"
DRAWN_BOX = f"<w:r><w:pict><v:x xmlns:v='v'>{BOX}</v:x></w:pict></w:r>"
CITED = f"<w:sdt><w:sdtPr><w:citation/></w:sdtPr><w:sdtContent>{field('CITATION x', run('(Kim)'))}"
CITED += "</w:sdtContent></w:sdt>"
RUBY = "<w:r><w:ruby><w:rubyPr/><w:rt>{}</w:rt><w:rubyBase>{}</w:rubyBase></w:ruby></w:r>"


def control(content: str) -> str:
    return f"<w:sdt><w:sdtPr><w:alias w:val='a'/></w:sdtPr><w:sdtContent>{content}</w:sdtContent></w:sdt>"


def tagged(name: str, content: str) -> str:
    return f'<w:{name} w:id="9">{content}</w:{name}>'


@pytest.mark.parametrize(
    ("paragraph", "text", "expected"),
    [
        (
            run("Das ") + control(run("alte Buch")) + run(" hier."),
            "Das alte Buch hier.",
            run("HIER. ") + control(run("BUCH ALTE")) + run(" DAS"),
        ),
        (  # a box to tick
            run("Ja ") + control(run("☐")) + run(" nein"),
            "Ja ☐ nein",
            run("NEIN ") + control(run("☐")) + run(" JA"),
        ),
        (
            run("Das sagt ") + CITED + run(" hier."),
            "Das sagt (Kim) hier.",
            run("HIER. ") + CITED + run(" SAGT DAS"),
        ),
        (
            run("Das ") + DELETED + tagged("ins", run("neue ")) + run("Buch."),
            "Das neue Buch.",
            run("BUCH.") + tagged("ins", run(" NEUE ")) + run("DAS") + DELETED,
        ),
        (run("Das ") + DELETED + run("Buch."), "Das Buch.", run("BUCH. DAS") + DELETED),
        (
            run("Das ") + MOVED + run("Buch ") + tagged("moveTo", run("hier")) + run("."),
            "Das Buch hier.",
            tagged("moveTo", run("HIER")) + run(". BUCH DAS") + MOVED,
        ),
        (
            run("Wenn ") + FORMULA + run(" gilt"),
            "Wenn x=1 gilt",
            run("GILT ") + FORMULA + run(" WENN"),
        ),
        (run("Nord") + "<w:r><w:noBreakHyphen/></w:r>" + run("see und"), "Nord-see und", run("UND NORD-SEE")),
        (run("Buch") + "<w:r><w:softHyphen/></w:r>" + run("laden zu"), "Buchladen zu", run("ZU BUCHLADEN")),
        (
            run("Das ") + f"<w:r>{SYMBOL}</w:r>" + run(" Buch"),
            "Das Buch",
            run("BUCH DAS") + run(" ") + f"<w:r>{SYMBOL}</w:r>",
        ),
        (
            f'<w:r><w:t xml:space="preserve">Das </w:t>{SYMBOL}<w:t xml:space="preserve"> Buch</w:t></w:r>',
            "Das Buch",
            run("BUCH DAS") + run(" ") + f"<w:r>{SYMBOL}</w:r>",
        ),
        (
            tagged("customXml", "<w:customXmlPr/>" + run("Das ")) + run("Buch"),
            "Das Buch",
            run("BUCH") + tagged("customXml", "<w:customXmlPr/>" + run(" DAS")),
        ),
        (
            '<w:bdo w:val="ltr">' + run("Das ") + "</w:bdo>" + run("Buch"),
            "Das Buch",
            run("BUCH") + '<w:bdo w:val="ltr">' + run(" DAS") + "</w:bdo>",
        ),
        (
            RUBY.format(run("das"), run("Das", BOLD)) + run(" Buch"),
            "Das Buch",
            run("BUCH ") + run("DAS", BOLD),
        ),
    ],
)
def test_elements_within_a_sentence_do_not_cut_it(paragraph, text, expected):
    texts, written = translated("a.docx", word_file(f"<w:p>{paragraph}</w:p>"), backwards)
    assert texts == [text]
    assert body(written) == f"<w:p>{expected}</w:p>"


def test_hidden_text_is_not_sent():
    hidden = run("geheim ", "<w:rPr><w:b/><w:vanish/></w:rPr>")
    shown = run("Buch", '<w:rPr><w:vanish w:val="0"/></w:rPr>')
    texts, written = translated("a.docx", word_file(f"<w:p>{run('Das ')}{hidden}{shown}</w:p>"), capitals)
    assert texts == ["Das Buch"]
    assert body(written) == f"<w:p>{run('DAS ')}{hidden}{shown.replace('Buch', 'BUCH')}</w:p>"


def test_a_box_within_a_sentence_has_its_own_texts():
    box = DRAWN_BOX.format(run("one ") + PAGE + run(" two") + "<w:r><w:tab/><w:t>three</w:t></w:r>")
    texts, written = translated(
        "a.docx", word_file(f"<w:p>{run('four ')}{box}{run('five')}</w:p>"), backwards
    )
    assert texts == ["one 12 two", "three", "four five"]
    inside = run("TWO ") + PAGE + run(" ONE") + '<w:r><w:tab/><w:t xml:space="preserve">THREE</w:t></w:r>'
    assert body(written) == f"<w:p>{run('FIVE FOUR')}{DRAWN_BOX.format(inside)}</w:p>"


def test_a_word_between_those_of_a_link_beside_a_formula_is_not_lost():
    """It was to go into the link, and there to the formula, whose text stays."""
    link = f'<w:hyperlink w:id="1">{run("one ")}{FORMULA}</w:hyperlink>'
    content = word_file(f"<w:p>{link}{run(' two')}</w:p>")
    _, written = translated("a.docx", content, aligned("a b x=1 c", "0 2 0 0"))
    assert re.findall("<[wm]:t(?: [^>]*)?>([^<]*)", body(written)) == ["a b ", "x=1", " c"]


_RUNS = "r hyperlink ins del sdt customXml smartTag bdo fldSimple oMath bookmarkStart bookmarkEnd"
_CHILDREN = {
    **dict.fromkeys(("p", "hyperlink", "ins", "sdtContent", "customXml", "smartTag", "bdo"), _RUNS),
    "sdt": "sdtPr sdtContent",
    "r": "rPr t sym noBreakHyphen softHyphen footnoteReference commentReference drawing pict ruby fldChar "
    "instrText delText",
    "ruby": "rubyPr rt rubyBase",
}
_MARKS = (
    NOTE.replace('"2"', '"{0}"'),
    '<w:r><w:commentReference w:id="{0}"/></w:r>',
    '<w:r><w:t xml:space="preserve">w </w:t><w:commentReference w:id="{0}"/></w:r>',
    '<w:r><w:sym w:char="{0}"/></w:r>',
    '<w:r><w:sym w:char="{0}"/><w:t xml:space="preserve"> w </w:t></w:r>',
    '<w:bookmarkStart w:id="{0}"/><w:bookmarkEnd w:id="{0}"/>',
    '<w:bookmarkStart w:id="{0}"/><w:r><w:t>w</w:t></w:r><w:bookmarkEnd w:id="{0}"/>',
    DELETED.replace('"3"', '"{0}"'),
    PICTURE.replace("<w:drawing>", '<w:drawing w:id="{0}">'),
    SIMPLE.replace("w:instr", 'w:id="{0}" w:instr'),
    FORMULA.replace("<m:oMath", '<m:oMath w:id="{0}"'),
    DRAWN_BOX.replace("<w:pict>", '<w:pict w:id="{0}">').replace("{}", "<w:r><w:t>b</w:t></w:r>"),
    field("PAGEREF x", run("12")).replace("<w:fldChar ", '<w:fldChar w:id="{0}"  '),
)
_PLAIN = (
    "<w:r><w:noBreakHyphen/></w:r>",
    "<w:r><w:t>w</w:t><w:softHyphen/><w:t>w </w:t></w:r>",
    RUBY.format(run("r"), run("w", BOLD)),
)


@st.composite
def paragraphs(draw):
    """A paragraph of runs and elements among them, each with a number, a target, and its alignment."""
    number = iter(range(100, 1000))

    def content(depth: int) -> str:
        parts = []
        for _ in range(draw(st.integers(1, 4))):
            kind = draw(st.integers(0, 3 + (depth < 2)))
            if kind < 2:
                text = draw(st.sampled_from(["w ", " w", "w. ", "w", " ", ""]))
                parts.append(run(text, draw(st.sampled_from(["", "", BOLD, LINK]))))
            elif kind < 4:
                parts.append(draw(st.sampled_from([*_MARKS, *_MARKS, *_PLAIN])).format(next(number)))
            else:
                its = next(number)
                name = draw(
                    st.sampled_from(["hyperlink", "ins", "smartTag", "customXml", "bdo", "sdt", "field"])
                )
                inside = content(depth + 1)
                if name == "sdt":
                    parts.append(
                        f'<w:sdt w:id="{its}"><w:sdtPr/><w:sdtContent>{inside}</w:sdtContent></w:sdt>'
                    )
                elif name == "field" and "txbx" not in inside:
                    parts.append(
                        field(WEB, inside).replace("<w:fldChar w:fld", f'<w:fldChar w:id="{its}" w:fld')
                    )
                else:
                    parts.append(
                        f'<w:{name} w:id="{its}">{inside}</w:{name}>'.replace("w:field", "w:smartTag")
                    )
        return "".join(parts)

    paragraph = content(0) + run(" w")
    targets = draw(
        st.lists(st.sampled_from(["v", "v,", "(v", "v.", "w", "12", "x=1"]), min_size=1, max_size=9)
    )
    links = draw(st.lists(st.floats(0, 0.99), min_size=len(targets), max_size=len(targets)))
    return paragraph, " ".join(targets), links if draw(st.booleans()) else []


def _shown(content: str) -> str:
    """Returns the text of paragraphs, without that of boxes and ruby."""
    content = re.sub("<w:(txbxContent|rt)>.*?</w:\\1>", "", content)
    return "".join(re.findall("<w:t(?: [^>]*)?>([^<]*)", content.replace("<w:noBreakHyphen/>", "<w:t>-")))


@given(paragraphs())
def test_any_translation_of_a_paragraph_is_valid_and_keeps_each_mark_once(case):
    paragraph, target, links = case

    def answer(text: str) -> GenerateResponse:
        num_words = len(text.split())
        return aligned(target, " ".join(str(int(link * num_words)) for link in links))(text)

    content = word_file(f"<w:p>{paragraph}</w:p>")
    assert body(WordDocument(content, Path("a.docx")).content()) == f"<w:p>{paragraph}</w:p>"
    _, written = translated("a.docx", content, answer)
    before, after = (
        ElementTree.fromstring(f'<w:x xmlns:w="{WORD}">{markup}</w:x>')
        for markup in (paragraph, body(written))
    )
    for element in after.iter():
        name = element.tag.rpartition("}")[2]
        allowed = _CHILDREN.get(name)
        if allowed is not None:
            assert {child.tag.rpartition("}")[2] for child in element} <= set(allowed.split())
        if name not in ("t", "delText", "instrText"):
            assert not (element.text or "").strip()
        assert not (element.tail or "").strip()
    source, shown = (_shown(content) for content in (f"<w:p>{paragraph}</w:p>", body(written)))
    shown, mark = "".join(shown.split()), "".join(begin_of(source).split())
    whole = "".join(target.split())
    fixed = re.search("fldSimple|oMath|PAGEREF|<w:sdt", paragraph)  # may be in place of the same text
    assert shown.count("v") == target.count("v") if fixed else shown in (whole, mark + whole)
    ids = [
        Counter(
            (element.tag, value)
            for element in root.iter()
            for key, value in element.attrib.items()
            if key.rpartition("}")[2] in ("id", "char")
        )
        for root in (before, after)
    ]
    lost = ids[0] - ids[1]
    assert not ids[1] - ids[0] - Counter({key: 9 for key in ids[0] if "bdo" in key[0]})
    assert all(re.search("hyperlink|ins$|smartTag|customXml|bdo|sdt|fldChar", tag) for tag, _ in lost)


def test_a_file_with_fields_and_pictures_can_be_read_by_others():
    document, stream = docx.Document(), io.BytesIO()
    paragraph, picture = document.add_paragraph("one "), io.BytesIO()
    Image.new("RGB", (2, 2)).save(picture, "png")
    paragraph.add_run().add_picture(picture)
    paragraph.add_run("two ")
    field_xml = f'<w:p xmlns:w="{WORD}">{field(WEB, run("three ", LINK))}{SIMPLE}</w:p>'
    for element in docx.oxml.parse_xml(field_xml):
        paragraph._p.append(element)
    document.save(stream)
    texts, written = translated("a.docx", stream.getvalue(), backwards)
    assert texts == ["one two three Bild 3"]
    read = docx.Document(io.BytesIO(written))
    assert read.paragraphs[0].text == " THREE TWO ONE"  # without the text of a `fldSimple`
    assert len(read.inline_shapes) == 1
    assert len(read.element.findall(f".//{{{WORD}}}fldChar")) == 3
    assert len(read.element.findall(f".//{{{WORD}}}fldSimple")) == 1


def test_the_title_of_a_file_and_descriptions_of_pictures_are_texts():
    document, stream, picture = docx.Document(), io.BytesIO(), io.BytesIO()
    document.core_properties.title = "My trip"
    paragraph = document.add_paragraph("one ")
    Image.new("RGB", (2, 2)).save(picture, "png")
    for description in ("a 'cat' & dog", "cat.png"):
        paragraph.add_run().add_picture(picture)._inline.docPr.set("descr", description)
    paragraph.add_run("two")
    document.save(stream)
    texts, written = translated("a.docx", stream.getvalue(), backwards)
    assert sorted(texts) == ["My trip", "a 'cat' & dog", "one two"]
    read = docx.Document(io.BytesIO(written))
    assert read.core_properties.title == "TRIP MY"
    assert read.paragraphs[0].text == "TWO ONE"
    descriptions = [shape._inline.docPr.get("descr") for shape in read.inline_shapes]
    assert descriptions == ["DOG & 'CAT' A", "cat.png"]


@pytest.mark.parametrize(
    ("language", "expected"),
    [
        ("en", '<w:lang w:val="en" w:bidi="ar-SA"/>'),
        ("ko", '<w:lang w:eastAsia="ko" w:val="de-DE" w:bidi="ar-SA"/>'),
        ("he", '<w:lang w:bidi="he" w:val="de-DE"/>'),
        ("", '<w:lang w:val="de-DE" w:bidi="ar-SA"/>'),
    ],
)
def test_the_language_of_texts_becomes_that_of_the_translation(language, expected):
    tag = '<w:lang w:val="de-DE" w:bidi="ar-SA"/>'
    content = word_file(
        f"<w:p>{run('a', f'<w:rPr>{tag}</w:rPr>')}</w:p>", others=[("word/styles.xml", tag.encode())]
    )
    document = WordDocument(content, Path("a.docx"))
    document.target_language = language
    written = document.content()
    assert expected in body(written)
    with zipfile.ZipFile(io.BytesIO(written)) as archive:
        assert archive.read("word/styles.xml").decode() == expected


def test_runs_of_an_indented_file_keep_their_properties():
    run = "<w:r>\n  <w:rPr>{}</w:rPr>\n  <w:t>{}</w:t>\n</w:r>\n"
    paragraph = f"<w:p>\n{run.format('<w:b/>', 'a')}{run.format('<w:i/>', ' b')}</w:p>"
    written = body(translated("a.docx", word_file(paragraph), backwards)[1])
    runs = [re.sub(r"\s", "", run) for run in re.findall(r"<w:r>.*?</w:r>", written, re.DOTALL)]
    assert [re.sub("<w:t[^>]*>", "", run) for run in runs] == [
        "<w:r><w:rPr><w:i/></w:rPr>B</w:t></w:r>",
        "<w:r><w:rPr><w:b/></w:rPr>A</w:t></w:r>",
    ]


def test_a_paragraph_in_a_box_is_a_text_of_its_own():
    box = "<w:p><w:r><w:t>a </w:t><w:x><w:p><w:r><w:t>box</w:t></w:r></w:p></w:x><w:t>b</w:t></w:r></w:p>"
    texts, written = translated("a.docx", word_file(box), capitals)
    assert texts == ["a", "box", "b"]
    assert re.sub("<[^>]*>", " ", body(written)).split() == ["A", "BOX", "B"]


def test_other_parts_stay_byte_by_byte_and_stored_ones_stored():
    picture, notes = (
        bytes(range(256)) * 100,
        '<w:footnotes xmlns:w="{}"><w:p><w:r><w:t>note</w:t></w:r></w:p></w:footnotes>',
    )
    namespace = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    whole = word_file(
        "<w:p/>",
        others=[
            ("word/media/a.png", picture),
            ("word/footnotes.xml", notes.format(namespace).encode("utf-16")),
        ],
    )
    texts, written = translated("a.docx", whole, capitals)
    assert texts == ["note"]
    with zipfile.ZipFile(io.BytesIO(written)) as archive:
        assert archive.read("word/media/a.png") == picture
        assert "NOTE" in archive.read("word/footnotes.xml").decode("utf-16")
        assert archive.testzip() is None


def test_control_characters_of_a_target_are_left_out():
    texts, written = translated(
        "a.docx", word_file("<w:p><w:r><w:t>a</w:t></w:r></w:p>"), lambda _: capitals("b\x01")
    )
    assert texts == ["a"]
    assert ">B<" in body(written)


def test_a_written_file_can_be_read_by_others():
    document, stream = docx.Document(), io.BytesIO()
    document.add_heading("one two")
    document.add_paragraph("three")
    document.save(stream)
    written = translated("a.docx", stream.getvalue(), backwards)[1]
    assert [paragraph.text for paragraph in docx.Document(io.BytesIO(written)).paragraphs] == [
        "TWO ONE",
        "THREE",
    ]


def archive(*names: str, content: bytes = b"<x/>", **settings) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as written:
        for name in names:
            written.writestr(name, content, **settings)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is not a Word document (.docx), or is damaged"),
        (archive("a.xml"), "the file is not a Word document (.docx)"),
        (
            archive("word/document.xml", "word/documenu.xml").replace(b"documenu", b"document"),
            "two parts of the file have the same name",
        ),
        (
            archive("word/document.xml", content=b"<a>"),
            "its part word/document.xml is not XML: no element found",
        ),
        (archive("word/document.xml", content=b"\xff"), "its part word/document.xml is not UTF-8: byte 1 is"),
        (
            archive("word/document.xml").replace(b"<x/>", b"<y/>"),
            "the part word/document.xml of the file is damaged",
        ),
        (word_file("")[:-40], "the file is not a Word document (.docx), or is damaged"),
    ],
)
def test_what_is_not_a_word_file_is_refused(content, message):
    with pytest.raises(WrongFile) as caught:
        WordDocument(content, Path("a.docx")).content()
    assert caught.value.strerror.startswith(message)
