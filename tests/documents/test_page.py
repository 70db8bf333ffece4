"""Pages of HTML as they are written by hand and by programs: everything but the texts stays, byte by byte."""

import random
import re
from pathlib import Path

import pytest

from seq2seq_serve.documents.page import HtmlDocument
from seq2seq_serve.documents.segments import WrongFile
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateResponse
from tests.documents.answers import aligned, backwards, capitals, translated


@pytest.mark.parametrize(
    ("page", "texts"),
    [
        ('<P CLASS=a ID="b">One</P>', ["One"]),
        ("<p title=it's>one<p>two", ["it's", "one", "two"]),
        ("<p data-x='a>b'>one</p>", ["one"]),
        ("one <!-- a <b> --> two", ["one two"]),
        ("<!-->one<!--->", ["one"]),
        ("<![CDATA[no]]><?php no ?>one", ["one"]),
        ("a < b and </ c", ["a < b and"]),
        ('<a href="x"><i class="icon"></i> Home</a>', ["Home"]),
        ("<script>if (a<b) '</p>'</script>one", ["one"]),
        ("<textarea><b>no</textarea><title>a <b> c</title>", ["a <b> c"]),
        ("<svg><svg></svg>no</svg><svg/>one", ["one"]),
        ('<div translate="no">no<div>no</div></div>one', ["one"]),
        ("<ul><li translate=no>no<li>no</ul>one", ["one"]),
        ("<pre>no</b></pre>one<pre>no", ["one"]),
        ('<div translate=NO>no<span>no</span></div><span translate="yes">one</span>', ["one"]),
        ('<span translate=NO>it<span>s</span></span><b translate="yes"> one</b>', ["its one"]),
        ("<p><code>x = y</code> <span class='a notranslate'>no</span></p>", []),
        ("<p class='math'>one</p><div class='katex-display'>no</div><p class='math display'>no", ["one"]),
        ("<p>a <code>b<div>no</div>no</code> c", ["a", "c"]),
        ("<p>a <kbd>no</p>b", ["a", "b"]),
        ('<img alt="no" translate="no"><img alt=one><input placeholder=" two ">', ["one", "two"]),
        ('<a title="a &quot;b&quot;" title="no">one</a>', ['a "b"', "one"]),
        ("one <b>two</i> three</b> four", ["one two three four"]),
        ("one <b><i>two</b></i> three", ["one two three"]),
        ("one\r\ntwo<br/>three", ["one two", "three"]),
        ("<p>one", ["one"]),
        ("<p", []),
        ("", []),
    ],
)
def test_a_page_is_cut_as_browsers_read_it(page, texts):
    document = HtmlDocument(page.encode(), Path("a.html"))
    assert [segment.text for segment in document.segments] == texts
    assert document.content().decode() == page


@pytest.mark.parametrize(
    ("page", "same", "turned"),
    [
        ("<p>a <b>b</b> c</p>", "<p>A <b>B</b> C</p>", "<p>C <b>B</b> A</p>"),
        ("a <b>b </b>c, d", "A <b>B</b> C, D", "D C, <b>B</b> A"),
        ("<p>a<!-- x --> b</p>", "<p>A<!-- x --> B</p>", "<p>B A<!-- x --></p>"),
        (
            '<a href="x"><i class="icon"></i>home <b>now</b></a>',
            '<a href="x"><i class="icon"></i>HOME <b>NOW</b></a>',
            '<a href="x"><i class="icon"></i><b>NOW</b> HOME</a>',
        ),
        ("<p>a &lt; <b>b &amp;</b></p>", "<p>A &lt; <b>B &amp;</b></p>", "<p><b>&amp; B</b> &lt; A</p>"),
        ("<b>a<br>b <i>c</i></b> d", "<b>A<br>B <i>C</i></b> D", "<b>A<br></b>D <b><i>C</i> B</b>"),
        ('<a title="x y">a</a>', '<a title="X Y">A</a>', '<a title="Y X">A</a>'),
        ("one <b><i>two</b></i> three", "ONE <b><i>TWO</i></b></i> THREE", "THREE <b><i>TWO</i></b></i> ONE"),
    ],
)
def test_tags_follow_their_words_and_never_cross(page, same, turned):
    assert translated("a.html", page, capitals)[1] == same
    assert translated("a.html", page, backwards)[1] == turned


