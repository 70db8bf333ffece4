"""Strings of programs in XML: only texts change, and programs that know the kinds read them."""

import plistlib
from io import BytesIO
from pathlib import Path

import pytest
from translate.storage import aresource, resx

from seq2seq_serve.documents.kinds import FILES
from seq2seq_serve.documents.segments import WrongFile
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateResponse, Hypothesis
from tests.documents.answers import backwards, capitals, translated

ANDROID = r"""<?xml version="1.0" encoding="utf-8"?>
<resources xmlns:xliff="urn:oasis:names:tc:xliff:document:1.2">
    <!-- <string name="no">no</string> -->
    <string name="a">Don\'t <b>stop</b> &amp; go\nnow</string>
    <string name="b" translatable="false">Brand</string>
    <string name="c">@string/a</string>
    <string name="d">Hi <xliff:g id="n" example="Bob">42</xliff:g></string>
    <plurals name="e">
        <item quantity="one">one song</item>
        <item quantity="other">many songs</item>
    </plurals>
    <string-array name="f"><item>"  quoted  "</item><item>caf\u00e9</item></string-array>
    <string name="h"><![CDATA[<b>code</b>]]></string>
    <color name="g">red</color>
</resources>
"""
RESX = """<?xml version="1.0" encoding="utf-8"?>
<root>
  <xsd:schema id="root" xmlns:xsd="http://www.w3.org/2001/XMLSchema" />
  <resheader name="version"><value>two</value></resheader>
  <data name="A" xml:space="preserve"><value>Hello &lt; there</value><comment>a comment</comment></data>
  <data name="B" type="System.Drawing.Color"><value>Red</value></data>
  <data name="&gt;&gt;button.Name" xml:space="preserve"><value>button</value></data>
</root>
"""
STRINGSDICT = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE plist PUBLIC "-//Apple//DTD PLIST 1.0//EN" "http://www.apple.com/DTDs/PropertyList-1.0.dtd">
<plist version="1.0"><dict><key>key</key><dict>
<key>NSStringLocalizedFormatKey</key><string>%#@n@</string>
<key>n</key><dict><key>NSStringFormatValueTypeKey</key><string>d</string>
<key>one</key><string>a file</string><key>other</key><string>some files</string></dict>
</dict></dict></plist>
"""


@pytest.mark.parametrize(
    ("name", "content"), [("a.xml", ANDROID), ("a.resx", RESX), ("a.stringsdict", STRINGSDICT)]
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_strings_without_translations_are_as_they_were(name, content, encoding, newline):
    encoded = content.replace("\n", newline).encode(encoding)
    assert FILES[Path(name).suffix](encoded, Path(name)).content() == encoded


def test_android_keeps_styles_escapes_and_what_is_not_to_be_translated():
    texts, written = translated("a.xml", ANDROID, capitals)
    assert texts == ["Don't stop & go", "now", "Hi 42", "one song", "many songs", "quoted", "café"]
    expected = ANDROID.replace(r"Don\'t <b>stop</b> &amp; go\nnow", r"DON\'T <b>STOP</b> &amp; GO\nNOW")
    expected = (
        expected.replace("Hi ", "HI ").replace("one song", "ONE SONG").replace("many songs", "MANY SONGS")
    )
    assert written == expected.replace("quoted", "QUOTED").replace(r"caf\u00e9", "CAFÉ")
    store = aresource.AndroidResourceFile.parsestring(written.encode())
    assert str(store.units[0].target) == "DON'T <b>STOP</b> &amp; GO\nNOW"
    assert "<b>STOP</b> DON\\'T" in translated("a.xml", ANDROID, backwards)[1]


@pytest.mark.parametrize("text", ["{n, plural, other {files}}", "%1$s / %2$d", "https://a.b/c"])
def test_choices_of_icu_and_strings_without_words_stay(text):
    content = f"<resources><string>{text}</string></resources>"
    assert translated("a.xml", content, capitals) == ([], content)


@pytest.mark.parametrize("target", ["@ami là", "?ami là", " @ami"])
def test_a_target_is_not_a_reference_of_android(target):
    """The build failed, or took the text from another string."""
    content = r"<resources><string>\@ami \?</string></resources>"
    answer = GenerateResponse(hypotheses=[Hypothesis(text=target)])
    texts, written = translated("a.xml", content, lambda _: answer)
    assert texts == ["@ami ?"]
    escaped = target.strip().replace("@", r"\@").replace("?", r"\?")
    assert written == f"<resources><string>{escaped}</string></resources>"


def test_a_string_over_several_lines_of_android_keeps_its_indentation():
    """Its white space, which is not shown, became line breaks that are."""
    content = "<resources><string>\n   A long\n   text\n</string></resources>"
    texts, written = translated("a.xml", content, capitals)
    assert texts == ["A long text"]
    assert written == "<resources><string>\n   A LONG TEXT\n</string></resources>"


def test_resx_keeps_comments_and_what_is_not_a_string():
    texts, written = translated("a.resx", RESX, capitals)
    assert texts == ["Hello < there"]
    assert written == RESX.replace("Hello &lt; there", "HELLO &lt; THERE")
    store = resx.RESXFile.parsestring(written.encode())
    assert store.units[0].target == "HELLO < THERE"


def test_resx_keeps_line_breaks():
    content = "<root><data><value>one &amp; two\n  three\n\nfour&#xA;five six</value></data></root>"
    texts, written = translated("a.resx", content, backwards)
    assert texts == ["one & two", "three", "four", "five six"]
    expected = content.replace("one &amp; two", "TWO &amp; ONE").replace("five six", "SIX FIVE")
    assert written == expected.replace("three", "THREE").replace("four", "FOUR")


def test_the_plural_forms_of_apples_strings_are_texts():
    texts, written = translated("a.stringsdict", STRINGSDICT, capitals)
    assert texts == ["a file", "some files"]
    before, after = plistlib.loads(STRINGSDICT.encode()), plistlib.load(BytesIO(written.encode()))
    before["key"]["n"] |= {"one": "A FILE", "other": "SOME FILES"}
    assert after == before


def test_a_declared_encoding_stays():
    content = '<?xml version="1.0" encoding="iso-8859-1"?><resources><string>für</string></resources>'
    texts, written = translated("a.xml", content.encode("latin-1"), lambda _: capitals("für 안"))
    assert texts == ["für"]
    assert written == content.replace("für", "FÜR &#50504;").encode("latin-1")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "<html>x</html>",
            "the file begins with <html>, and must begin with <resources>: XML of other kinds",
        ),
        ("<resources>", "the file is not XML: no element found"),
        ("let x = 1", "the file is not XML: syntax error"),
        ('<!DOCTYPE r [<!ENTITY a "b">]><resources/>', "the file declares entities"),
        ('<!DOCTYPE r [<!ENTITY % a "b">]><resources/>', "the file declares entities"),
    ],
)
def test_xml_of_another_kind_is_refused_in_one_line(content, message):
    with pytest.raises(WrongFile) as caught:
        translated("a.xml", content, capitals)
    assert caught.value.strerror.startswith(message)
