"""Numbers of notes: they are not sent, and stay right after the words before them."""

import io
import re
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.documents.answers import aligned, backwards, capitals, translated
from tests.documents.attacks import archive_of
from tests.documents.large import document_of

_HEAD = '<html xmlns="http://www.w3.org/1999/xhtml" xmlns:epub="http://www.idpf.org/2007/ops"><body>'
_WIKI = (
    '<sup id="r1" class="reference"><a href="#n1"><span class="c">[</span>1<span class="c">]</span></a></sup>'
)


@pytest.mark.parametrize("name", ["a.html", "a.xhtml"])
@pytest.mark.parametrize(
    ("content", "answer", "expected"),
    [
        (
            '나는 학생이다<a href="#n"><sup>1</sup></a>.',
            ("I am a scientist.", "0 1 1 1"),
            'I am a scientist<a href="#n"><sup>1</sup></a>.',
        ),
        (
            '나는 학생이다<a href="#n">1</a>',
            ("I am a scientist.", "0 1 1 1"),
            'I am a scientist.<a href="#n">1</a>',
        ),
        (
            '나는 학생이다.<a epub:type="noteref" href="n.xhtml">1</a> 오늘은 금요일이다.',
            ("I am a student. It is Friday.", "0 1 1 1 2 3 3"),
            'I am a student.<a epub:type="noteref" href="n.xhtml">1</a> It is Friday.',
        ),
        (
            f'<b>또</b> 나는 학생이다.{_WIKI}<sup><a href="#n2">[a]</a></sup> 오늘은 금요일이다.',
            ("I am a student again. It is Friday.", "1 2 2 2 0 3 4 4"),
            f'I am a student <b>again</b>.{_WIKI}<sup><a href="#n2">[a]</a></sup> It is Friday.',
        ),
        ("토끼<sup>1</sup>는 없다.", ("There is no rabbit.", "1 1 1 0"), "There is no rabbit<sup>1</sup>."),
        (
            '<a href="#r">1</a> 나는 학생이다. <a href="#r" role="doc-backlink">b</a>',
            ("I am a student.", "0 1 1 1"),
            '<a href="#r">1</a> I am a student. <a href="#r" role="doc-backlink">b</a>',
        ),
        ("<sup>1</sup> 나는 학생이다.", ("I am one.", "0 1 1"), "<sup>1</sup> I am one."),
        ("<sup>1</sup>나는 학생이다.", ("I am one.", "0 1 1"), "<sup>1</sup>I am one."),
        ("One<sup>®</sup> is new", ("New is One", "2 1 0"), "New is One<sup>®</sup>"),
    ],
)
def test_the_number_of_a_note_is_not_sent_and_stands_after_the_words_before_it(
    name, content, answer, expected
):
    """A word of the sentence took its place, and the end of a sentence before it was not seen."""
    [text], written = translated(name, f"{_HEAD}<p>{content}</p></body></html>", aligned(*answer))
    assert not re.search(r"[\d\[]", text)
    assert written == f"{_HEAD}<p>{expected}</p></body></html>"


@pytest.mark.parametrize("name", ["a.html", "a.xhtml"])
@pytest.mark.parametrize(
    ("content", "text", "expected"),
    [
        ("I have <b>3</b> apples", "I have 3 apples", "APPLES <b>3</b> HAVE I"),
        ('a 5 m<sup>2</sup> <a href="#x">3</a>', "a 5 m2 3", '<a href="#x">3</a> M<sup>2</sup> 5 A'),
        ('see (<a href="#x">1</a>) now', "see (1) now", 'NOW (<a href="#x">1</a>) SEE'),
        ('see #<a href="#x">12</a> now', "see #12 now", 'NOW #<a href="#x">12</a> SEE'),
        ('<a href="#r">1</a>. a text', "1. a text", 'TEXT A <a href="#r">1</a>.'),
        ("<sup>14</sup>C is 10<sup>6</sup> x", "14C is 106 x", "X 10<sup>6</sup> IS <sup>14</sup>C"),
        ("the 1<sup>st</sup> <b>2</b><i>nd</i>", "the 1st 2nd", "<b>2</b><i>ND</i> 1<sup>ST</sup> THE"),
        ('so<sup><a href="#x">an aside</a></sup>', "soan aside", '<sup><a href="#x">ASIDE SOAN</a></sup>'),
    ],
)
def test_a_number_of_a_sentence_is_no_note(name, content, text, expected):
    whole = _HEAD + "<p>{}</p></body></html>"
    assert translated(name, whole.format(content), backwards) == ([text], whole.format(expected))


