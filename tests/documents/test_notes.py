"""Numbers of notes in pages and books: they are not sent, and stay right after the words before them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.documents.answers import aligned, backwards, translated

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