@pytest.mark.parametrize(
    ("before", "encoding"),
    [
        ('<meta charset="euc-kr">', "euc_kr"),
        ("<meta http-equiv='Content-Type' content='text/html; charset=windows-1252'>", "cp1252"),
        ("<meta charset=latin1>", "cp1252"),
        ("<meta charset=punycode>", "utf-8"),  # a codec of Python, and not of pages
        ("<meta charset=zip>", "utf-8"),
        ("", "utf-8-sig"),
        ("", "utf-16"),
        ("", "utf-16-be"),  # without a mark
        ("", "utf-32"),
        ("", "utf-8"),
    ],
)
def test_a_page_keeps_its_encoding(before, encoding):
    content = f"{before}<p>one</p>".encode(encoding)
    document = HtmlDocument(content, Path("a.html"))
    assert document.content() == content
    [segment] = document.segments
    segment.translate(capitals("금 é"))
    assert document.content().decode(encoding) == f"{before}<p>금 É</p>" or encoding in ("cp1252", "euc_kr")
    assert b"ONE" not in document.content()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("<p>금요일".encode("euc-kr"), "UTF-8: byte 4 is wrong: name its own in a <meta charset=…>, or"),
        ("<meta charset=utf-8>금".encode("euc-kr"), "UTF-8: byte 21 is wrong"),
        ("<meta charset=x-none>금".encode("euc-kr"), "UTF-8: byte 22 is wrong"),
        ("\ufeff금".encode()[:-1], "UTF-8: byte 4 is wrong"),
        (b"<meta charset=euc-kr>\xff", "CP949: byte 22 is wrong"),
        ("<p>a".encode("utf-16") + b"\x00\xd8", "UTF-16: byte 11 is wrong"),
    ],
)
def test_a_page_in_another_encoding_than_it_says_is_refused(content, message):
    """It was read in Windows-1252, and its letters were translated."""
    with pytest.raises(WrongFile) as caught:
        HtmlDocument(content, Path("a.html"))
    assert caught.value.strerror.startswith(f"the file is not {message}")


@pytest.mark.parametrize(
    ("page", "text", "same", "turned", "lost"),
    [
        (
            "<p>one<span>[1]</span> two</p>",
            "one[1] two",
            "<p>ONE<span>[1]</span> TWO</p>",
            "<p>TWO ONE<span>[1]</span></p>",
            "<p>X <span>[1]</span></p>",
        ),
        (
            "<p>one <a href=x id=y>[1]</a> two <span>1,200</span></p>",
            "one [1] two 1,200",
            "<p>ONE <a href=x id=y>[1]</a> TWO <span>1,200</span></p>",
            "<p><span>1,200</span> TWO <a href=x id=y>[1]</a> ONE</p>",
            "<p>X <a href=x id=y>[1]</a> <span>1,200</span></p>",
        ),
        (
            "<p>one <b><i>5</i></b> two",
            "one 5 two",
            "<p>ONE <b><i>5</i></b> TWO",
            "<p>TWO <b><i>5</i></b> ONE",
            "<p>X<b> <i>5</i></b>",
        ),
        (
            "<p>one <b>&amp;</b> two</p>",
            "one & two",
            "<p>ONE <b>&amp;</b> TWO</p>",
            "<p>TWO <b>&amp;</b> ONE</p>",
            "<p>X <b>&amp;</b></p>",
        ),
        (
            "<p>H<sub>2</sub>O <b>2</b><i>nd</i> is",
            "H2O 2nd is",
            "<p>H<sub>2</sub>O <b>2</b><i>ND</i> IS",
            "<p>IS <b>2</b><i>ND</i> H<sub>2</sub>O",
            "<p>X",
        ),
    ],
)
def test_an_element_without_letters_stays_within_its_sentence(page, text, same, turned, lost):
    assert translated("a.html", page, capitals) == ([text], same)
    for translate, written in ((backwards, turned), (aligned("X", "0"), lost)):
        assert written is None or translated("a.html", page, translate)[1] == written


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("a.html", "<p>{}</p>"),
        ("a.xhtml", '<html xmlns="http://www.w3.org/1999/xhtml"><body><p>{}</p></body></html>'),
        ("a.md", "{}\n"),
    ],
)
@pytest.mark.parametrize(
    ("content", "text", "turned"),
    [
        ("<ruby>미나<rt>Mina</rt></ruby>는 없다.", "미나는 없다.", "없다. 미나는"),
        ("<b><ruby>one<rp>(</rp><rt> two</rt><rp>)</rp></ruby></b> x", "one x", "X <b>ONE</b>"),
        ("<ruby><rb>東</rb><rtc><rt>a</rt><rt>b</rt></rtc></ruby> x", "東 x", "X 東"),
        ("to<wbr/>day <i>one<wbr/>two</i>", "today onetwo", "<i>ONETWO</i> TODAY"),
        ("<ruby>漢<rt>a<br/>b<img src=''/></rt>字<rt>c</rt></ruby> x", "漢字 x", "X 漢字"),
    ],
)
def test_readings_and_breaks_of_words_belong_to_the_source(name, page, content, text, turned):
    """The words of a sentence stood in the reading, and a part of a word was a text of its own."""
    whole = page.format(content)
    assert translated(name, whole, aligned(text))[1] == whole
    assert translated(name, whole, backwards) == ([text], page.format(turned))


