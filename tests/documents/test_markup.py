"""Tags around words, whatever a model does with these: each span stays one, and none is lost or doubled."""

import html
import io
import re
import zipfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seq2seq_serve.documents.page import HtmlDocument
from tests.documents.answers import aligned, translated
from tests.documents.large import document_of

_SINGLE, _FORMATTING = ("a", "q"), ("b", "em")
_TOKEN = re.compile(r"<(/?)(\w+)[^>]*>|([^<]+)")


@st.composite
def inline_pages(draw, others=()):
    """A paragraph of words in random tags, each with a number, and a random target with its alignment.

    Among the words are `others`, each with a number.
    """
    number = iter(range(1000))

    def content(depth):
        parts = []
        for _ in range(draw(st.integers(1, 3))):
            if depth < 3 and draw(st.booleans()):
                name = draw(st.sampled_from(_SINGLE + _FORMATTING))
                parts.append(f"<{name} n={next(number)}>{content(depth + 1)}</{name}>")
            elif others and draw(st.booleans()):
                parts.append(draw(st.sampled_from(others)).format(next(number)))
            else:
                parts.append(draw(st.sampled_from(["w", "w w", "w, w", "“w”", "w.", "w-w"])))
        return draw(st.sampled_from([" ", " ", ""])).join(parts)

    page = content(0) + " w"
    num_words = len(re.sub("<[^>]*>", "", page).split())
    targets = draw(st.lists(st.sampled_from(["v", "v,", "(v", "v.", "v"]), min_size=1, max_size=9))
    links = draw(st.lists(st.integers(0, num_words - 1), min_size=len(targets), max_size=len(targets)))
    return page, " ".join(targets), " ".join(map(str, links)) if draw(st.booleans()) else ""


def spans(page: str) -> list[tuple[str, str]]:
    """The tags, each with the text inside; checks that they are nested properly."""
    opened, found = [], []
    for token in _TOKEN.finditer(page):
        if token[3]:
            opened = [(tag, text + token[3]) for tag, text in opened]
        elif token[1]:
            tag, text = opened.pop()
            assert tag.startswith(f"<{token[2]} ")
            found.append((tag, text))
        else:
            opened.append((token[0], ""))
    assert not opened
    return found


def tags_of_words(page: str) -> list[set[str]]:
    """For each word of a page the tags that are around all of its letters."""
    opened, words, is_inside = [], [], False
    for token in _TOKEN.finditer(page):
        if token[1]:
            opened.pop()
        elif token[2]:
            opened.append(token[0])
        for part in re.findall(r"\s+|\S", token[3] or ""):
            if part.isspace():
                is_inside = False
                continue
            words += [[]] * (not is_inside)
            is_inside = True
            if part.isalnum():
                words[-1] = [*words[-1], set(opened)]
    return [set.intersection(*tags) for tags in words]


@given(inline_pages())
def test_tags_are_neither_lost_nor_doubled_nor_empty_and_the_text_is_the_target(case):
    page, target, links = case
    _, written = translated("a.html", f"<p>{page}</p>", aligned(target, links))
    check_tags(page, written.removeprefix("<p>").removesuffix("</p>"), target, links)


def check_tags(page: str, inner: str, target: str, links: str) -> None:
    """Checks a page and what is written for it, with the target and its alignment."""
    assert html.unescape(re.sub("<[^>]*>", "", inner)) == target
    numbers = Counter(tag for tag, text in spans(inner) if text.strip())
    assert len(spans(inner)) == numbers.total()
    assert numbers.keys() <= {tag for tag, _ in spans(page)}
    assert all(number == 1 for tag, number in numbers.items() if is_single(tag))
    words = tags_of_words(page)
    belongs = set().union(*(words[int(link)] for link in links.split()))
    assert {tag for tag in belongs if is_single(tag)} <= numbers.keys()
    if all(tag in belongs for tag, _ in spans(page) if is_single(tag)):  # and no other tag gives it a word
        assert belongs <= numbers.keys()


