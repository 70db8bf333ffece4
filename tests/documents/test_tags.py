"""Tags in strings of programs follow their words; variables in angle brackets stay parts of the text."""

import json
import re
from functools import partial
from html import escape
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seq2seq_serve.client.files.memory import TranslationMemory
from seq2seq_serve.documents.kinds import FILES
from seq2seq_serve.documents.segments import FormattedSoftwareText, software_text, with_tags
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateResponse, Hypothesis
from tests.documents.answers import aligned, backwards, translated

# How each kind has a string; its texts are written as that says
KINDS = {
    "a.json": ('{"k": %s}', json.dumps),
    "a.yaml": ("k: %s\n", json.dumps),
    "a.po": ('msgid %s\nmsgstr ""\n', json.dumps),
    "a.properties": ("k=%s\n", str),
    "a.strings": ('"k" = %s;\n', json.dumps),
    "a.resx": ('<root><data name="k"><value>%s</value></data></root>', partial(escape, quote=False)),
    "a.stringsdict": ("<plist><dict><key>other</key><string>%s</string></dict></plist>", escape),
    "a.ts": ("<TS><message><source>%s</source></message></TS>", escape),
    "a.xlf": (
        '<xliff version="1.2"><file><body><trans-unit id="1"><source>%s</source></trans-unit></body></file>'
        "</xliff>",
        escape,
    ),
    "strings.xml": (
        '<resources><string name="k">%s</string></resources>',
        lambda text: escape(text, quote=False).replace('"', r"\""),
    ),
}


def in_json(text, answer=backwards):
    """The texts of a string, and its translation."""
    texts, written = translated("a.json", json.dumps([text]), answer)
    return texts, json.loads(written)[0]


@pytest.mark.parametrize("name", KINDS)
def test_tags_follow_their_words_in_all_kinds(name):
    content, written = KINDS[name]
    source, target = '<b>one</b> two <a href="x">three</a>', '<a href="x">THREE</a> TWO <b>ONE</b>'
    texts, result = translated(name, content % written(source), backwards)
    assert texts == ["one two three"]
    assert written(target).removesuffix('"').removeprefix('"') in result


@pytest.mark.parametrize(
    ("source", "texts", "target"),
    [
        ("one two.<br>three<br/>four", ["one two.", "three", "four"], "TWO. ONE<br>THREE<br/>FOUR"),
        ("<p>one two</p>", ["one two"], "<p>TWO ONE</p>"),
        ("one<p>two<li>three", ["one", "two", "three"], "ONE<p>TWO<li>THREE"),
        ("<0>one</0> two", ["one two"], "TWO <0>ONE</0>"),
        ("<link>one</link> two", ["one two"], "TWO <link>ONE</link>"),
        ("<b>one <i>two</i></b> three", ["one two three"], "THREE <b><i>TWO</i> ONE</b>"),
        ("<b>one\ntwo</b> three", ["one", "two three"], "<b>ONE\n</b>THREE TWO"),
        ("<i class='x'></i> one two", ["one two"], "<i class='x'></i> TWO ONE"),
        ("one <img src='x'> two", ["one two"], "TWO ONE <img src='x'>"),
        ("one <code>a b</code> two", ["one a b two"], "TWO <code>a b</code> ONE"),
        ("<b>{name}</b> two", ["{name} two"], "TWO <b>{NAME}</b>"),
        ('<a title="x > y">one</a> two', ["one two"], 'TWO <a title="x > y">ONE</a>'),
        ("one <b>two", ["one two"], "<b>TWO ONE"),
        ("<b>one</b> two <b>three", ["one two three"], "<b>THREE TWO <b>ONE</b>"),
        ("one</b> two", ["one two"], "TWO ONE</b>"),
        ("<b><i>one</b></i> two", ["one two"], "TWO <b><i>ONE</b></i>"),
        ("one<wbr>two three", ["onetwo three"], "THREE ONE<wbr>TWO"),
        ("one <input size=3> two <b>three</b>", ["one two three"], "<b>THREE</b> TWO ONE <input size=3>"),
        ("four<sup>1</sup> two", ["four two"], "TWO FOUR<sup>1</sup>"),
        ('one<a href="#n">[1]</a> two', ["one two"], 'TWO ONE<a href="#n">[1]</a>'),
        ("one m<sup>2</sup> two", ["one m2 two"], "TWO M<sup>2</sup> ONE"),
        ("&lt;p>one &lt;b>two&lt;/b>&lt;/p>", ["one two"], "&lt;p>&lt;b>TWO&lt;/b> ONE&lt;/p>"),
        ("one &lt;p&gt; and &lt;/p&gt;", ["one <p> and </p>"], "&lt;/P&gt; AND &lt;P&gt; ONE"),
    ],
)
def test_markup_of_strings_is_read_as_html(source, texts, target):
    assert in_json(source) == (texts, target)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("a < b and c > d", "D > C AND B < A"),
        ("open <filename> now", "NOW <FILENAME> OPEN"),
        ("one <b> two", "TWO <B> ONE"),
        ("<b>one</b> <filename>", "<FILENAME> <b>ONE</b>"),
        ("<x><y>one</x></y> two", "TWO <x><Y>ONE</x></Y>"),
        ("<name/> one", "ONE <NAME/>"),
        ("<img> one", "ONE <IMG>"),
        *[("{n, plural, one {<b>a</b> <br> file} other {b}}",) * 2],
    ],
)
def test_what_is_not_a_tag_stays_in_the_text(source, target):
    assert in_json(source)[1] == target