def test_the_title_of_a_note_is_a_text():
    page = '<p>One<sup><a href="#n" title="back up">1</a></sup> two'
    expected = '<p>TWO ONE<sup><a href="#n" title="UP BACK">1</a></sup>'
    assert translated("a.html", page, backwards) == (["back up", "One two"], expected)


@given(
    st.lists(st.sampled_from(["w", "<b>w</b>", "w{}", "<b>w{}</b>", "<i>w</i>{}", "w.{}{}"]), min_size=1),
    st.lists(st.integers(0, 99), min_size=1, max_size=9),
)
def test_each_note_stays_once_after_a_word(words, links):
    note = '<sup><a href="#n">[1]</a></sup>'
    page, target = " ".join(words).replace("{}", note), " ".join("v" * len(links))
    places = " ".join(str(link % len(words)) for link in links)
    for name in ("a.html", "a.xhtml"):
        whole = f"{_HEAD}<p>{page}</p></body></html>"
        written = translated(name, whole, aligned(target, places))[1]
        inner = written[len(_HEAD) + 3 : -len("</p></body></html>")]
        assert inner.count(note) == page.count(note)
        assert f" {note}" not in inner
        assert re.sub("<[^>]*>", "", inner.replace(note, "")) == target


_ODT = "urn:oasis:names:tc:opendocument:xmlns"
_STYLES = (
    '<s:style s:name="T1"><s:p s:text-position="super 58%"/></s:style>'
    '<s:style s:name="T2"><s:p s:text-position="-8% 58%"/></s:style>'
)
# For each kind: the part with texts, how a text is written, a raised one, and a lowered one
_OFFICE = {
    ".docx": (
        "word/document.xml",
        '<w:r><w:t xml:space="preserve">{}</w:t></w:r>',
        '<w:r><w:rPr><w:vertAlign w:val="superscript"/></w:rPr><w:t>{}</w:t></w:r>',
        '<w:r><w:rPr><w:vertAlign w:val="subscript"/></w:rPr><w:t>{}</w:t></w:r>',
    ),
    ".pptx": (
        "ppt/slides/slide1.xml",
        "<a:r><a:t>{}</a:t></a:r>",
        '<a:r><a:rPr lang="en" baseline="30000"/><a:t>{}</a:t></a:r>',
        '<a:r><a:rPr lang="en" baseline="-25000"/><a:t>{}</a:t></a:r>',
    ),
    ".xlsx": (
        "xl/sharedStrings.xml",
        '<r><t xml:space="preserve">{}</t></r>',
        '<r><rPr><vertAlign val="superscript"/></rPr><t>{}</t></r>',
        '<r><rPr><vertAlign val="subscript"/></rPr><t>{}</t></r>',
    ),
    ".odt": (
        "content.xml",
        "{}",
        '<t:span t:style-name="T1">{}</t:span>',
        '<t:span t:style-name="T2">{}</t:span>',
    ),
}
_PARAGRAPHS = {".docx": "<w:p>{}</w:p>", ".pptx": "<a:p>{}</a:p>", ".xlsx": "<si>{}</si>"}