@pytest.mark.parametrize("name", ["a.html", "a.xhtml"])
def test_a_reading_within_an_element_that_stays_stays_and_is_not_sent(name):
    page = '<html xmlns="http://www.w3.org/1999/xhtml"><body>{}</body></html>'
    kept = "<span translate='no'><ruby>one<rt>two</rt></ruby></span>"
    others = "<ruby> <rb>b</rb> <rtc><rt>c</rt> <rt>d</rt></rtc> </ruby>"
    written = translated(name, page.format(f"a {kept} {others}"), backwards)
    assert written == (["a one b"], page.format(f"B {kept} A"))


def test_a_base_of_several_texts_stays_in_a_book():
    """It had the beginning of the element with the first text, and not its end with the second one."""
    page = '<html xmlns="http://www.w3.org/1999/xhtml"><body><p><ruby>12<br/>one</ruby></p></body></html>'
    assert translated("a.xhtml", page, backwards) == ([], page)


@pytest.mark.parametrize("name", ["a.html", "a.xhtml"])
@pytest.mark.parametrize(
    ("content", "texts", "expected"),
    [
        (
            "one <select><option>a b</option></select> two <button>c <b>d</b></button> three",
            ["a b", "c d", "one two three"],
            "THREE TWO <button><b>D</b> C</button> ONE <select><option>B A</option></select>",
        ),
        (
            "one <meter>5 a</meter> two <progress>6</progress> three <picture><img src=''/></picture> four",
            ["5 a", "one two three four"],
            "FOUR THREE <picture><img src=''/></picture> TWO <progress>6</progress> ONE <meter>A 5</meter>",
        ),
        ("<button>a <i>b</i></button> one", ["a b", "one"], "<button><i>B</i> A</button> ONE"),
    ],
)
def test_embedded_elements_stay_within_their_sentence(name, content, texts, expected):
    page = '<html xmlns="http://www.w3.org/1999/xhtml"><body><p>{}</p></body></html>'
    assert translated(name, page.format(content), backwards) == (texts, page.format(expected))


def test_a_reading_ends_before_a_block_and_where_its_end_may_be_left_out():
    page = "<p><ruby>one<rt>a<rp>(<rt>b</ruby> two<p><ruby>three<rt>c<p>four"
    assert translated("a.html", page, backwards) == (
        ["one two", "three", "four"],
        "<p>TWO ONE<p>THREE<p>FOUR",
    )


def test_letters_of_korean_windows_are_read_in_a_page_of_euc_kr():
    content = "<meta charset=euc-kr><p>똠".encode("cp949")
    [segment] = HtmlDocument(content, Path("a.html")).segments
    assert segment.text == "똠"