@pytest.mark.parametrize(
    ("source", "text", "target"),
    [
        ("<b>R&amp;D</b> one", "R&D one", "ONE <b>R&amp;D</b>"),
        ("<b>R&D</b> one", "R&D one", "ONE <b>R&D</b>"),
        ("R&amp;D one", "R&D one", "ONE R&amp;D"),
        ('&quot;one&quot; it&#39;s "x"', '"one" it\'s "x"', "&quot;X&quot; IT&#39;S &quot;ONE&quot;"),
        ("<b>a &lt; b</b> &gt;c", "a < b >c", "&gt;C <b>B &lt; A</b>"),
        ("a &copy b&x; <c", "a &copy b&x; <c", "<C B&X; &COPY A"),
        ("a &lt;b <3>", "a <b <3>", "<3> &lt;B A"),
        ("a & &amp;lt; b", "a & &lt; b", "B &amp;LT; & A"),
    ],
)
def test_references_are_written_as_the_string_has_them(source, text, target):
    texts, written = in_json(source)
    assert texts == [text]
    assert written == target


def test_a_choice_within_xml_is_not_cut():
    choice = escape("{n, plural, one {<b>a</b><br> file} other {b files}}")
    content = KINDS["a.resx"][0] % choice
    assert translated("a.resx", content, backwards) == ([], content)


_TAGS = "<wbr>", "<input type='t'>", "<b>", "</b>", "<i>", "</i>", "<x/>", "<a t='v > w'>", "</a>", "<name>"
_IN_TAGS = re.compile(r"<(?:'[^']*'|[^'<>])*>")


@pytest.mark.parametrize("name", ["a.json", "a.resx"])
@given(
    st.lists(st.tuples(st.sampled_from(["w ", "", "&lt;w ", " "]), st.sampled_from(("", *_TAGS)))),
    st.permutations(range(20)),
)
def test_tags_and_words_of_a_string_are_kept_whatever_lacks_an_end(name, parts, order):
    """Where a tag was a text, `&lt;b` was written as `<b`, and what followed was a part of the tag."""
    kind, written_as = KINDS[name]
    text = "w " + "".join(word + tag for word, tag in parts) + " w"

    def answer(source):
        words = re.findall(r"(?:<(?:'[^']*'|[^'<>])*>|[^\s<]|<(?![a-z/]))+|<w", source)
        numbers = [*(number for number in order if number < len(words)), *range(len(order), len(words))]
        return aligned(" ".join("v" if words[number] == "w" else words[number] for number in numbers))(source)

    _, result = translated(name, kind % written_as(text), answer)
    result = json.loads(result)["k"] if name == "a.json" else ElementTree.fromstring(result)[0][0].text
    assert sorted(_IN_TAGS.findall(result)) == sorted(_IN_TAGS.findall(text))
    assert len(re.findall("[vw]", _IN_TAGS.sub("", result))) == len(re.findall("w", _IN_TAGS.sub("", text)))


def test_each_tag_is_written_once_although_its_words_are_apart():
    answer = GenerateResponse()
    answer.CopyFrom(backwards("one two three"))
    links = answer.hypotheses[0].word_alignment.links
    links[0].source_word, links[1].source_word, links[2].source_word = 0, 2, 0
    written = in_json("<b>one</b> two three", lambda _: answer)[1]
    assert sorted(re.findall("<.*?>", written)) == ["</b>", "<b>"]