_RUN = '<{0}r><{0}rPr>{1}</{0}rPr><{0}t xml:space="preserve">{2}</{0}t></{0}r>'
# For each kind: the part of the archive, the prefix of its names, and the elements that are around texts
_OFFICE = {
    ".docx": ("word/document.xml", "w:", {"a": "hyperlink", "q": "smartTag"}),
    ".pptx": ("ppt/slides/slide1.xml", "a:", {}),
    ".odt": ("content.xml", "text:", {"a": "a", "q": "meta", "b": "span", "em": "span"}),
    ".epub": ("a.xhtml", "", {name: name for name in _SINGLE + _FORMATTING}),
}


def in_office(page: str, suffix: str) -> bytes:
    """A document with a paragraph, whose tags are elements around texts, or properties of runs."""
    _, prefix, names = _OFFICE[suffix]
    parts, properties = [f"<{prefix}p>"], []
    for token in _TOKEN.finditer(page):
        name, number = token[2], re.sub(r"\D", "", token[0])
        if token[3] and names.keys() > {"b"}:
            parts.append(token[3])
        elif token[3]:
            parts.append(_RUN.format(prefix, "".join(properties), token[3]))
        elif name in names:
            opened = f'<{prefix}{names[name]} n="{name} {number}">'
            parts.append(f"</{prefix}{names[name]}>" if token[1] else opened)
        elif token[1]:
            properties.pop()
        else:
            properties.append(f'<{prefix}{name} n="{name} {number}"/>')
    return document_of(suffix, "".join([*parts, f"</{prefix}p>"]))


def in_page(written: bytes, suffix: str) -> str:
    """The paragraph of a document with tags of HTML."""
    with zipfile.ZipFile(io.BytesIO(written)) as archive:
        root = ElementTree.fromstring(archive.read(_OFFICE[suffix][0]))
    return _shown(next(one for one in root.iter() if one.tag.endswith("}p")))


def _shown(element: ElementTree.Element) -> str:
    parts = [html.escape(element.text or "")]
    for child in element:
        tags = [one.get("n").split() for one in ([child] if child.get("n") else child.iter()) if one.get("n")]
        is_run = child.tag.endswith("}r")
        inside = html.escape("".join(child.itertext())) if is_run else _shown(child)
        parts += [f"<{name} n={number}>" for name, number in tags]
        parts += [inside, *(f"</{name}>" for name, _ in reversed(tags)), html.escape(child.tail or "")]
    return "".join(parts)


@pytest.mark.parametrize("suffix", _OFFICE)
@given(inline_pages())
def test_tags_of_office_programs_are_neither_lost_nor_doubled_nor_empty(suffix, case):
    page, target, links = case
    if suffix == ".pptx":  # whose links are properties
        page = re.sub("</?[aq]( [^>]*)?>", "", page)
    content = in_office(page, suffix)
    _, written = translated(f"a{suffix}", content, aligned(target, links))
    check_tags(in_page(content, suffix), in_page(written, suffix), target, links)


def is_single(tag: str) -> bool:
    return tag[1] in _SINGLE


_OTHERS = (
    "<!-- {} -->",
    "<i n={}></i>",
    "<a id={}></a>",
    "<u n={}><!-- --></u>",
    "<code n={}>c <i>d</i></code>",
)


@given(inline_pages(_OTHERS))
def test_what_is_not_translated_stays_exactly_once(case):
    page, target, links = case
    _, written = translated("a.html", f"<p>{page}</p>", aligned(target, links))
    other = "|".join(re.escape(one).replace(r"\{\}", r"\d+") for one in _OTHERS)
    assert sorted(re.findall(other, written)) == sorted(re.findall(other, page))
    text = re.sub("<[^>]*>", "", re.sub(other, "", written))
    if "<code" in page:  # a word of the target may be in its place
        assert set(text) <= set(target) | {" "}
    else:
        assert text.strip() == target


