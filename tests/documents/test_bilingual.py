"""XLIFF, Qt's .ts and TMX: texts without a translation get one, and everything else stays."""

from pathlib import Path

import pytest
from translate.storage import tmx, ts2, xliff

from seq2seq_serve.documents.bilingual import Xliff
from seq2seq_serve.documents.kinds import FILES
from seq2seq_serve.documents.segments import WrongFile
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateResponse, Hypothesis
from tests.documents.answers import aligned, backwards, capitals, translated

XLIFF = """<?xml version="1.0" encoding="UTF-8"?>
<xliff version="1.2" xmlns="urn:oasis:names:tc:xliff:document:1.2">
  <file source-language="en" target-language="de" original="a" datatype="plaintext"><body>
    <trans-unit id="1">
      <source>Hello <g id="1">big <x id="2"/>world</g></source>
      <note>a note</note>
    </trans-unit>
    <trans-unit id="2"><source>Done</source><target>Fertig</target></trans-unit>
    <trans-unit id="3"><source>New &amp; old</source><target state="new">New</target>
      <alt-trans><source>Other</source><target>Anders</target></alt-trans></trans-unit>
    <trans-unit id="4" translate="no"><source>Brand</source></trans-unit>
    <group translate="no"><trans-unit id="5"><source>Brand</source></trans-unit></group>
    <trans-unit id="6"><source>Empty %s</source><target/></trans-unit>
  </body></file>
</xliff>
"""
XLIFF2 = """<xliff version="2.0" xmlns="urn:oasis:names:tc:xliff:document:2.0" srcLang="en" trgLang="de">
<file id="f"><unit id="1">
  <segment state="initial"><source>Hello <pc id="1">there</pc></source></segment>
  <ignorable><source> and </source></ignorable>
  <segment><source>Empty</source><target></target></segment>
  <segment state="final"><source>Done</source><target>Fertig</target></segment>
</unit></file></xliff>
"""
QT = """<?xml version="1.0" encoding="utf-8"?>
<!DOCTYPE TS>
<TS version="2.1" language="de_DE">
<context>
    <name>Main</name>
    <message>
        <location filename="a.cpp" line="3"/>
        <source>Open &amp;file</source>
        <translation type="unfinished"></translation>
    </message>
    <message numerus="yes">
        <source>%n file(s)</source>
        <translation type="unfinished">
            <numerusform></numerusform>
            <numerusform/>
        </translation>
    </message>
    <message><source>old</source><translation type="vanished"></translation></message>
    <message><source>done</source><translation>fertig</translation></message>
</context>
</TS>
"""
TMX = """<?xml version="1.0"?>
<!DOCTYPE tmx SYSTEM "tmx14.dtd">
<tmx version="1.4"><header srclang="en" datatype="plaintext"/><body>
  <tu><tuv xml:lang="en"><seg>One</seg></tuv><tuv xml:lang="de"><seg>Eins</seg></tuv></tu>
  <tu>
    <tuv xml:lang="EN"><seg>Two <hi>three</hi></seg></tuv>
  </tu>
  <tu><tuv xml:lang="en"><seg>Four</seg></tuv><tuv xml:lang="de"><seg/></tuv></tu>
</body></tmx>
"""


def same(text: str) -> GenerateResponse:
    return GenerateResponse(hypotheses=[Hypothesis(text=text)])