def test_android_keeps_tags_around_its_elements_and_spaces_at_the_ends():
    string = r'\u0020&lt;b><xliff:g xmlns:xliff="u">%s</xliff:g>&lt;/b> one two\\\u00A0'
    texts, written = translated("strings.xml", KINDS["strings.xml"][0] % string, backwards)
    assert texts == ["%s one two\\"]
    expected = r'\u0020TWO\\ ONE &lt;b><xliff:g xmlns:xliff="u">%s</xliff:g>&lt;/b>\u00A0'
    assert f'"k">{expected}</string>' in written


def test_android_keeps_numbers_of_notes_beside_the_words_before_them():
    string = 'one note<sup><a href="#n">1</a></sup> and m<sup>2</sup>'
    texts, written = translated("strings.xml", KINDS["strings.xml"][0] % string, backwards)
    assert texts == ["one note and m2"]
    assert '"k">M<sup>2</sup> AND NOTE ONE<sup><a href="#n">1</a></sup></string>' in written


def test_android_does_not_take_a_backslash_for_a_space():
    written = translated("strings.xml", KINDS["strings.xml"][0] % r"one two\\u0020", backwards)[1]
    assert r'"k">TWO\\U0020 ONE<' in written


@pytest.mark.parametrize("name", [name for name in KINDS if name != "a.properties"])
def test_a_translation_with_tags_is_written_as_it_is(name):
    """Models without attention, and memories, translate a text with the tags in it."""
    content, written = KINDS[name]
    document = FILES[Path(name).suffix]((content % written("<b>one</b> R&D two")).encode(), Path(name))
    [segment] = document.segments
    text = software_text(segment.text, segment.with_tags)
    assert isinstance(text, FormattedSoftwareText)
    assert with_tags(text) == "<b>one</b> R&D two"
    memory = TranslationMemory()
    memory._targets = {"<b>one</b> R&D two": "zwei <b>F&E</b> eins"}
    answer = memory.answer(text)
    assert answer is not None
    segment.translate(answer)
    assert written("zwei <b>F&E</b> eins").strip('"') in document.content().decode()


def test_a_translation_with_other_tags_is_a_text():
    answer = GenerateResponse(hypotheses=[Hypothesis(text="a <i>b</i>")])
    assert in_json("<b>one</b> two", lambda _: answer)[1] == "<b>a</b> &lt;i>b&lt;/i>"


@pytest.mark.parametrize(
    ("text", "target", "links", "written"),
    [
        ("{name} <b>now</b>", "{|name|}.", "0 1 0", "<b>{name}</b>."),
        ("{{name}} <b>now</b>", "NOW|{{|name|}}", "1 1 1 0", "<b>NOW</b>{{name}}"),
        ("%1$s <b>now</b>", "%|1$s", "0 1", "<b>%1$s</b>"),
        (
            "<b>go</b> {first_name} {last_name}",
            "{last_|name}| {first_name}",
            "1 0 2",
            "<b>{last_name}</b> {first_name}",
        ),
        ("{na<b>me</b>} now", "NOW {na|me|}", "3 0 1 2", "NOW {na<b>me</b>}"),
    ],
)
def test_a_placeholder_is_never_cut(text, target, links, written):
    """Unless the source has it so."""
    sources = "{na|me|} now" if "{na<" in text else ""
    answer = aligned(target, links, sources)
    assert json.loads(translated("a.json", json.dumps([text]), answer)[1]) == [written]


@pytest.mark.parametrize(
    "content",
    [
        "<resources><string name='a'>&lt;b>Tap <i>here&lt;/b> now</i></string></resources>",
        "<resources><string name='a'>&lt;b>Tap <i>here&lt;/b> now &lt;/b></i> &lt;u>x&lt;/u>"
        "</string></resources>",
    ],
)
def test_a_tag_does_not_end_within_another_element(content):
    ElementTree.fromstring(translated("strings.xml", content, backwards)[1])


@pytest.mark.parametrize(
    "text",
    [
        "<p>one two</p><style>p {margin: 1px}</style>",
        "<!-- one --> two",
        '<span translate="no">Acme</span> b',
        "<ruby>one</ruby> two",
    ],
)
def test_a_page_in_a_string_is_one_text(text):
    """Only a parser of HTML tells its scripts, comments and names from texts."""
    assert in_json(text)[0] == [text]