@given(st.lists(st.integers(0, 5), min_size=1), st.sampled_from(["b", "a"]))
def test_a_span_goes_on_over_single_words_and_is_split_only_where_it_must_be(links, name):
    page = f"<p>x x <{name}>y y</{name}> x x</p>"
    target = " ".join("v" * len(links))
    _, written = translated("a.html", page, aligned(target, " ".join(map(str, links))))
    assert re.sub("<[^>]*>", "", written) == target
    runs = re.split(rf"</?{name}>", written.removeprefix("<p>").removesuffix("</p>"))
    belongs = [link in (2, 3) for link in links]
    between = [len(text.split()) for text in runs[2:-1:2]]
    if name == "b":
        assert all(number > 1 for number in between)
        assert sum(len(text.split()) for text in runs[1::2]) >= sum(belongs)
        assert bool(runs[1::2]) == any(belongs)
    else:
        assert len(runs) == 3  # also if no word belongs to it


@given(inline_pages())
def test_a_target_that_is_the_source_leaves_the_page_as_it_was(case):
    page = f"<p>{case[0]}</p>"
    text = HtmlDocument(page.encode(), Path("a.html")).segments[0].text
    places = " ".join(map(str, range(len(text.split()))))
    assert translated("a.html", page, aligned(text, places))[1] == page
    written = translated("a.html", page, aligned(text.replace("w", "W"), places))[1]
    assert written == page.replace("w", "W")