@pytest.mark.parametrize(
    ("name", "content"), [("a.xliff", XLIFF), ("a.xlf", XLIFF2), ("a.ts", QT), ("a.tmx", TMX)]
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_file_without_new_translations_is_as_it_was(name, content, encoding, newline):
    encoded = content.replace("\n", newline).encode(encoding)
    assert FILES[Path(name).suffix](encoded, Path(name)).content() == encoded


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_xliff_gets_targets_with_their_elements(newline):
    content = XLIFF.replace("\n", newline)
    texts, written = translated("a.xliff", content, capitals)
    assert texts == ["Hello big world", "New & old", "Empty %s"]
    expected = content.replace(
        "world</g></source>",
        f'world</g></source>{newline}      <target>HELLO <g id="1">BIG <x id="2"/>WORLD</g></target>',
    )
    expected = expected.replace('<target state="new">New<', '<target state="translated">NEW &amp; OLD<')
    assert written == expected.replace(
        "<target/>", '<target state="needs-review-translation">EMPTY %S</target>'
    )
    units = xliff.xlifffile.parsestring(written.encode()).units
    assert [str(unit.target) for unit in units if unit.target] == [
        "HELLO BIG WORLD",
        "Fertig",
        "NEW & OLD",
        "EMPTY %S",
    ]
    assert 'state="translated">Empty %s<' in translated("a.xliff", content, same)[1]


@pytest.mark.parametrize(
    "target",
    [
        "",
        "<target/>",
        '<target><mrk mtype="seg" mid="0"></mrk><mrk mid="1" mtype="seg"/></target>',
        '<target state="new"><mrk mtype="seg" mid="0">One</mrk></target>',
    ],
)
def test_a_unit_in_segments_gets_a_target_in_segments(target):
    """Empty ones were taken for a translation, and others got a target without segments."""
    source = (
        '<seg-source><mrk mtype="seg" mid="0">One <mrk mtype="x">b</mrk> c.</mrk> <mrk mtype="seg" mid="1">'
        '<mrk mtype="protected">X</mrk> two <g id="1">three</g></mrk></seg-source>'
    )
    before = '<xliff version="1.2"><trans-unit id="1"><source>One b c. X two three</source>' + source
    content = f"{before}{target}</trans-unit></xliff>"
    texts, written = translated("a.xlf", content, capitals)
    assert texts == ["One b c.", "X two three"]
    _, _, found = written.partition("</seg-source>")
    expected = source.replace("seg-source", "target").replace("One", "ONE").replace(">b<", ">B<")
    expected = expected.replace("c.", "C.").replace("two", "TWO").replace("three", "THREE")
    state = ' state="translated"' if target else ""
    assert found == expected.replace("<target", f"<target{state}") + "</trans-unit></xliff>"


def test_a_new_target_is_not_approved():
    unit = '<trans-unit id="1" approved="{}" x="y"><source>One</source>{}</trans-unit>'
    unit = f'<xliff version="1.2">{unit}</xliff>'
    for approved in ("yes", "no"):
        written = translated("a.xlf", unit.format(approved, "<target/>"), capitals)[1]
        assert "approved" not in written
        assert '<trans-unit id="1" x="y">' in written
    done = unit.format("yes", "<target>Eins</target>")
    assert translated("a.xlf", done, capitals) == ([], done)


def test_a_target_stands_beside_its_source_and_not_in_an_alternative():
    begin = "<xliff><trans-unit><source>Hi there</source>"
    end = "<alt-trans><source>Hi</source><target>Hallo</target></alt-trans></trans-unit></xliff>"
    assert translated("a.xlf", begin + end, capitals)[1] == f"{begin}<target>HI THERE</target>{end}"


@pytest.mark.parametrize("source", ["&lt;file&gt;Go now", "Go to %1 now", "Go %L1, &quot;%n&quot;"])
def test_a_translation_without_placeholders_is_to_be_reviewed(source):
    """Tags were compared as they are written, and those of Qt were not known."""
    content = f"<TS><message><source>{source}</source><translation/></message></TS>"
    _, written = translated("a.ts", content, lambda _: same("Geh"))
    assert '<translation type="unfinished">Geh<' in written
    assert "<translation>" in translated("a.ts", content, same)[1]


@pytest.mark.parametrize(
    "source", ["{n, plural, =1 {a file} other {files}}", "{V, plural, other {<x/> files}}", "%1: <x/>", "%1"]
)
def test_choices_of_icu_and_texts_without_words_stay(source):
    content = f"<xliff><trans-unit><source>{source}</source></trans-unit></xliff>"
    assert translated("a.xlf", content, capitals) == ([], content)


def test_xliff_2_gets_targets_and_states():
    texts, written = translated("a.xlf", XLIFF2, capitals)
    assert texts == ["Hello there", "Empty"]
    expected = XLIFF2.replace(
        '"initial"><source>Hello <pc id="1">there</pc></source>',
        '"translated"><source>Hello <pc id="1">there</pc></source>'
        '<target>HELLO <pc id="1">THERE</pc></target>',
    )
    assert written == expected.replace(
        "<segment><source>Empty", '<segment state="translated"><source>Empty'
    ).replace("<target></target>", "<target>EMPTY</target>")


def test_qt_gets_translations_and_forms_and_one_without_its_placeholder_stays_unfinished():
    texts, written = translated("a.ts", QT, capitals)
    assert texts == ["Open &file", "%n file(s)"]
    expected = QT.replace('type="unfinished"></translation>', "XX").replace(
        "<translation XX", "<translation>OPEN &amp;FILE</translation>"
    )
    form = "<numerusform>%N FILE(S)</numerusform>"
    assert written == expected.replace("<numerusform></numerusform>", form).replace("<numerusform/>", form)
    units = ts2.tsfile.parsestring(written.encode()).units
    assert [(str(unit.target), unit.isfuzzy()) for unit in units[:2]] == [
        ("OPEN &FILE", False),
        ("%N FILE(S)", True),
    ]
    assert "unfinished" not in translated("a.ts", QT, same)[1]


def test_qt_keeps_line_breaks():
    content = "<TS><message><source>a &amp; b\n c %1</source><translation/></message></TS>"
    document = FILES[".ts"](content.encode(), Path("a.ts"))
    first, second = document.segments
    assert [first.text, second.text] == ["a & b", "c %1"]
    first.translate(same("B & A"))
    unfinished = '<translation type="unfinished">B &amp; A\n c %1</translation>'
    assert document.content().decode() == content.replace("<translation/>", unfinished)
    second.translate(same("%1 C"))
    whole = "<translation>B &amp; A\n %1 C</translation>"
    assert document.content().decode() == content.replace("<translation/>", whole)


@pytest.mark.parametrize(("content", "before"), [(XLIFF, ' target-language="de"'), (XLIFF2, ' trgLang="de"')])
def test_xliff_without_a_target_language_gets_it(content, before):
    assert before in content
    document = Xliff(content.replace(before, "").encode(), Path("a.xliff"))
    assert before not in document.content().decode()
    document.target_language = "de"
    assert before in document.content().decode()
    document = Xliff(content.encode(), Path("a.xliff"))
    document.target_language = "fr"
    assert document.content().decode() == content


def test_a_text_of_which_a_part_failed_is_to_be_reviewed():
    content = XLIFF2.replace("Hello <pc", "Hello <br/> <pc")
    document = FILES[".xlf"](content.encode(), Path("a.xlf"))
    first, *_ = document.segments
    first.translate(capitals(first.text))
    assert '"initial"><source>Hello' in document.content().decode()


@pytest.mark.parametrize(
    ("content", "begin", "state"),
    [
        (XLIFF, '<source>Hello <g id="1">', '<target state="needs-review-translation">'),
        (XLIFF, "<source>New ", '<target state="needs-review-translation"></target>'),
        (XLIFF2, '<segment state="initial">', "<target>"),
        (XLIFF2, "<segment><source>Empty", "<target></target>"),
        (QT, "<source>Open ", '<translation type="unfinished"></translation>'),
    ],
)
@pytest.mark.parametrize("target", ["", " "])
@pytest.mark.parametrize("mark", ["", "- "])
def test_an_empty_target_is_to_be_reviewed(content, begin, state, target, mark):
    """It was marked as translated."""
    suffix = ".ts" if content is QT else ".xlf"
    content, state = content.replace("<source>", f"<source>{mark}"), state.replace("></", f">{mark}</")
    begin = begin.replace("<source>", f"<source>{mark}")
    _, written = translated(f"a{suffix}", content, lambda _: same(target))
    assert state in written.partition(begin)[2].partition("</segment>")[0].partition("</trans-unit>")[0]
    assert "translated" not in written


@pytest.mark.parametrize("placeholder", ["<x id='1'/>", "<ph id='1'/>"])
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("Click {} to go", "GO TO CLICK {}"),
        ("Click{} to go", "GO TO CLICK{}"),
        ("Click {}to go", "GO TO CLICK {}"),
        ("Click <g id='2'>to {}</g> go", "GO <g id='2'>TO {}</g> CLICK"),
        ("Click <g id='2'>{} to</g> go", "GO <g id='2'>{} TO</g> CLICK"),
        ("Click {} {} to go", "GO TO CLICK {} {}"),
        ("Click {}{} to go", "GO TO CLICK {}{}"),
        ("({} files)", "FILES) ({}"),
    ],
)
def test_a_placeholder_is_not_glued_to_a_word_but_where_the_source_has_it_so(placeholder, source, expected):
    unit = '<xliff version="1.2"><trans-unit id="1"><source>{}</source>{}</trans-unit></xliff>'
    source, expected = (text.replace("{}", placeholder) for text in (source, expected))
    written = translated("a.xlf", unit.format(source, ""), backwards)[1]
    assert written == unit.format(source, f"<target>{expected}</target>")