def in_office(paragraph: str, suffix: str) -> bytes:
    """A document with a paragraph, in which ^1^ is raised and _1_ is lowered."""
    _, *written = _OFFICE[suffix]
    how = {"": written[0], "^": written[1], "_": written[2]}
    parts = [how[mark].format(text) for mark, text in re.findall(r"([_^]?)([^_^]+)\1", paragraph)]
    if suffix in _PARAGRAPHS:
        return document_of(suffix, _PARAGRAPHS[suffix].format("".join(parts)))
    names = f'xmlns:t="{_ODT}:text:1.0" xmlns:s="{_ODT}:style:1.0"'
    return archive_of({"content.xml": f"<o {names}>{_STYLES}<t:p>{''.join(parts)}</t:p></o>"})


def in_notation(content: bytes, suffix: str) -> str:
    """The paragraph of such a document."""
    part, _, *how = _OFFICE[suffix]
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        written = archive.read(part).decode().replace(' xml:space="preserve"', "")
    for begin, mark in ((one.partition("{}")[0], mark) for one, mark in zip(how, "^_", strict=True)):
        written = re.sub(re.escape(begin) + "([^<]*)", rf"{mark}\1{mark}", written)
    return re.sub("<[^>]*>", "", written)


@pytest.mark.parametrize("suffix", _OFFICE)
@pytest.mark.parametrize(
    ("paragraph", "text", "answer", "expected"),
    [
        ("나는 학생이다^1^.", "나는 학생이다.", ("I am a scientist.", "0 1 1 1"), "I am a scientist^1^."),
        (
            "나는 학생이다.^[1]^^,2^ 오늘은 금요일이다.",
            "나는 학생이다. 오늘은 금요일이다.",
            ("I am a student. It is Friday.", "0 1 1 1 2 3 3"),
            "I am a student.^[1]^^,2^ It is Friday.",
        ),
        ("^1^학생^®^이다", "학생이다", ("A student", "0 0"), "^1^A student^®^"),
        ("^1^ 학생", "학생", ("A student", "0 0"), "^1^ A student"),
        ("5 m^2^ of CO_2_", "5 m2 of CO2", ("CO2 of 5 m2", "3 2 0 1"), "CO_2_ of 5 m^2^"),
        ("H_2_O_2_ or CO_2_", "H2O2 or CO2", ("CO2 or H2O2", "2 1 0"), "CO_2_ or H_2_O_2_"),
        ("^14^C at 10^6^ K", "14C at 106 K", ("106 K at 14C", "2 3 1 0"), "10^6^ K at ^14^C"),
        ("the 1^st^ day", "the 1st day", ("Day the 1st", "2 0 1"), "Day the 1^st^"),
    ],
)
def test_raised_numbers_of_office_files_are_notes_as_in_pages(suffix, paragraph, text, answer, expected):
    """They were words of the text, such as "word1"."""
    content = in_office(paragraph, suffix)
    assert in_notation(content, suffix) == paragraph
    texts, written = translated(f"a{suffix}", content, aligned(*answer))
    assert texts == [text]
    assert in_notation(written, suffix) == expected


@given(
    st.lists(st.sampled_from(["w", "word", "word^1^", "word.^1^", "5 m^2^", "CO_2_", "^1^"]), min_size=1),
    st.sampled_from([backwards, capitals]),
)
def test_raised_texts_of_office_files_stay_once_in_any_order(words, answer):
    paragraph = re.sub("\\^ \\^", "^^", " ".join(words))
    for suffix in _OFFICE:
        _, written = translated(f"a{suffix}", in_office(paragraph, suffix), answer)
        shown = in_notation(written, suffix)
        for mark in ("^", "_"):  # all that is raised, and all that is lowered
            one, other = (re.sub(r"\s", "", "".join(text.split(mark)[1::2])) for text in (shown, paragraph))
            assert sorted(one) == sorted(other)
        assert sorted(re.sub(r"[\s^_]", "", shown)) == sorted(re.sub(r"[\s^_]", "", paragraph).upper())