SENTENCES = [
    # German to English: one link over several words, a verb from the end of the sentence, an object before it
    (
        '<p>Ich bin <a href="x">ein Student der Physik</a>.</p>',
        ("I am a student of physics.", "0 1 2 3 4 5"),
        '<p>I am <a href="x">a student of physics</a>.</p>',
    ),
    (
        '<p>Lesen Sie <a href="/h">das ganze <em>Handbuch</em></a> bitte.</p>',
        ("Please read the whole manual.", "5 0 2 3 4"),
        '<p>Please read <a href="/h">the whole <em>manual</em></a>.</p>',
    ),
    (
        "<p>Ich habe <b>gestern das Buch gelesen</b>.</p>",
        ("I read the book yesterday.", "0 5 3 4 2"),
        "<p>I <b>read the book yesterday</b>.</p>",
    ),
    (
        '<p>Ich habe <a id="x">das rote <em>Buch</em></a> gestern gelesen.</p>',
        ("Yesterday I read the red book.", "5 0 6 2 3 4"),
        '<p>Yesterday I read <a id="x">the red <em>book</em></a>.</p>',
    ),
    (
        "<p>Das Haus <b>meines Vaters</b> ist <i>sehr groß</i>.</p>",
        ("My father's house is very big.", "2 3 1 4 5 6"),
        "<p><b>My father's</b> house is <i>very big</i>.</p>",
    ),
    (
        '<p>Klicken Sie auf <a href="#">Speichern</a>, um die <b>Datei</b> zu sichern.</p>',
        ("Click Save to secure the file.", "0 3 4 8 5 6"),
        '<p>Click <a href="#">Save</a> to secure the <b>file</b>.</p>',
    ),
    (
        "<p><b>Hinweis:</b> Bitte <i>nicht</i> öffnen!</p>",
        ("Note: Please do not open!", "0 1 2 2 3"),
        "<p><b>Note:</b> Please <i>do not</i> open!</p>",
    ),
    # A separable verb: formatting is split, and a link stays with the longer part
    (
        "<p>Er <b>rief sie an</b>, und kam.</p>",
        ("He came after he had called her up.", "0 5 4 0 1 1 2 3"),
        "<p>He came after he <b>had called her up</b>.</p>",
    ),
    (
        "<p>Sie <i>haben nicht</i> das neue Haus <b>gesehen</b>.</p>",
        ("They have seen the new house not.", "0 1 6 3 4 5 2"),
        "<p>They <i>have</i> <b>seen</b> the new house <i>not</i>.</p>",
    ),
    (
        '<p>Sie <a href="y">haben nicht</a> das neue Haus gesehen.</p>',
        ("They have seen the new house nowhere.", "0 1 6 3 4 5 2"),
        '<p>They have seen the new house <a href="y">nowhere</a>.</p>',
    ),
    # A word within the span that belongs to another source word
    (
        '<p>Wir <a href="p">suchen neue Leute</a> dringend.</p>',
        ("We look urgently for new people.", "0 1 4 1 2 3"),
        '<p>We <a href="p">look urgently for new people</a>.</p>',
    ),
    # The target has no word for the word of a link
    (
        "<p>Er kommt <a href=1>morgen</a> an.</p>",
        ("He arrives.", "0 1"),
        "<p>He <a href=1>arrives</a>.</p>",
    ),
    (
        "<p><a href=1>eins</a> und <a href=2>zwei</a>, <a href=3>drei</a></p>",
        ("One, one, three, two", "0 0 3 2"),
        "<p><a href=1>One, one</a>, <a href=3>three</a>, <a href=2>two</a></p>",
    ),
    (
        '<p>Das ist <sup><a href="#f1" id="r1">[1]</a></sup> ein <b>Test</b>.</p>',
        ("That is a test [1].", "0 1 3 4 2"),
        '<p>That is a <b>test</b> <sup><a href="#f1" id="r1">[1]</a></sup>.</p>',
    ),
    (  # the target writes the number of a note at the end of a word
        '<p>Ihr <em>Passwort</em><a href="/n1" id="r1">1</a>.</p>',
        ("Your password1.", "0 1"),
        '<p>Your <em>password</em><a href="/n1" id="r1">1</a>.</p>',
    ),
    (
        '<p>Ihr <em>Passwort</em> stimmt<a href="/n1" id="r1">1</a>.</p>',
        ("Your password1.", "0 1"),
        '<p>Your <em>password</em><a href="/n1" id="r1">1</a>.</p>',
    ),
    (
        "<p>Die <a href=x>App &bdquo;Konto&ldquo;</a>, <i>bitte</i>.</p>",
        ('The "Account" app, please.', "0 2 1 3"),
        '<p>The <a href=x>"Account" app</a>, <i>please</i>.</p>',
    ),
    ("<p>un<b>glaub</b>lich gut</p>", ("incredibly good", "0 1"), "<p><b>incredibly</b> good</p>"),
    # Korean to English: particles at the ends of words, the verb at the end
    (
        '<p><a href="/w">나는 학생이다</a>.</p>',
        ("I am a student.", "0 1 1 1"),
        '<p><a href="/w">I am a student</a>.</p>',
    ),
    (
        '<p>오늘은 <b>정말 <a href="/f">금요일</a></b> 입니다.</p>',
        ("Today is really Friday.", "0 3 1 2"),
        '<p>Today is <b>really <a href="/f">Friday</a></b>.</p>',
    ),
    (
        '<p>그는 <a href="/a">어제 산 책</a>을 <b>읽었다</b>.</p>',
        ("He read the book he bought yesterday.", "0 4 3 3 2 2 1"),
        '<p>He <b>read</b> <a href="/a">the book he bought yesterday</a>.</p>',
    ),
    # What stays as it is: in its place, whether the model copies it, translates it or leaves it out
    (
        "<p>Mit <code>npm install</code> installieren Sie alles.</p>",
        ("Install everything with npm install.", "3 5 0 1 2"),
        "<p>Install everything with <code>npm install</code>.</p>",
    ),
    (
        "<p>Mit <code>npm install</code> installieren Sie alles.</p>",
        ("Install everything with NPM installation.", "3 5 0 1 2"),
        "<p>Install everything with <code>npm install</code>.</p>",
    ),
    (
        "<p>Mit <code>npm install</code> installieren Sie alles.</p>",
        ("Install everything with it.", "3 5 0 0"),
        "<p>Install everything with it <code>npm install</code>.</p>",
    ),
    # A word that the alignment gives to what the model leaves out stays
    (
        '<p>I am a student <span translate="no">(Smith, 2020)</span>.</p>',
        ("Ich bin Student.", "0 1 4"),
        '<p>Ich bin Student <span translate="no">(Smith, 2020)</span>.</p>',
    ),
    (
        '<p>See <span translate="no">Figure 3</span> there.</p>',
        ("Siehe Abbildung 3 dort.", "0 1 2 3"),
        '<p>Siehe <span translate="no">Figure 3</span> dort.</p>',
    ),
    (
        "<p>Ich rufe <code>f</code> morgen auf.</p>",
        ("I will call it tomorrow.", "0 2 2 2 3"),
        "<p>I will call it <code>f</code> tomorrow.</p>",
    ),
    (
        "<p>Drücken Sie <kbd>Strg</kbd>+<kbd>C</kbd>, um zu kopieren.</p>",
        ("Press Ctrl+C to copy.", "0 2 4 5"),
        "<p>Press <kbd>Strg</kbd>+<kbd>C</kbd> to copy.</p>",
    ),
    (
        '<p>Die Marke <span class="notranslate">Schöne <i>Welt</i></span> ist alt.</p>',
        ("The brand Beautiful World is old.", "0 1 2 3 4 5"),
        '<p>The brand <span class="notranslate">Schöne <i>Welt</i></span> is old.</p>',
    ),
    (
        '<p>Es gilt <span class="math inline"><em>x</em><sup>2</sup></span> immer.</p>',
        ("It always holds.", "0 3 1"),
        '<p>It always holds <span class="math inline"><em>x</em><sup>2</sup></span>.</p>',
    ),
    (
        '<p>Es gilt <span class="katex"><b>a</b></span> immer.</p>',
        ("It holds a always.", "0 1 2 3"),
        '<p>It holds <span class="katex"><b>a</b></span> always.</p>',
    ),
    (
        "<p>Die <a href=x><code>map</code>-Funktion</a> ruft <code>f</code> auf.</p>",
        ("The map function calls f.", "0 1 1 2 3"),
        "<p>The <a href=x><code>map</code> function</a> calls <code>f</code>.</p>",
    ),
    # Without an alignment, words belong to those of the source in their order
    (
        '<p>Siehe <a href="m">das Handbuch</a> und <b>die Liste</b>.</p>',
        ("See the manual and the list.", ""),
        '<p>See <a href="m">the manual</a> and <b>the list</b>.</p>',
    ),
    # Scripts without spaces
    (
        '<p>我是<a href="x">学生</a>。</p>',
        ("I am a student.", ""),
        '<p>I am <a href="x">a student</a>.</p>',
    ),
    (
        '<p>I am <a href="x">a student</a>.</p>',
        ("私は|学生|です。", "0 3 1"),
        '<p>私は<a href="x">学生</a>です。</p>',
    ),
    (
        '<p>I am <a href="x">a student</a>.</p>',
        ("私は学生です。", ""),
        '<p>私は学<a href="x">生です</a>。</p>',
    ),
]


@pytest.mark.parametrize(("page", "answer", "expected"), SENTENCES)
def test_formatting_follows_the_words_of_a_sentence(page, answer, expected):
    assert translated("a.html", page, aligned(*answer))[1] == expected


@pytest.mark.parametrize(
    ("code", "target", "expected"),
    [
        ("--flag", "Benutze —flag hier", "Benutze C hier"),
        ("--flag", "Benutze (-flag) hier", "Benutze (C) hier"),
        ("foo()", "Benutze (Foo()), hier", "Benutze (C), hier"),
        ("$HOME", "Benutze „$Home“ hier", "Benutze „C“ hier"),
        ("{}", "Benutze (x) hier", "Benutze (x C) hier"),
    ],
)
def test_code_has_its_own_marks_once(code, target, expected):
    """The marks of its translation stood beside those of the code."""
    markup = f"<code>{code}</code>"
    _, written = translated("a.html", f"<p>Use {markup} here</p>", aligned(target, "0 1 2"))
    assert written == f"<p>{expected.replace('C', markup)}</p>"