def test_a_word_after_a_placeholder_has_the_space_of_the_source():
    unit = '<xliff version="1.2"><trans-unit id="1"><source>{}</source>{}</trans-unit></xliff>'
    for source, expected in (
        ("Click <x/> to go", "X <x/> Y Z"),
        ("Click<x/> to go", "X<x/> Y Z"),
        ("Click <x/>to go", "X <x/>Y Z"),
        ("Click <x/>. Go", "X <x/> Y Z"),
        ("Click <x/><x/>to go", "X <x/><x/>Y Z"),
    ):
        written = translated("a.xlf", unit.format(source, ""), aligned("X Y Z"))[1]
        assert written == unit.format(source, f"<target>{expected}</target>")


def test_tmx_gets_the_other_language():
    texts, written = translated("a.tmx", TMX, capitals)
    assert texts == ["Two three", "Four"]
    expected = TMX.replace(
        "three</hi></seg></tuv>",
        'three</hi></seg></tuv>\n    <tuv xml:lang="de"><seg>TWO <hi>THREE</hi></seg></tuv>',
    )
    assert written == expected.replace("<seg/>", "<seg>FOUR</seg>")
    units = tmx.tmxfile.parsestring(written.encode()).units
    assert [unit.target for unit in units] == ["Eins", "TWO THREE", "FOUR"]