def test_letters_that_an_encoding_lacks_are_written_as_numbers():
    document = HtmlDocument(b"<meta charset=latin1><p>one</p>", Path("a.html"))
    document.segments[0].translate(capitals("금"))
    assert document.content() == b"<meta charset=latin1><p>&#44552;</p>"


@pytest.mark.parametrize(
    ("page", "texts", "expected"),
    [
        (
            '<p>one <img src=a alt="cat"> two <svg><path/></svg> three',
            ["cat", "one two three"],
            '<p>THREE TWO <svg><path/></svg> ONE <img src=a alt="CAT">',
        ),
        ("<p>so <math><mi>x</mi></math> is", ["so x is"], "<p>IS <math><mi>x</mi></math> SO"),
        ("<p>one <a><img src=a> two</a> three", ["one two three"], "<p>THREE <a><img src=a> TWO</a> ONE"),
        ("<p>one two <img src=a></p>", ["one two"], "<p>TWO ONE <img src=a></p>"),
        ("<img src=a> one<img src=b>two", ["one", "two"], "<img src=a> ONE<img src=b>TWO"),
        ("<a><svg></svg>one two</a>", ["one two"], "<a><svg></svg>TWO ONE</a>"),
        ("<p>one <input name=a> two", ["one two"], "<p>TWO ONE <input name=a>"),
        (
            "<label>one <input placeholder=x> two</label>",
            ["x", "one two"],
            '<label>TWO ONE <input placeholder="X"></label>',
        ),
        (
            "one <select><option>a b<option>c d</select> two <button title=e>f g</button>, three",
            ["a b", "c d", "e", "f g", "one two , three"],
            'THREE , TWO <button title="E">G F</button> ONE <select><option>B A<option>D C</select>',
        ),
        ("one <audio src=a></audio> two", ["one two"], "TWO ONE <audio src=a></audio>"),
        (
            "one <object data=a><p>b c <input> d</object> two",
            ["b c", "d", "one two"],
            "TWO ONE <object data=a><p>C B <input> D</object>",
        ),
        ("<label>one <input></label> <label>two <input></label>", ["one", "two"], None),
        ("one <select><option>a</p> two", ["one", "a", "two"], None),
        ("<noscript>one <b>two</b></noscript>", ["one two"], "<noscript><b>TWO</b> ONE</noscript>"),
        ("<template>no</template><textarea>no</textarea>one", ["one"], None),
        (
            "<meta name=Twitter:title content='a b'><meta property=twitter:description content='c'>",
            ["a b", "c"],
            '<meta name=Twitter:title content="B A"><meta property=twitter:description content="C">',
        ),
    ],
)
def test_pictures_and_formulas_within_a_sentence_stay_in_it(page, texts, expected):
    expected = expected or re.sub("one|two|(?<=>)a", lambda found: found[0].upper(), page)
    assert translated("a.html", page, backwards) == (texts, expected)


PAGE = """<!DOCTYPE html>\r
<html lang="de" xml:lang='de'><head><meta charset="utf-8"><meta name="description" content="eins">\r
<meta property="og:title" content='zwei'><meta name="author" content="Kim"><title>drei</title></head>\r
<body class=x>  <button title="vier">fünf</button><input type=submit value="sechs">\r
<input type="text" value="no">\r
<img src=a.png alt="sieben &amp; acht"><a name="x"></a><select><option value=no>neun</option></select>\r
<pre>no\r\nno</pre><script>var no = "<p>no</p>"</script></body></html>\r
"""