@pytest.mark.parametrize(
    ("header", "first", "other"),
    [("en", "en-US", "de"), ("EN-us", "en-US", "en-GB"), ("*all*", "en-US", "de"), ("en-US", "en", "de")],
)
def test_tmx_has_the_language_of_its_header_with_or_without_a_region(header, first, other):
    content = TMX.replace('srclang="en"', f'srclang="{header}"').replace('"de"', f'"{other}"')
    for language in ("en", "EN"):
        case = first.upper() if language.isupper() else first
        content = content.replace(f'xml:lang="{language}"', f'xml:lang="{case}"')
    texts, written = translated("a.tmx", content, capitals)
    assert texts == ["Two three", "Four"]
    assert f'<tuv xml:lang="{other}"><seg>TWO <hi>THREE</hi></seg></tuv>' in written


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.tmx",
            TMX.replace('srclang="en"', 'srclang="ko"'),
            "the srclang of the file is ko, and its texts are in en, de, EN: correct it",
        ),
        ("a.ts", QT.replace("<numerusform/>", "<numerusform/>" * 6), "a message has 7 plural forms"),
        ("a.ts", "let x = 1", "the file is not XML: syntax error"),
        ("a.xliff", "<tmx/>", "the file begins with <tmx>, and must begin with <xliff>"),
        ("a.tmx", TMX.replace('"de"', '"en"'), "the file has translations into no language"),
        ("a.tmx", TMX.replace('"de"', '"fr"', 1), "the file has translations into fr, de, and must have"),
    ],
)
def test_what_cannot_be_completed_is_refused(name, content, message):
    with pytest.raises(WrongFile) as caught:
        translated(name, content, capitals)
    assert caught.value.strerror.startswith(message)


@pytest.mark.parametrize(
    ("state", "is_translated"), [("initial", True), ("translated", False), ("final", False)]
)
def test_a_segment_with_a_target_is_translated_if_its_state_is_initial(state, is_translated):
    """It was not, as if each target were a translation."""
    segment = f'<segment state="{state}"><source>One</source><target>One</target></segment>'
    content = f'<xliff version="2.0" trgLang="ko"><file><unit id="1">{segment}</unit></file></xliff>'
    texts, written = translated("a.xliff", content, capitals)
    assert texts == ["One"] * is_translated
    assert ('<segment state="translated"><source>One</source><target>ONE<' in written) == is_translated
    assert (written == content) == (not is_translated)


@pytest.mark.parametrize("state", ["translated", "final", "signed-off", "needs-review-translation"])
def test_a_target_of_another_state_stays(state):
    unit = f'<trans-unit id="1"><source>One</source><target state="{state}">Eins</target></trans-unit>'
    content = f'<xliff version="1.2"><file target-language="ko"><body>{unit}</body></file></xliff>'
    assert translated("a.xliff", content, capitals) == ([], content)