def test_what_people_see_is_translated_and_the_rest_stays_byte_by_byte():
    texts, written = translated("a.html", PAGE, capitals)
    shown = ["eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben & acht", "neun"]
    assert texts == shown
    expected = PAGE.replace("'zwei'", '"zwei"')
    for text in [*shown, "sieben", "acht"]:
        expected = expected.replace(f"{text}", text.upper())
    assert written == expected


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (PAGE, PAGE.replace("lang=\"de\" xml:lang='de'", 'lang="pt-BR" xml:lang="pt-BR"')),
        ("<HTML LANG=ko><p lang=ko>a", '<HTML LANG="pt-BR"><p lang=ko>a'),
        ("<html lang><p>a</p>", "<html lang><p>a</p>"),
        ("<html><p>a</p>", "<html><p>a</p>"),
        ("<p>a</p>", "<p>a</p>"),
        ('<html translate=no lang="ko">a', '<html translate=no lang="ko">a'),
    ],
)
def test_the_language_of_a_page_becomes_that_of_its_translation(before, after):
    document = HtmlDocument(before.encode(), Path("a.html"))
    assert document.content().decode() == before
    document.target_language = "pt-BR"
    assert document.content().decode() == after


@pytest.mark.parametrize(
    ("page", "target", "links", "written"),
    [
        (
            "one <a href=a>two</a> <a href=b>three</a> <a href=c>four</a> <a href=d>five</a>",
            "A B C",
            "0 0 1",
            "<a href=c>A</a> <a href=b>B</a> <a href=a>C</a>",
        ),
        (
            "<p>one <a href=a>two</a> <a href=b>three</a></p>",
            "A B C",
            "0 0 1",
            "<p>A <a href=b>B</a> <a href=a>C</a></p>",
        ),
        (
            "<li>one<a name=n></a><a href=u><br/>1</a></li>",
            "A B",
            "0 0",
            "<li>A B<a name=n></a><a href=u><br/>1</a></li>",
        ),
    ],
)
def test_a_link_has_a_word_of_the_target_if_there_are_enough(page, target, links, written):
    assert translated("a.html", page, aligned(target, links))[1] == written


@pytest.mark.parametrize("seed", range(200))
def test_no_link_is_lost_while_there_are_words_and_no_empty_element_ever(seed):
    chance = random.Random(seed)
    number = 0

    def inside(depth: int, is_linked: bool) -> str:
        nonlocal number
        parts = list[str]()
        for _ in range(chance.randint(1, 5)):
            kind = chance.choice(["word", "word", "link", "anchor", "bold", "break", "fixed"])
            number += 1
            if kind == "link" and not is_linked:
                parts.append(f"<a href=u{number}>w{number} {inside(depth + 1, True)}</a>")
            elif kind == "anchor":
                parts.append(f"<a name=n{number}></a>" if not is_linked else f"<span id=n{number}></span>")
            elif kind == "bold" and depth < 3:
                parts.append(f"<b>{inside(depth + 1, is_linked)}</b>")
            elif kind == "break":
                parts.append("<br/>")
            elif kind == "fixed":
                parts.append("<code>x</code>")
            else:
                parts.append(f"word{number}")
        return chance.choice(["", " "]).join(parts)

    page = f"<p>{inside(0, False)}</p>"
    num_words = list[int]()

    def translate(text: str) -> GenerateResponse:
        num_sources, num_targets = len(text.split()), chance.randint(1, 6)
        num_words.append(num_targets)
        links = " ".join(str(chance.randrange(num_sources)) for _ in range(num_targets))
        return aligned(" ".join(f"T{place}" for place in range(num_targets)), links)(text)

    written = translated("a.html", page, translate)[1]
    for tag in re.findall(r"<(?:a name|span id)=n\d+></\w+>|<br/>", page):
        assert written.count(tag) == page.count(tag)
    if "<br/>" not in page and "<code" not in page and num_words:
        hrefs = re.findall("href=u", page)
        assert len(re.findall("href=u", written)) >= min(len(hrefs), num_words[0])
    assert written.count("<a ") == written.count("</a>")


def test_links_of_a_menu_are_texts_of_their_own():
    page = "<nav><a href=1>one</a> | <a href=2>two</a> &middot; <b>three | four</b> | five</nav>"
    texts, written = translated("a.html", page, capitals)
    assert texts == ["one", "two", "three | four | five"]
    assert written == "<nav><a href=1>ONE</a> | <a href=2>TWO</a> &middot; <b>THREE | FOUR</b> | FIVE</nav>"
